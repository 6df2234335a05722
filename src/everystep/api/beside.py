"""What is mixed into the logits of a prompt: those of a negative prompt, or of an amateur model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from everystep.config.kinds import is_number
from everystep.engine import Contrast, Guidance
from everystep.errors import ModelClassError, RequestError, UnsupportedError
from everystep.processors.guidance import (
    UnbatchedClassifierFreeGuidanceLogitsProcessor as _UnbatchedGuidance,
)
from everystep.types import Prompt

if TYPE_CHECKING:
    from everystep.api.inputs import Inputs
    from everystep.api.model import LanguageModel
    from everystep.api.options import Options

ALPHA, BETA = 0.1, 1.0
_NUMBERS: dict[str, tuple[float, str, Callable[[float], bool]]] = {
    "contrast_alpha": (ALPHA, "a number above 0, at most 1", lambda value: 0 < value <= 1),
    "contrast_beta": (BETA, "a number of at least 0", lambda value: 0 <= value < float("inf")),
}


def read_contrast(model: LanguageModel, given: Mapping[str, Any]) -> Contrast | None:
    """Contrastive decoding as the keywords ask for it, or None."""
    amateur = given.get("amateur_model")
    asked = [name for name in _NUMBERS if given.get(name) is not None]
    if amateur is None and asked:
        what = f"{asked[0]} says how to contrast with a model that is not given"
        raise RequestError(what, wanted="amateur_model with it", got="none")
    if amateur is None:
        return None
    _require_model(amateur)
    if model.is_encoder_decoder or amateur.is_encoder_decoder:
        what = "amateur_model works with decoders alone"
        raise UnsupportedError(what, got="an encoder-decoder model", do="Leave it out")
    if amateur.vocab_size != model.vocab_size:
        raise RequestError(
            "the amateur model has another vocabulary",
            wanted=f"{model.vocab_size} ids",
            got=amateur.vocab_size,
            do="Choose a smaller model of the same family",
        )
    alpha, beta = (_number(name, given.get(name)) for name in _NUMBERS)
    # Of one model it is always the same method, so that contrasts with it are equal.
    return Contrast(amateur.executor, alpha, beta)


def _require_model(amateur: Any) -> None:
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
        raise RequestError(f"{name} is impossible", wanted=wanted, got=repr(value))
    return float(value)


def mixing_of(options: Options, inputs: Inputs) -> Guidance | Contrast | None:
    """How logits become one row; RequestError where the amateur cannot read a prompt."""
    scale = options.effective.guidance_scale
    own = any(type(one) is _UnbatchedGuidance for one in options.processors)
    guides = not (scale is None or scale == 1 or own)
    if options.contrast is None:
        return Guidance(float(scale)) if guides else None
    if guides:
        raise RequestError(
            "amateur_model and guidance_scale both change the logits",
            wanted="one of the two",
            got=f"guidance_scale={scale}",
            do="Leave one of the two out",
        )
    gifted = any(hook.gives for hook in options.hooks)
    if gifted or not all(map(_is_plain, inputs.prompts)):
        raise RequestError(
            "the amateur model reads ids alone",
            wanted="prompts given as ids, whole, at positions 0, 1, ...",
            got="a hook that gives inputs" if gifted else "embeddings, positions, or a cached past",
            do="Leave amateur_model out, or pass the whole prompt as ids",
        )
    return options.contrast


def _is_plain(prompt: Prompt) -> bool:
    """Whether ids are all that there is of the prompt."""
    known = prompt.ids is not None and len(prompt.ids) == prompt.length
    return known and not (prompt.brings or prompt.past is not None or prompt.encoder is not None)


def companions_of(
    options: Options, inputs: Inputs, row: int, vocabulary: int
) -> tuple[Prompt, ...]:
    """The prompts whose rows follow those of a prompt: guidance reads the negative prompt, or the
    last token of the prompt, beside the row."""
    if not isinstance(mixing_of(options, inputs), Guidance):
        return ()
    if inputs.negative:
        return (inputs.negative[row],)
    ids = inputs.prompts[row].ids
    if ids is None or ids[-1] >= vocabulary:
        raise RequestError(
            "guidance_scale needs something to guide away from",
            wanted="negative_prompt_ids, or a prompt given as ids",
            got="inputs_embeds only" if ids is None else f"a prompt that ends with id {ids[-1]}",
            do="Pass negative_prompt_ids",
        )
    return (Prompt(ids=ids[-1:]),)
