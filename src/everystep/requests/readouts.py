"""What becomes of logits before processors: they are contrasted with those of earlier layers, then
mixed with those of a negative prompt or of an amateur model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from warnings import warn

from everystep.config.kinds import is_number
from everystep.engine import Contrast, DoLa, Guidance
from everystep.engine.dola import candidate_layers
from everystep.errors import ModelClassError, RequestError, shown
from everystep.processors.guidance import (
    UnbatchedClassifierFreeGuidanceLogitsProcessor as _UnbatchedGuidance,
)
from everystep.requests.inputs import Inputs
from everystep.requests.options import Options, Steering
from everystep.requests.subject import Subject
from everystep.types import Prompt
from everystep.types.protocols import Readout

ALPHA, BETA = 0.1, 1.0
_NUMBERS: dict[str, tuple[float, str, Callable[[float], bool]]] = {
    "contrast_alpha": (ALPHA, "a number above 0, at most 1", lambda value: 0 < value <= 1),
    "contrast_beta": (BETA, "a number of at least 0", lambda value: 0 <= value < float("inf")),
}


def read_contrast(subject: Subject, amateur: Any, alpha: object, beta: object) -> Contrast | None:
    """Return contrastive decoding as the keywords ask for it, or None."""
    numbers = dict(zip(_NUMBERS, (alpha, beta), strict=True))
    if amateur is None:
        for name, value in numbers.items():
            if value is not None:
                what = f"{name} says how to contrast with a model that is not given"
                raise RequestError(what, wanted="amateur_model with it", got="none")
        return None
    _require_model(amateur)
    if amateur.vocab_size != subject.vocab_size:
        raise RequestError(
            "the amateur model has another vocabulary",
            wanted=f"{subject.vocab_size} ids",
            got=amateur.vocab_size,
            do="Choose a smaller model of the same family",
        )
    # Of one model it is always the same method, so that contrasts with it are equal.
    return Contrast(amateur.executor, *(_number(*pair) for pair in numbers.items()))


def _require_model(amateur: object) -> None:
    named = ("executor", "vocab_size", "is_encoder_decoder")
    if isinstance(amateur, type) or not all(hasattr(amateur, name) for name in named):
        raise ModelClassError(
            "amateur_model is no model of this library",
            wanted="a model, smaller than the one that is asked",
            got=type(amateur).__name__,
            do="Load it with everystep.load_model, or call everystep.wrap with it",
        )


def _number(name: str, value: Any) -> float:
    default, wanted, fits = _NUMBERS[name]
    if value is None:
        return default
    if not is_number(value) or not fits(value):
        raise RequestError(f"{name} is impossible", wanted=wanted, got=shown(value))
    return float(value)


def readout_of(
    subject: Subject, options: Options, inputs: Inputs
) -> tuple[Readout | None, tuple[tuple[Prompt, ...], ...]]:
    """Return what makes one row of scores out of several, of earlier layers, of a companion or of
    an amateur, None where scores are read as they are; and for each row the prompts whose rows
    follow its own.

    RequestError where two of them contradict each other, or cannot read the prompts.
    """
    fields, contrast = options.effective, options.choosing.contrast
    mixing = _mixing(fields.guidance_scale, contrast, options.steering, inputs.prompts)
    readout: Readout | None = mixing
    if fields.dola_layers and int(fields.num_beams or 1) == 1:
        readout = _over_layers(subject, fields.dola_layers, mixing)
    if not isinstance(mixing, Guidance):
        return readout, ((),) * inputs.batch
    size = subject.vocab_size
    return readout, tuple(_guided_away(inputs, row, size) for row in range(inputs.batch))


def _mixing(
    scale: float | None, contrast: Contrast | None, steering: Steering, prompts: Sequence[Prompt]
) -> Guidance | Contrast | None:
    """Return what mixes in other logits; RequestError where the amateur cannot read a prompt."""
    own = any(type(one) is _UnbatchedGuidance for one in steering.processors)
    guides = scale is not None and scale != 1 and not own
    if contrast is None:
        return Guidance(float(scale)) if scale is not None and guides else None
    if guides:
        raise RequestError(
            "amateur_model and guidance_scale both change the logits",
            wanted="one of the two",
            got=f"guidance_scale={scale}",
            do="Leave one of the two out",
        )
    gifted = any(hook.gives for hook in steering.hooks)
    if gifted or not all(prompt.plain for prompt in prompts):
        raise RequestError(
            "the amateur model reads ids alone",
            wanted="prompts given as ids, whole, at positions 0, 1, ...",
            got="a hook that gives inputs" if gifted else "embeddings, positions, or a cached past",
            do="Leave amateur_model out, or pass the whole prompt as ids",
        )
    return contrast


def _over_layers(subject: Subject, asked: Any, mixing: Guidance | Contrast | None) -> Readout:
    """Return what contrasts the layers that `dola_layers` asks for, and then mixes."""
    if isinstance(mixing, Contrast):
        raise RequestError(
            "amateur_model and dola_layers both contrast the logits",
            wanted="one of the two",
            got=f"dola_layers={shown(asked)}",
            do="Leave one of the two out",
        )
    asked = asked if isinstance(asked, str) else [*asked]
    layers = candidate_layers(asked, subject.depth, tied=subject.has_tied_head)
    strange = [] if isinstance(asked, str) else [one for one in asked if one not in layers]
    wanted, got = f"layers from 0 to {subject.depth - 1}", f"dola_layers={asked}"
    if not layers or min(strange, default=0) < 0:
        do = "Name some of them, or set dola_layers='high'"
        raise RequestError("dola_layers names no layer to contrast", wanted=wanted, got=got, do=do)
    if strange:
        text = f"dola_layers: the model has no layers {strange} to contrast with; wanted {wanted}."
        warn(f"{text} They are left out.", UserWarning, stacklevel=7)
    return DoLa(layers, mixing)


def _guided_away(inputs: Inputs, row: int, vocabulary: int) -> tuple[Prompt, ...]:
    """Return what guidance reads beside a row: its negative prompt, or its prompt's last token."""
    if inputs.negative:
        return (inputs.negative[row],)
    ids = inputs.prompts[row].ids
    if ids is None or ids[-1] >= vocabulary:
        raise RequestError(
            "guidance_scale needs something to guide away from",
            wanted="negative_prompt_ids, or a prompt given as ids",
            got="inputs_embeds only" if ids is None else f"a prompt that ends with id {ids[-1]}",
            do="Pass negative_prompt_ids to model.generate, or negative_prompt to another call",
        )
    return (Prompt(ids=ids[-1:]),)
