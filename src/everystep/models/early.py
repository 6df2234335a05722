"""A model's first layers with its head: what drafts for the model by leaving early."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

from everystep.errors import RequestError, UnsupportedError
from everystep.models.decoder import Decoder
from everystep.models.model import Model

_KNOWN: WeakKeyDictionary[Model, dict[int, Model]] = WeakKeyDictionary()
"""Parts of models that exist, so that what an executor packs of one serves every call."""


def first_layers(model: Model, count: int) -> Model:
    """Make a model of the first `count` layers, the last norm and the head; it shares all weights.

    Source: Elhoushi et al. 2024 (LayerSkip); transformers' EarlyExitCandidateGenerator.
    """
    network = model.network
    if not isinstance(network, Decoder):
        raise UnsupportedError(
            "no layers of this family of models can be left early",
            wanted="a decoder",
            got=type(network).__name__,
            do="Leave assistant_early_exit out",
        )
    layers = len(network.layers)
    if not 0 < count < layers:
        raise RequestError(
            "assistant_early_exit leaves no layer out",
            wanted=f"1 to {layers - 1} of the {layers} layers",
            got=count,
            do="Choose fewer layers than the model has",
        )
    known = _KNOWN.setdefault(model, {})
    if count not in known:
        spec = replace(network.spec, layers=network.spec.layers[:count])
        part = replace(
            network, spec=spec, layers=network.layers[:count], rules=network.rules[:count]
        )
        known[count] = replace(model, spec=spec, network=part)
    return known[count]
