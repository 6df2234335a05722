"""The keywords of every public call, for type checkers and editors.

Written by `scripts/keywords` from the table of `door.py`. Inputs that a model or
a caller declares under other names are passed as `**inputs`, a `dict[str, Any]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

import numpy as np
from torch import Tensor

from everystep.config.config_fields import ConfigOptions, FieldOptions
from everystep.engine import Corpus
from everystep.processors.allowed import AllowedSequences
from everystep.requests.options import Prefix
from everystep.requests.subject import Subject
from everystep.types.hooks import Hook
from everystep.types.request import Strategy

Numbers = Tensor | np.ndarray | Sequence[object]
"""A tensor, or what one can be made of."""


class CallOptions(FieldOptions, total=False):
    """The keywords that every call takes beside fields of a configuration."""

    allowed_sequences: AllowedSequences | Sequence[object] | None
    """The texts, or lists of ids, of which the answer is one."""
    logprobs: int | None
    """Keep the log-probability of every chosen token, and of this many best ones."""
    prompt_logprobs: int | None
    """The same for every token of the prompt."""
    prefix: Prefix | None
    """What `es.prefill` made: every prompt goes on from it."""
    hooks: Sequence[Hook | str | Mapping[str, object]] | None
    """What sees every step and adds to it, or names of installed ones."""
    adapter_names: str | Sequence[str | None] | None
    """The adapter that the model runs with, by the name it was loaded under, or one per row."""
    adapters: Mapping[str, float] | Sequence[Mapping[str, float] | str | None] | None
    """Adapters with their weights, {"a": 0.7, "b": 0.3}, or a list with such a mix per row."""
    steer: Mapping[int, Tensor] | Sequence[Mapping[int, Tensor] | None] | None
    """Vectors that are added to the hidden states after layers, {12: vector}, or one per row."""
    schema: str | Mapping[str, object] | bool | None
    """The JSON schema that the text follows."""
    regex: str | None
    """The regular expression that the text matches."""
    grammar: str | None
    """The grammar that the text follows."""
    choices: Sequence[str] | None
    """The texts of which the answer is one."""
    best_of: int | None
    """Draw so many samples and return the best."""
    majority: Callable[[str], object] | None
    """With best_of: finds the answer in a text; the most frequent one wins."""
    scorer: Callable[[str], float] | None
    """With best_of: rates a text; the highest wins."""
    amateur_model: Subject | None
    """A weaker model: tokens that it finds likely too lose."""
    contrast_alpha: float | None
    """With amateur_model: tokens below this share of the best are never chosen."""
    contrast_beta: float | None
    """With amateur_model: how strongly its logits count."""
    assistant_tokenizer: object
    """The tokenizer of assistant_model, where it is another one."""
    draft_corpus: Corpus | None
    """Texts that drafts are copied from."""
    record: str | PathLike[str] | None
    """The file that gets a record of every step; gzip where its name ends in .gz."""


class ResultOptions(ConfigOptions, total=False):
    """The keywords that decide how many results there are, or of which class."""

    n_best: int | None
    """Return so many hypotheses of a beam search."""
    strategy: str | Strategy | None
    """The way of choosing by name ("beam", "contrastive", ...), or an object of your own."""
    strategy_options: Mapping[str, object] | None
    """What a strategy of another package is made with."""


class ObjectOptions(CallOptions, total=False):
    """Objects of the caller's that every call takes; `model.generate` spells them out."""

    logits_processor: Sequence[Callable[..., object] | str | Mapping[str, object]] | None
    """Functions of (input_ids, scores) that change the scores, or names of installed ones."""
    stopping_criteria: Sequence[Callable[..., object]] | None
    """Functions of (input_ids, scores) that say whether a sequence ends."""
    prefix_allowed_tokens_fn: Callable[[int, Tensor], object] | None
    """A function of (row, ids) that returns the ids that may follow."""
    assistant_model: object
    """A smaller model, which drafts."""


