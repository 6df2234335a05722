"""What becomes of logits before processors: contrasted with layers, guided by a companion."""

from __future__ import annotations

from typing import TYPE_CHECKING
from warnings import warn

from everystep.api.inputs import Inputs
from everystep.api.options import Options
from everystep.engine import DoLa, Guidance
from everystep.engine.dola import candidate_layers
from everystep.errors import RequestError
from everystep.processors.guidance import (
    UnbatchedClassifierFreeGuidanceLogitsProcessor as _UnbatchedGuidance,
)
from everystep.types import Prompt
from everystep.types.protocols import Readout

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel


def readout_of(model: LanguageModel, options: Options) -> Readout | None:
    """What mixes logits: of earlier layers, of a companion, or of the one and then the other."""
    e, guidance = options.effective, guidance_of(options)
    if not e.dola_layers or int(e.num_beams or 1) > 1:
        return guidance
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
    return DoLa(layers, guidance)


def guidance_of(options: Options) -> Guidance | None:
    """Guidance by a companion, unless the caller's own processor guides."""
    scale = options.effective.guidance_scale
    own = any(type(one) is _UnbatchedGuidance for one in options.processors)
    return None if scale is None or scale == 1 or own else Guidance(float(scale))


def companion_of(inputs: Inputs, row: int, vocabulary: int) -> Prompt:
    """Guidance reads the negative prompt, or the last token of the prompt, beside the row."""
    if inputs.negative:
        return inputs.negative[row]
    ids = inputs.prompts[row].ids
    if ids is None or ids[-1] >= vocabulary:
        raise RequestError(
            "guidance_scale needs something to guide away from",
            wanted="negative_prompt_ids, or a prompt given as ids",
            got="inputs_embeds only" if ids is None else f"a prompt that ends with id {ids[-1]}",
            do="Pass negative_prompt_ids",
        )
    return Prompt(ids=ids[-1:])
