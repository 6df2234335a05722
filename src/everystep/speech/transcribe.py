"""`generate` of a model that listens: windows of sounds become ids, with timestamps or without.

Each window is one ordinary call, whose decoder begins with ids that say language and task. With
timestamps the next window begins where the last segment ended, so sounds may be longer than one
window. Names and results are those of transformers' `WhisperGenerationMixin.generate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from everystep.drivers.rectangle import generate
from everystep.models import Model
from everystep.nn.modes import inference_mode
from everystep.processors.audio import WhisperTimeStampLogitsProcessor
from everystep.processors.length import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from everystep.requests.door import Arguments, PromptValues
from everystep.requests.options import Prefix
from everystep.requests.subject import Subject
from everystep.speech.prefix import first_tokens
from everystep.speech.segments import SpeechSegment, mean_logprob, segments_of, without_second_stamp
from everystep.speech.transcription_options import Speech, read_speech


@dataclass
class Utterance:
    """A row of sounds.

    `begins`: what its transcript begins with. `frames`: how many of its sounds are real. `seek`:
    the frame at which its next window begins. `follows`: whether that window is read after what the
    last one became.
    """

    number: int
    sounds: Tensor
    frames: int
    begins: list[int]
    follows: bool
    seek: int = 0
    segments: list[SpeechSegment] = field(default_factory=list)


def transcribe(model: Subject, given: Arguments) -> object:
    """Return what was said: (rows, length) ids without those that a transcript begins with and
    without its end, padded on the right; see the guide for what else can be asked for.

    `given`: what was passed to `model.generate`.
    """
    speech = read_speech(model, given)
    utterances, last = listen(model, speech)
    if speech.returns_output and not speech.stamps:
        return last
    said = [one.segments for one in utterances]
    rows = [torch.cat([_NOTHING, *(one["tokens"] for one in own)]) for own in said]
    table = pad_sequence(rows, batch_first=True, padding_value=speech.pad)
    sequences = table.to(model.device)
    if speech.returns_segments or speech.returns_output:
        return {"sequences": sequences, "segments": said}
    return sequences


def listen(model: Subject, speech: Speech) -> tuple[list[Utterance], object]:
    """Return every row of sounds with what was said in it, and what the last call returned."""
    with inference_mode():
        utterances = _utterances(model, speech)
    last: object = None
    while active := [one for one in utterances if one.seek < one.frames]:
        last = _window(model, speech, active)
    return utterances, last


_NOTHING = torch.empty(0, dtype=torch.int64)


def _utterances(model: Subject, speech: Speech) -> list[Utterance]:
    """Return the rows of a call, each as often as it is asked for."""
    sounds, copies = speech.sounds, speech.copies
    begins = speech.begun or first_tokens(
        speech.tokens,
        speech.language,
        speech.task,
        len(sounds),
        stamps=speech.stamps,
        detect=partial(_languages, model, speech),
    )
    each = zip(sounds, speech.frames, begins, strict=True)
    return [
        Utterance(row * copies + copy, own, frames, first, speech.follows)
        for row, (own, frames, first) in enumerate(each)
        for copy in range(copies)
    ]


def _languages(model: Subject, speech: Speech) -> list[int]:
    """Return (B,) the language of each row that is likeliest after the start token."""
    known = sorted((speech.tokens.languages or {}).values())
    found = []
    for sounds in speech.sounds:
        first = _cut(sounds, 0, sounds.shape[1], speech.span)
        logits = _after_start(model, first, [speech.tokens.start], 1, speech.prefix)
        found.append(known[int(logits[known].argmax())])
    return found


def _after_start(
    model: Subject, sounds: Tensor, ids: list[int], place: int, prefix: Prefix | None
) -> Tensor:
    """Return (V,) logits after the id that stands `place` places before the decoder's last, beside
    sounds, or what a prefix has heard."""
    core = cast(Model, model.core)  # one of this library, since it listens itself
    source = None if prefix is None else prefix.source
    with inference_mode():
        logits = core.forward(
            None,
            decoder_input_ids=torch.tensor([ids]),
            sounds=sounds[None] if source is None else None,
            encoder_states=None if source is None else source.states[0][None],
            kept=torch.tensor([len(ids) - place]),
        )
    return logits[0, 0].float()


def _cut(sounds: Tensor, seek: int, end: int, span: int) -> Tensor:
    """Return (channels, span) sounds from frame `seek` to `end`, with zeros after them."""
    part = sounds[:, seek : min(seek + span, end)]
    return F.pad(part, (0, span - part.shape[1]))


def _window(model: Subject, speech: Speech, active: list[Utterance]) -> object:
    """Give every row the segments of its next window, and return what the last call returned."""
    heard = [_cut(one.sounds, one.seek, one.frames, speech.span) for one in active]
    prompts = [_decoder_ids(speech, one) for one in active]
    prefix = None if any(one.seek for one in active) else speech.prefix
    pending, result = list(range(len(active))), None
    for attempt, temperature in enumerate(speech.temperatures, 1):
        sounds, begun = [heard[i] for i in pending], [prompts[i] for i in pending]
        tokens, scores, result = _call(model, speech, prefix, sounds, begun, temperature)
        again = []
        for place, row in enumerate(pending):
            said, one = tokens[place], active[row]
            logprob = mean_logprob(scores[place], said, temperature) if scores else 0.0
            silence = _silence(model, speech, one, heard[row], prompts[row], prefix)
            retry, silent = speech.doubts.judge(said, model.vocab_size, logprob, silence)
            one.follows = speech.follows and (temperature is None or temperature < 0.5)
            if retry and attempt < len(speech.temperatures):
                again.append(row)
                continue
            _settle(speech, one, said, result, silent=silent)
        pending = again
        if not pending:
            break
    return result


def _settle(
    speech: Speech, one: Utterance, said: np.ndarray, result: object, *, silent: bool
) -> None:
    """Give the row the segments of a window, behind which it goes on."""
    frames = min(one.frames - one.seek, speech.span)
    if silent:
        one.seek += frames
        return
    own = said[:-1] if len(said) and said[-1] in speech.ends else said
    segments, further = segments_of(own, speech.first_stamp, one.seek, frames, result)
    one.segments += segments
    one.seek += further


def _silence(
    model: Subject,
    speech: Speech,
    one: Utterance,
    heard: Tensor,
    prompt: list[int],
    prefix: Prefix | None,
) -> float:
    """Return the probability that nobody speaks in a window; 0 where nothing depends on it."""
    if speech.doubts.no_speech is None:
        return 0.0
    logits = _after_start(model, heard, prompt, len(one.begins), prefix)
    return float(logits.softmax(-1)[speech.first_stamp - 2])


def _decoder_ids(speech: Speech, one: Utterance) -> list[int]:
    """Return the ids with which the decoder begins a window: those said before, if it is to know
    them, then those of a transcript's beginning."""
    prompt, room = speech.prompt, speech.most // 2 - 1
    if one.follows and one.segments:
        said = list(speech.said_first)
        for segment in one.segments:
            said += without_second_stamp(segment["tokens"].tolist(), speech.first_stamp)
        head = prompt if speech.prompts_all else speech.previous
        return [*head, *said[-room:], *one.begins]
    return [*prompt, *one.begins]


