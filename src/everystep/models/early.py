"""A model's first layers with its head: what drafts for the model by leaving early."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

from everystep.errors import RequestError, UnsupportedError
from everystep.models.decoder import Decoder
from everystep.models.encoder_decoders.network import EncoderDecoder
from everystep.models.model import Model
from everystep.nn.network import Network

_KNOWN: WeakKeyDictionary[Model, dict[int, Model]] = WeakKeyDictionary()
"""Parts of models that exist, so that what an executor packs of one serves every call."""


def first_layers(model: Model, count: int) -> Model:
    """Make a model of the first `count` layers, the last norm and the head; it shares all weights.

    Source: Elhoushi et al. 2024 (LayerSkip); transformers' EarlyExitCandidateGenerator.
    """
    network = model.network
    if not isinstance(network, Decoder | EncoderDecoder):
        raise UnsupportedError(
            "no layers of this family of models can be left early",
            wanted="a model of attention layers",
            got=type(network).__name__,
            do="Leave assistant_early_exit out",
        )
    layers = len(network.stores)
    if not 0 < count < layers:
        raise RequestError(
            "assistant_early_exit leaves no layer out",
            wanted=f"1 to {layers - 1} of the {layers} layers",
            got=count,
            do="Choose fewer layers than the model has",
        )
    known = _KNOWN.setdefault(model, {})
    if count not in known:
        part: Network
        if isinstance(network, Decoder):
            part = _cut_decoder(network, count)
        else:
            part = _cut_encoder_decoder(network, count)
        known[count] = replace(model, spec=part.spec, network=part)
    return known[count]


def _cut_decoder(network: Decoder, count: int) -> Decoder:
    spec = replace(network.spec, layers=network.spec.layers[:count])
    return replace(network, spec=spec, layers=network.layers[:count], rules=network.rules[:count])


def _cut_encoder_decoder(network: EncoderDecoder, count: int) -> EncoderDecoder:
    """Return the network with the whole encoder and so many layers of the decoder."""
    spec = replace(network.spec, decoder=replace(network.spec.decoder, layers=count))
    layers, norm = network.decoder[:count], network.norm
    if (own := layers[-1].mlp_norm) is not None and not network.spec.pre_norm:
        # Where layers normalise what they give, that ends the stack.
        layers, norm = (*layers[:-1], replace(layers[-1], mlp_norm=None)), own
    return replace(network, spec=spec, decoder=layers, norm=norm)
