"""Which columns of a model's matrices matter: what each is multiplied by while a text is read."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from everystep.models.families import find_family
from everystep.models.model import Model
from everystep.nn.modes import inference_mode
from everystep.nn.observed import observations, observed


def column_squares(model: Model, ids: Tensor, window: int) -> dict[str, Tensor]:
    """Return (columns,), by a checkpoint's names: the mean square of what multiplies a column.

    A matrix is multiplied as the model reads `ids` (n,), `window` of them at a time. Matrices that
    nothing is multiplied by are left out.
    """
    network = observed(model.network)
    reader = replace(model, network=network)
    with inference_mode():
        for part in ids.split(window):  # type: ignore[no-untyped-call]
            reader.forward(part[None])
    parameters = find_family(model.config.model_type).all_parameters(model.config, model.spec)
    found: dict[str, Tensor] = {}
    for key, squares in observations("", network):
        # The head of a tied model is the table of embeddings.
        known = parameters.get(f"{key}.weight") or parameters["embed"]
        found |= {part.name: squares.mean() for part in known.parts if squares.count}
    return found