def _call(
    model: Subject,
    speech: Speech,
    prefix: Prefix | None,
    heard: list[Tensor],
    prompts: list[list[int]],
    temperature: float | None,
) -> tuple[list[np.ndarray], list[list[Tensor]], object]:
    """Return (B,) the ids of a window, its end among them, (B,) their scores where they are asked
    for, and what the ordinary call returned; a prefix may have heard the window."""
    width = max(map(len, prompts))
    draws = temperature is not None and temperature > 0
    fields: dict[str, object] = {
        **speech.rest.fields,
        # What stands first is where the decoder starts, a prompt too.
        "decoder_start_token_id": [row[0] for row in prompts],
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "num_return_sequences": 1,
        "do_sample": draws,
        "temperature": temperature if draws else None,
        **speech.length(width),
    }
    if draws:
        fields["num_beams"] = 1
    scored = speech.doubts.logprob is not None
    if scored:
        fields |= {"return_dict_in_generate": True, "output_scores": True}
    own = [*_processors(speech, width), *speech.processors]
    prompt = _read(speech, prefix, heard, prompts)
    objects = replace(speech.rest.objects, logits_processor=own, prefix=prefix)
    given = replace(speech.rest, fields=fields, prompt=prompt, objects=objects)
    result = generate(model, given)
    sequences = result if isinstance(result, Tensor) else result.sequences
    tokens = [_spoken(row, speech) for row in sequences[:, width:].cpu().numpy()]
    return tokens, _scores_of(result) if scored else [], result


def _read(
    speech: Speech, prefix: Prefix | None, heard: list[Tensor], prompts: list[list[int]]
) -> PromptValues:
    """Return what a window is read from: sounds and the first ids of each row, or those that follow
    a prefix, whose rows are equally long."""
    read = speech.rest.prompt
    if prefix is not None:
        rest = [row[len(prefix) :] for row in prompts]
        after = torch.tensor(rest, dtype=torch.int64).view(len(rest), -1)
        return replace(read, decoder_input_ids=after, decoder_attention_mask=None)
    width = max(map(len, prompts))
    return replace(
        read,
        decoder_input_ids=torch.tensor([[speech.pad] * (width - len(r)) + r for r in prompts]),
        decoder_attention_mask=torch.tensor(
            [[0] * (width - len(r)) + [1] * len(r) for r in prompts]
        ),
        named={**read.named, "input_features": torch.stack(heard)},
    )


def _processors(speech: Speech, begin: int) -> list[object]:
    """Return the processors of the model, whose text begins after so many ids."""
    found: list[object] = []
    if speech.begin_suppressed:
        found.append(SuppressTokensAtBeginLogitsProcessor(speech.begin_suppressed, begin))
    if speech.suppressed:
        found.append(SuppressTokensLogitsProcessor(speech.suppressed))
    if speech.stamps:
        rules = SimpleNamespace(
            no_timestamps_token_id=speech.first_stamp - 1,
            eos_token_id=speech.ends[0] if speech.ends else speech.begin,
            max_initial_timestamp_index=speech.latest_first_stamp,
        )
        found.append(WhisperTimeStampLogitsProcessor(rules, begin))
    return found


def _spoken(row: np.ndarray, speech: Speech) -> np.ndarray:
    """Return (n,) a row's ids up to its end, without the padding after it."""
    ends = np.flatnonzero(np.isin(row, speech.ends))
    if len(ends):
        return row[: ends[0] + 1]
    real = np.flatnonzero(row != speech.pad)
    return row[: real[-1] + 1] if len(real) else row[:0]


def _scores_of(result: Any) -> list[list[Tensor]]:
    """Return (B,) the scores (V,) of each step, those of the beam that it came from."""
    rows = len(result.sequences)
    paths = getattr(result, "beam_indices", None)
    if paths is None:
        return [[step[row] for step in result.scores] for row in range(rows)]
    chosen = [[beam for beam in path.tolist() if beam >= 0] for path in paths]
    return [
        [step[beam] for step, beam in zip(result.scores, path, strict=False)] for path in chosen
    ]
