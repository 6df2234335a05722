"""What becomes of logits before processors: contrasted with layers, then mixed with others."""

from __future__ import annotations

from typing import TYPE_CHECKING
from warnings import warn

from everystep.api.beside import mixing_of
from everystep.api.inputs import Inputs
from everystep.api.options import Options
from everystep.engine import Contrast, DoLa
from everystep.engine.dola import candidate_layers
from everystep.errors import RequestError
from everystep.types.protocols import Readout

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel


def readout_of(model: LanguageModel, options: Options, inputs: Inputs) -> Readout | None:
    """What mixes logits: of earlier layers, of a companion or an amateur, or of layers and then of
    a companion."""
    e, mixing = options.effective, mixing_of(options, inputs)
    if not e.dola_layers or int(e.num_beams or 1) > 1:
        return mixing
    if isinstance(mixing, Contrast):
        raise RequestError(
            "amateur_model and dola_layers both contrast the logits",
            wanted="one of the two",
            got=f"dola_layers={e.dola_layers!r}",
            do="Leave one of the two out",
        )
    if model.is_encoder_decoder:
        raise RequestError(
            "dola_layers contrasts the layers of a decoder alone",
            wanted="a decoder-only model",
            got="a model with an encoder",
            do="Leave dola_layers out",
        )
    asked = e.dola_layers if isinstance(e.dola_layers, str) else [*e.dola_layers]
    layers = candidate_layers(asked, model.depth, tied=model.has_tied_head)
    strange = [] if isinstance(asked, str) else [one for one in asked if one not in layers]
    wanted, got = f"layers from 0 to {model.depth - 1}", f"dola_layers={asked}"
    if not layers or min(strange, default=0) < 0:
        do = "Name some of them, or set dola_layers='high'"
        raise RequestError("dola_layers names no layer to contrast", wanted=wanted, got=got, do=do)
    if strange:
        text = f"dola_layers: the model has no layers {strange} to contrast with; wanted {wanted}."
        warn(f"{text} They are left out.", UserWarning, stacklevel=5)
    return DoLa(layers, mixing)
