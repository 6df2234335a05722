"""The keywords of every public call, with the type of each and one line that says what it does.

The one place that describes them, beside `config/options.py` for the fields of a configuration:
type checkers and editors read the annotations, `described.py` composes help() from the lines, and
tests compare the names with those that calls take. Keywords that a signature spells out stand in
its own docstring. Inputs that a model or a caller declares under other names are passed as
`**inputs`, a `dict[str, Any]`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypedDict, TypeVar

import numpy as np
from torch import Tensor

from everystep.config import GenerationConfig
from everystep.config.options import ConfigOptions, FieldOptions
from everystep.engine import Corpus
from everystep.processors.allowed import AllowedSequences
from everystep.requests.options import Prefix
from everystep.requests.subject import Subject
from everystep.types.hooks import Hook
from everystep.types.request import Strategy

Numbers = Tensor | np.ndarray | Sequence[Any]
"""A tensor, or what one can be made of."""


class CallOptions(FieldOptions, total=False):
    """What every call takes beside the fields of a configuration."""

    allowed_sequences: AllowedSequences | Sequence[Any] | None
    """The texts, or lists of ids, of which the answer is one."""
    prefix: Prefix | None
    """What `es.prefill` made: every prompt goes on from it."""
    logprobs: int | None
    """Keep the log-probability of every chosen token, and of this many best ones."""
    prompt_logprobs: int | None
    """The same for every token of the prompt."""
    hooks: Sequence[Hook] | None
    """What sees every step and adds to it."""
    adapter_names: str | Sequence[str | None] | None
    """The adapter that the model runs with, by the name it was loaded under, or one per row."""
    schema: str | Mapping[str, Any] | bool | None
    """The JSON schema that the text follows."""
    regex: str | None
    """The regular expression that the text matches."""
    grammar: str | None
    """The grammar that the text follows."""
    choices: Sequence[str] | None
    """The texts of which the answer is one."""
    best_of: int | None
    """Draw so many samples and return the best."""
    majority: Callable[[str], Any] | None
    """With best_of: finds the answer in a text; the most frequent one wins."""
    scorer: Callable[[str], float] | None
    """With best_of: rates a text; the highest wins."""
    assistant_tokenizer: Any
    """The tokenizer of assistant_model, where it is another one."""
    draft_corpus: Corpus | None
    """Texts that drafts are copied from."""
    amateur_model: Subject | None
    """A weaker model: tokens that it finds likely too lose."""
    contrast_alpha: float | None
    """With amateur_model: tokens below this share of the best are never chosen."""
    contrast_beta: float | None
    """With amateur_model: how strongly its logits count."""


class ResultOptions(ConfigOptions, total=False):
    """What decides how many results there are, or of which class."""

    n_best: int | None
    """Return so many hypotheses of a beam search."""
    strategy: str | Strategy | None
    """The way of choosing by name ("beam", "contrastive", ...), or an object of your own."""
    strategy_options: Mapping[str, Any] | None
    """What a strategy of another package is made with."""


class ObjectOptions(CallOptions, total=False):
    """Objects of the caller's that every call takes; `model.generate` spells them out."""

    logits_processor: Sequence[Callable[..., Any]] | None
    """Functions of (input_ids, scores) that change the scores."""
    stopping_criteria: Sequence[Callable[..., Any]] | None
    """Functions of (input_ids, scores) that say whether a sequence ends."""
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Any] | None
    """A function of (row, ids) that returns the ids that may follow."""
    assistant_model: Any
    """A smaller model, which drafts."""


class PlainTextOptions(ObjectOptions, total=False):
    """What a call about prompts takes that gives one text for each."""

    add_generation_prompt: bool
    """Whether the chat template begins the answer to messages; it does unless this is False."""
    trim_stop_strings: bool
    """Whether texts lose the stop string that ended them."""
    cache_salt: str | None
    """Only prompts of the same salt share what the cache holds of their beginnings."""


class TextOptions(PlainTextOptions, ResultOptions, total=False):
    """What every call about prompts takes: `es.generate`, `es.stream`, `es.open`, `es.chat`."""

    generation_config: GenerationConfig | Any
    """Values for all that the call does not set."""


class PromptOptions(TextOptions, total=False):
    """The same with a seed, for calls about one prompt that do not spell it out."""

    seed: int | None
    """Where the draws come from; without it from torch's global generator."""