class PlainTextOptions(ObjectOptions, total=False):
    """The keywords of a call about prompts that gives one text for each."""

    add_generation_prompt: bool
    """Whether the chat template begins the answer to messages; it does unless this is False."""
    trim_stop_strings: bool
    """Whether texts lose the stop string that ended them."""
    cache_salt: str | None
    """Only prompts of the same salt share what the cache holds of their beginnings."""
    timeout: float | None
    """Seconds after which a prompt ends, counted from the call, its waiting too."""
    negative_prompt: str | Numbers | Mapping[str, object] | None
    """With guidance_scale: the prompt that is guided away from, as a text, messages or ids."""
    tools: Sequence[Mapping[str, object] | Callable[..., object]] | None
    """The functions that may be called in answer to messages, or their JSON schemas."""
    tool_choice: str | Mapping[str, object] | None
    """With tools: "auto", "required", "none", or the name of the one that is called."""
    parallel_tool_calls: bool | None
    """With tools: whether an answer may make several calls; it may unless this is False."""
    enable_thinking: bool | None
    """Whether the model thinks before it answers messages, where its chat template has both."""
    thinking_budget: int | None
    """The tokens after which thoughts are ended, in answer to messages."""


class TextOptions(PlainTextOptions, ResultOptions, total=False):
    """The keywords of calls about prompts: `es.generate`, `es.stream`, `es.open`, `es.chat`."""

    generation_config: object
    """Values for all that the call does not set."""


class PromptOptions(TextOptions, total=False):
    """The same with a seed, for calls about one prompt that do not spell it out."""

    seed: int | Sequence[int] | None
    """Where the draws come from, one for all rows or one each; by default torch's generator."""


class PromptInputs(TypedDict, total=False):
    """The inputs that a model reads of a prompt, and encoders of what stands beside it."""

    pixel_values: object
    """The patches of images, as the tokenizer or processor returned them."""
    pixel_values_videos: object
    """The patches of videos."""
    input_features: object
    """(B, channels, frames) what an encoder of sounds reads."""
    input_ids: Numbers | None
    """(B, T) the ids of the prompt."""
    inputs_embeds: Tensor | None
    """(B, T, E) embeddings in the place of ids, or beside them."""
    attention_mask: Numbers | None
    """(B, T) 1 for what is read and 0 for padding; or (B, 1 or heads, T, T)."""
    position_ids: Tensor | Callable[..., object] | None
    """(B, T), or (axes, B, T), positions other than 0, 1, ..."""
    decoder_input_ids: Numbers | None
    """(B, T) what a decoder beside an encoder begins with, or goes on with."""
    image_grid_thw: object
    """(images, 3) how many patches each has: times, rows, columns."""
    video_grid_thw: object
    """(videos, 3) how many patches each has."""
    mm_token_type_ids: object
    """(B, T) which ids are places of images (1) and videos (2)."""
    second_per_grid_ts: object
    """Seconds that a grid of a video stands for."""
    bbox: object
    """(B, n, 4) the boxes of the lines of a page."""


class SpeechOptions(TypedDict, total=False):
    """The keywords of a model that transcribes."""

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
    prompt_ids: object
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
    """The keywords of `model.generate` beside what its signature spells out."""

    seed: int | Sequence[int] | None
    """Where the draws come from, one for all rows or one each; by default torch's generator."""
    decoder_attention_mask: Tensor | None
    """(B, T) 1 for what is read of it."""
    encoder_outputs: object
    """What an encoder made of the prompt, in its place."""
    assistant_encoder_outputs: object
    """What the encoder of assistant_model made of the prompt, where that is passed so."""
    past_key_values: object
    """The cache that the call goes on from."""
    return_legacy_cache: bool | None
    """Return the cache as tuples of tensors."""


class RectangleOptions(ModelOptions, ObjectOptions, total=False):
    """The same with what the signature of `model.generate` spells out, but for `tokenizer`."""

    generation_config: object
    """Values for all that the call does not set."""
    negative_prompt_ids: Numbers | None
    """(B, T) with guidance_scale: the prompt that is guided away from."""
    negative_prompt_attention_mask: Numbers | None
    """(B, T) 1 for what is read of it."""
    streamer: object
    """What is given every new token: an object with put and end."""
    custom_generate: Callable[..., object] | None
    """A decoding loop in the place of the engine's."""
    synced_gpus: bool | None
    """Whether all processes make each forward together, as weights in parts on them need it."""
    inputs: Tensor | None
    """(B, T) the ids of the prompt."""
