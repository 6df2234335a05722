"""The options of a call of a model that listens, read and checked before any compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from everystep.config import GenerationConfig
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.models import Model
from everystep.records import record_writer
from everystep.requests.arrays import read_processors
from everystep.requests.door import Arguments, OfSpeech, PromptValues
from everystep.requests.options import Prefix
from everystep.requests.prefixes import read_prefix, source_of
from everystep.requests.subject import Subject
from everystep.speech.prefix import Said, SpeechTokens, read_tokens
from everystep.speech.segments import Doubts

_CHOSEN = ("num_return_sequences", "do_sample", "max_length", "max_new_tokens", "temperature")
"""Fields that are said anew for each window."""
_DOUBTS = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")


@dataclass(frozen=True, eq=False)
class Speech:
    """The options of a call, read.

    `sounds`: (B,) features (channels, n); `frames`: (B,) how many of them are real. `span`: frames
    of a window. `begun`: (B,) decoder ids of the caller's, empty where language and task say them.
    `previous`: the id before what was said earlier, if there is one; `prompt`: ids before the first
    window, `prompts_all`: before every one that follows another. `copies`: rows per utterance.
    `most`: positions of the decoder. `limit`: `max_new_tokens` or `max_length` with its value.
    `rest`: what holds for each window as for any model. `prefix`: in place of sounds that were
    passed, one whose encoder has heard the first window.
    """

    sounds: Sequence[Tensor]
    frames: Sequence[int]
    span: int
    most: int
    tokens: SpeechTokens
    language: str | Sequence[str] | None
    task: str | None
    stamps: bool
    begun: Sequence[list[int]]
    previous: tuple[int, ...]
    prompt: tuple[int, ...]
    prompts_all: bool
    follows: bool
    temperatures: tuple[float | None, ...]
    doubts: Doubts
    copies: int
    limit: tuple[str, int] | None
    pad: int
    ends: tuple[int, ...]
    begin: int | None
    suppressed: tuple[int, ...]
    begin_suppressed: tuple[int, ...]
    latest_first_stamp: int | None
    first_stamp: int
    returns_segments: bool
    returns_output: bool
    processors: tuple[object, ...]
    rest: Arguments
    prefix: Prefix | None = None

    @property
    def said_first(self) -> tuple[int, ...]:
        """Ids of the prompt that stand before everything that was said."""
        if self.prompts_all or not self.prompt:
            return ()
        return self.prompt[1:] if self.prompt[:1] == self.previous else self.prompt

    def length(self, width: int) -> dict[str, int]:
        """Return the limit of a window's length after `width` ids of the decoder, by its name;
        RequestError where that is longer than the decoder has positions."""
        if self.limit is None:
            return {}
        name, value = self.limit
        if name == "max_length":
            return {name: min(value + min(self.most // 2 - 1, width), self.most)}
        if width + value > self.most:
            raise RequestError(
                "a transcript of that length has no room",
                wanted=f"at most {self.most} ids, {width} at the beginning among them",
                got=f"max_new_tokens={value}",
                do="Lower max_new_tokens, or shorten prompt_ids",
            )
        return {name: value}


def read_speech(model: Subject, given: Arguments) -> Speech:
    """Return the options of a call; RequestError for what cannot be, UnsupportedError for what is
    not done."""
    own, prompt = given.speech or OfSpeech(), given.prompt
    said = _said(model, given, own)
    tokens = read_tokens(said)
    network = cast(Model, model.core).network
    channels, span = network.source_shape
    prefix, features = read_prefix(given.objects.prefix), prompt.named.get("input_features")
    if prefix is not None:
        features = _heard_before(model, prefix, prompt, own)
    sounds, frames = _sounds(features, prompt.attention_mask, channels, span)
    stamps = _stamps(said, tokens, max(one.shape[1] for one in sounds), span)
    temperatures = _temperatures(given.fields.get("temperature"))
    _check(given.fields.get("do_sample"), own, said, temperatures)
    ends = _ids(said("eos_token_id"))
    suppressed = _ids(said("suppress_tokens"))
    previous = said("prev_sot_token_id")
    if previous is None and len(suppressed) > 1:
        previous = suppressed[-2]  # as in transformers, of older files
    kept = said("pad_token_id")
    rest = {name: one for name, one in prompt.named.items() if name != "input_features"}
    processors = read_processors(given.objects.logits_processor)
    if (record := given.objects.record) is not None:
        record = record_writer(record)  # one for all windows
    return Speech(
        sounds=sounds,
        frames=frames,
        span=span,
        most=int(network.most_positions or 0),
        tokens=tokens,
        language=said("language"),
        task=said("task"),
        stamps=stamps,
        begun=_begun(prompt.decoder_input_ids, len(sounds), prefix, tokens.start),
        previous=() if previous is None else (int(previous),),
        prompt=_prompt(own.prompt_ids),
        prompts_all=own.prompt_condition_type == "all-segments",
        follows=bool(said("condition_on_prev_tokens")),
        temperatures=temperatures,
        doubts=Doubts(*map(said, _DOUBTS)),
        copies=int(said("num_return_sequences") or 1),
        limit=_limit(said),
        pad=int(kept) if kept is not None else (ends or (0,))[0],
        ends=ends,
        begin=said("bos_token_id"),
        suppressed=suppressed,
        begin_suppressed=_ids(said("begin_suppress_tokens")),
        latest_first_stamp=said("max_initial_timestamp_index"),
        first_stamp=(tokens.no_timestamps or model.vocab_size) + 1,
        returns_segments=bool(own.return_segments),
        returns_output=bool(said("return_dict_in_generate")),
        processors=processors,
        rest=replace(
            given,
            fields={name: one for name, one in given.fields.items() if name not in _CHOSEN},
            objects=replace(given.objects, record=record),
            prompt=replace(prompt, attention_mask=None, decoder_input_ids=None, named=rest),
            speech=None,
        ),
        prefix=prefix,
    )


def _heard_before(model: Subject, prefix: Prefix, prompt: PromptValues, own: OfSpeech) -> Tensor:
    """Return (1, channels, frames) the sounds of a prefix.

    RequestError for a prefix that was made of states, and for what would come before its ids.
    """
    source = source_of(prefix, model, prompt)
    sounds = [one.whole["input_features"] for one in source.prompts if one.whole]
    if not sounds:
        raise RequestError(
            "a transcript goes on from sounds, which a prefix of encoder_outputs does not know",
            wanted="a prefix of input_features",
            got="one of encoder_outputs",
            do="Make it of input_features, or pass it to es.generate",
        )
    several = len(prefix) > 1 or prompt.decoder_input_ids is not None
    begun = {"language": own.language, "task": own.task} if several else {}
    passed = {"prompt_ids": own.prompt_ids, **begun}
    if named := [name for name, value in passed.items() if value is not None]:
        raise RequestError(
            "prefix has begun the transcript",
            wanted="a prefix of the sounds alone" if begun else "nothing before its ids",
            got=", ".join(named),
            do=f"Leave {' and '.join(named)} out, or make a prefix that begins with these ids",
        )
    return sounds[0][None]


def _said(model: Subject, given: Arguments, own: OfSpeech) -> Said:
    passed = given.objects.generation_config
    settings = [] if passed is None else [GenerationConfig.of(passed)]
    settings.append(model.generation_config)

    def said(name: str) -> Any:
        found = [given.fields.get(name), getattr(own, name, None)]
        found += [getattr(one, name, None) for one in settings]
        found.append(getattr(model.config, name, None) if name == "forced_decoder_ids" else None)
        return next((one for one in found if one is not None), None)

    return said


def _sounds(
    features: object, mask: object, channels: int, span: int
) -> tuple[list[Tensor], list[int]]:
    """Return (B,) features (channels, n), and (B,) how many of their frames are real."""
    if (
        not isinstance(features, Tensor)
        or not features.is_floating_point()
        or features.dim() != 3
        or features.shape[1] != channels
        or not features.numel()
    ):
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise RequestError(
            "input_features are no sounds that this model reads",
            wanted=f"a float tensor (rows, {channels}, frames)",
            got=got,
            do="Pass what es.WhisperFeatureExtractor makes of samples",
        )
    rows, _, length = features.shape
    if mask is not None and tuple(torch.as_tensor(mask).shape) != (rows, length):
        got = tuple(torch.as_tensor(mask).shape)
        raise RequestError("attention_mask does not fit", wanted=(rows, length), got=got)
    if rows == 1 or length <= span:
        return list(features), [length] * rows
    if mask is None:
        raise RequestError(
            f"several rows of more than {span} frames need to say where each ends",
            wanted="attention_mask",
            got=f"{length} frames and no mask",
            do="Call the feature extractor with return_attention_mask=True",
        )
    return list(features), [int(one) for one in torch.as_tensor(mask).sum(-1)]


def _stamps(said: Said, tokens: SpeechTokens, frames: int, span: int) -> bool:
    """Return whether there are timestamps, as there must be in more than one window."""
    asked = said("return_timestamps")
    if frames > span and asked is False:
        raise RequestError(
            f"more than {span} frames are more than one window, which need timestamps",
            wanted="return_timestamps=True",
            got=f"{frames} frames and return_timestamps=False",
            do="Set return_timestamps=True, or pass fewer frames",
        )
    stamps = bool(asked) or frames > span
    if stamps and tokens.no_timestamps is None:
        raise UnsupportedError(
            "the model's generation config names no timestamps",
            wanted="generation_config.no_timestamps_token_id",
            got="none",
            do="Set return_timestamps=False, and pass one window at most",
        )
    return stamps


def _temperatures(value: object) -> tuple[float | None, ...]:
    each = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not each or any(one is not None and not 0 <= one < float("inf") for one in each):
        raise RequestError("temperature is impossible", wanted="numbers from 0 on", got=value)
    return each


def _check(
    do_sample: object, own: OfSpeech, said: Said, temperatures: Sequence[float | None]
) -> None:
    """Refuse options that contradict each other."""
    if do_sample and not any(temperatures):
        do = "Pass temperature=0.4, say, or leave do_sample out"
        raise RequestError("sounds are sampled at a temperature", got="none or 0", do=do)
    if len(temperatures) > 1 and said("return_dict_in_generate") and not said("return_timestamps"):
        what = "rows that are tried again at several temperatures have no output object in common"
        raise RequestError(what, do="Leave return_dict_in_generate out, or pass one temperature")
    condition = own.prompt_condition_type
    if condition not in (None, "first-segment", "all-segments"):
        wanted = "'first-segment' or 'all-segments'"
        raise RequestError("there is no such condition", wanted=wanted, got=shown(condition))
    if condition == "all-segments" and not said("condition_on_prev_tokens"):
        do = "Set condition_on_prev_tokens=True"
        raise RequestError("prompts of all segments follow what was said before", do=do)
    named = own.task is not None or own.language is not None
    if named and said("is_multilingual") is False:
        do = "Leave language and task out, or set is_multilingual=True"
        raise RequestError("this model knows one language, and writes down what it hears", do=do)
    if said("no_speech_threshold") is not None and said("logprob_threshold") is None:
        do = "Set logprob_threshold=-1.0, say"
        raise RequestError("no_speech_threshold is read together with logprob_threshold", do=do)


def _begun(
    ids: object, rows: int, prefix: Prefix | None = None, start: int | None = None
) -> list[list[int]]:
    """Return (B,) decoder ids of the caller's, those of a prefix first, or nothing; a prefix that
    holds the start token alone says nothing of language and task."""
    held = [] if prefix is None or prefix.ids is None else [*prefix.ids]
    if ids is None:
        return [] if held in ([], [start]) else [held]
    table = torch.as_tensor(ids)
    if table.dim() != 2 or len(table) != rows or not table.shape[1]:
        wanted = f"({rows}, n) ids"
        raise RequestError("decoder_input_ids do not fit", wanted=wanted, got=tuple(table.shape))
    return [[*held, *(int(token) for token in row)] for row in table]


def _prompt(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    found = np.asarray(torch.as_tensor(ids))
    if found.ndim != 1 or not len(found):
        do = "Pass what the tokenizer's get_prompt_ids gives"
        raise RequestError("prompt_ids are no row of ids", got=found.shape, do=do)
    return tuple(int(token) for token in found)


def _limit(said: Said) -> tuple[str, int] | None:
    for name in ("max_new_tokens", "max_length"):
        if isinstance(said(name), list):
            raise RequestError(
                f"{name} is one limit for the windows of all sounds",
                wanted="a number",
                got=shown(said(name)),
                do="Pass one number, or call model.generate once for each",
            )
        if said(name) is not None:
            return name, int(said(name))
    return None


def _ids(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