class PromptInputs(TypedDict, total=False):
    """What a model reads of a prompt, and encoders of what stands beside it."""

    input_ids: Numbers | None
    """(B, T) the ids of the prompt."""
    attention_mask: Numbers | None
    """(B, T) 1 for what is read and 0 for padding; or (B, 1 or heads, T, T)."""
    inputs_embeds: Tensor | None
    """(B, T, E) embeddings in the place of ids, or beside them."""
    position_ids: Tensor | Callable[..., Any] | None
    """(B, T), or (axes, B, T), positions other than 0, 1, ..."""
    pixel_values: Any
    """The patches of images, as the tokenizer or processor returned them."""
    image_grid_thw: Any
    """(images, 3) how many patches each has: times, rows, columns."""
    pixel_values_videos: Any
    """The patches of videos."""
    video_grid_thw: Any
    """(videos, 3) how many patches each has."""
    mm_token_type_ids: Any
    """(B, T) which ids are places of images (1) and videos (2)."""
    second_per_grid_ts: Any
    """Seconds that a grid of a video stands for."""
    bbox: Any
    """(B, n, 4) the boxes of the lines of a page."""
    input_features: Any
    """(B, channels, frames) what an encoder of sounds reads."""


class SpeechOptions(TypedDict, total=False):
    """What a model that transcribes takes."""

    language: str | Sequence[str] | None
    """The language that is spoken, one for all rows or one each; found out if left out."""
    task: Literal["transcribe", "translate"] | None
    """Write what is said, or its translation into English."""
    is_multilingual: bool | None
    """Whether the model knows several languages."""
    return_timestamps: bool | None
    """Whether segments have times."""
    return_segments: bool | None
    """Return the segments beside the ids."""
    prompt_ids: Any
    """Ids of what was said before, or of words to expect."""
    prompt_condition_type: Literal["first-segment", "all-segments"] | None
    """Which windows prompt_ids stand before."""
    condition_on_prev_tokens: bool | None
    """Whether a window reads what was written of the one before."""
    compression_ratio_threshold: float | None
    """A window whose text repeats itself more is written again, at the next temperature."""
    logprob_threshold: float | None
    """A window whose tokens are less likely on average is written again."""
    no_speech_threshold: float | None
    """A window that is silence with a higher probability is left out."""


class ModelOptions(CallOptions, ResultOptions, PromptInputs, SpeechOptions, total=False):
    """What `model.generate` takes beside the parameters that its signature spells out."""

    decoder_input_ids: Tensor | None
    """(B, T) what a decoder beside an encoder begins with."""
    decoder_attention_mask: Tensor | None
    """(B, T) 1 for what is read of it."""
    encoder_outputs: Any
    """What an encoder made of the prompt, in its place."""
    past_key_values: Any
    """The cache that the call goes on from."""
    return_legacy_cache: bool | None
    """Return the cache as tuples of tensors."""
    seed: int | Sequence[int] | None
    """Where the draws come from, one for all rows or one each."""


class RectangleOptions(ModelOptions, ObjectOptions, total=False):
    """The same with what the signature of `model.generate` spells out, but for `tokenizer`."""

    inputs: Tensor | None
    """(B, T) the ids of the prompt."""
    generation_config: GenerationConfig | Any
    """Values for all that the call does not set."""
    streamer: Any
    """What is given every new token: an object with put and end."""
    negative_prompt_ids: Numbers | None
    """(B, T) with guidance_scale: the prompt that is guided away from."""
    negative_prompt_attention_mask: Numbers | None
    """(B, T) 1 for what is read of it."""
    custom_generate: Callable[..., Any] | None
    """A decoding loop in the place of the engine's."""


F = TypeVar("F", bound=Callable[..., Any])


_EXAMPLE = "\n\nExample:\n"


def lists_options(options: type) -> Callable[[F], F]:
    """The function, with the keys of this `TypedDict` and a line for each in its docstring, before
    the example that it ends with.

    Where there is no docstring, or no source to read, it stays as it is.
    """

    def described(function: F) -> F:
        if function.__doc__ is not None and (lines := described_keys(options)):
            text, mark, example = inspect.cleandoc(function.__doc__).partition(_EXAMPLE)
            listed = "".join(f"    {name}: {line}\n" for name, line in lines.items())
            function.__doc__ = f"{text}\n\nOptions:\n\n{listed}{mark[1:]}{example}"
        return function

    return described


def described_keys(options: type) -> dict[str, str]:
    """Every key of a `TypedDict` and of those it is made of, and the line under it, with what a
    call adds before what it shares with others."""
    module = sys.modules[options.__module__]
    tree = _classes(module.__name__).get(options.__name__)
    if tree is None:
        return {}
    found = _of_class(tree)
    for base in tree.bases:  # the class itself has forgotten them
        inner = getattr(module, base.id, None) if isinstance(base, ast.Name) else None
        if isinstance(inner, type):
            found |= {n: line for n, line in described_keys(inner).items() if n not in found}
    return found


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    """The classes of a module as its source has them."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError):  # an installation without sources
        return {}
    return {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}


def _of_class(tree: ast.ClassDef) -> dict[str, str]:
    """The names that a class annotates, and the string under each."""
    found = {}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(after.value.value).split())
    return found
