"""Prompts under the continuous scheduler: texts in, events and texts out, in bounded memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from everystep.api.arguments import CONFIG_FIELDS, callables, refuse_unknown
from everystep.api.caches import refuse_choice, row_quantization
from everystep.api.call import Call, UserParts, resolve
from everystep.api.generate import continue_by_one
from everystep.api.healing import check_healing, healed
from everystep.api.inputs import Inputs
from everystep.api.lengths import refuse_beyond
from everystep.api.model import LanguageModel
from everystep.api.resolve import read_tokens, refuse_unbuilt
from everystep.config import GenerationConfig, merge_configs
from everystep.engine import Continuous, Engine
from everystep.engine.logprobs import choice_logprobs, prompt_logprobs
from everystep.errors import RequestError, message
from everystep.nn.modes import inference_mode
from everystep.outputs import TokenLogprobs
from everystep.stops.strings import StopStrings
from everystep.streamers import BeamEvent, Wording, beam_event
from everystep.text import Tokenizer, Trimmer
from everystep.types import Event, Finished, FinishReason, Group, Prompt

Messages = Sequence[Mapping[str, Any]]
PromptLike = str | Sequence[int] | Messages

_OPTIONS = (
    *("generation_config", "logits_processor", "stopping_criteria", "add_generation_prompt"),
    *("logprobs", "prompt_logprobs", "trim_stop_strings"),
)
_ROWS = 32
_TOKEN_BUDGET = 1024


@dataclass(frozen=True, slots=True)
class Generated:
    """One continuation: its text without special tokens, its ids, why it ended, its score.

    `logprobs` of its tokens and `prompt_logprobs` of its prompt's where they were asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    score: float
    prompt_tokens: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class Session:
    """One engine for many prompts of one model and one set of options.

    `seed`: the draws of every prompt depend on it and on nothing around the prompt; without it a
    fresh one is taken from torch's global generator. Several are one per prompt, in their order.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None,
        options: dict[str, Any],
        seed: int | tuple[int, ...] | None = None,
    ) -> None:
        refuse_unknown(options, (*CONFIG_FIELDS, *_OPTIONS))
        self._model = model
        self._tokenizer = tokenizer
        self._user = {name: options.pop(name, None) for name in _OPTIONS}
        passed: GenerationConfig | None = self._user["generation_config"]
        self._effective = merge_configs(options, passed, model.generation_config)
        refuse_unbuilt(self._effective)
        refuse_choice(self._effective)
        for notice in self._effective.notices:
            warnings.warn(notice, stacklevel=4)
        self._tokens = read_tokens(self._effective, model.vocab_size)
        self._seed = int(torch.randint(2**62, ()).item()) if seed is None else seed
        width = max(self._effective.num_beams or 1, self._effective.num_return_sequences or 1)
        rows = max(_ROWS, width * (2 if self._effective.guidance_scale else 1))
        executor = model.executor(quantization=row_quantization(self._effective, model))
        self.engine = Engine(executor, Continuous(max(_TOKEN_BUDGET, rows), rows))

    def ids(self, prompt: PromptLike) -> np.ndarray:
        """The ids of a text, of messages through the chat template, or of ids as they are."""
        if isinstance(prompt, str):
            return np.array(self._need_tokenizer().encode(prompt), dtype=np.int64)
        if is_messages(prompt):
            start = self._user["add_generation_prompt"] is not False
            ids = self._need_tokenizer().apply_chat_template(
                list(prompt), tokenize=True, add_generation_prompt=start, return_dict=False
            )
            return np.array(ids, dtype=np.int64)
        return np.array(list(prompt), dtype=np.int64)

    def call(self, prompt: PromptLike, index: int) -> Call:
        """Everything resolved for the prompt at an index of the session."""
        ids = self.ids(prompt)
        vocabulary = self._model.vocab_size
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= vocabulary:
            raise RequestError(
                message(
                    "a prompt is empty or holds ids outside the vocabulary",
                    wanted=f"ids from 0 to {vocabulary - 1}",
                    got=ids[:8].tolist(),
                    do="Check the prompt, and that tokenizer and model belong together",
                )
            )
        refuse_beyond(len(ids), self._model.context)
        if self._model.is_encoder_decoder:
            source = Prompt(ids=ids)
            with inference_mode():
                states = self._model.encode(source)
            inputs = Inputs(
                (Prompt(np.array(self._tokens.starts[:1]), encoder=states),), (0,), 1, 0
            )
            encoder_ids = [ids]
        else:
            inputs, encoder_ids = Inputs((Prompt(ids=ids),), (0,), len(ids), 0), []
        if self._effective.token_healing:
            inputs = self._healed(inputs, encoder_ids)
        user = UserParts(
            processors=callables("logits_processor", self._user["logits_processor"]),
            criteria=self._user["stopping_criteria"],
            tokenizer=self._tokenizer,
            seed=self._seed[index] if isinstance(self._seed, tuple) else self._seed,
            logprobs=self._user["logprobs"],
            prompt_logprobs=self._user["prompt_logprobs"],
        )
        return resolve(
            self._effective,
            self._tokens,
            inputs,
            user,
            vocabulary=vocabulary,
            context=self._model.context,
            encoder_ids=encoder_ids,
        )

    def _healed(self, inputs: Inputs, encoder_ids: Sequence[np.ndarray]) -> Inputs:
        """The prompt with its last token chosen anew."""
        check_healing(inputs, encoder_ids, self._tokenizer)
        choose = continue_by_one(self._model)
        return healed(choose, inputs, self._tokenizer, self._tokens.fill)

    def submit(self, prompt: PromptLike, index: int) -> Group:
        """The prompt waits for its turn; the id of its request is its index in the session."""
        (request,) = self.call(prompt, index).requests(lingers=False)
        return self.engine.submit(replace(request, request_id=str(index)))

    def step(self) -> list[Event]:
        """One step of the engine."""
        with inference_mode():
            return self.engine.step()

    def generated(self, group: Group) -> list[Generated]:
        """The result of a finished group."""
        prompt = group.request.prompt
        length = 0 if prompt.ids is None else len(prompt.ids)
        done = group.request.strategy.finish(group)
        asked = group.request.wants.prompt_logprobs is not None
        of_prompt = prompt_logprobs(group) if asked else None
        found = [self._generated(one, length, of_prompt) for one in done]
        if (trim := self.trim(group)) is None:
            return found
        return [_trimmed(one, Trimmer(*trim)) for one in found]

    def trim(self, group: Group) -> tuple[tuple[str, ...], str] | None:
        """The stop strings that the texts of a group lose and the end of its prompt, if asked."""
        if not self._user["trim_stop_strings"] or self._tokenizer is None:
            return None
        stops = (stop for stop in group.request.stops if isinstance(stop, StopStrings))
        strings = tuple(string for stop in stops for string in stop.strings)
        ids = group.request.prompt.ids
        longest = max((len(string.encode()) for string in strings), default=0)
        before = [] if ids is None or not longest else ids[-longest:].tolist()
        return strings, self._tokenizer.decode(before, skip_special_tokens=True)

    def _generated(self, done: Finished, prompt: int, of_prompt: TokenLogprobs | None) -> Generated:
        ids = done.tokens.tolist()
        text = (
            "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=True)
        )
        asked = self._user["logprobs"] is not None
        known = choice_logprobs(done.memo, len(ids)) if asked else None
        return Generated(text, tuple(ids), done.reason, done.score, prompt, known, of_prompt)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                message(
                    "text needs a tokenizer",
                    wanted="a tokenizer, or prompts given as ids",
                    got="no tokenizer",
                    do="Pass the tokenizer that es.load returned",
                )
            )
        return self._tokenizer


def _trimmed(one: Generated, trimmer: Trimmer) -> Generated:
    return replace(one, text=trimmer.finish(one.text, one.finish_reason.matched))


def is_messages(prompt: object) -> bool:
    """Whether a prompt is a conversation."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_one(prompt: object) -> bool:
    """Whether this is one prompt, and not a list of them."""
    if isinstance(prompt, str) or is_messages(prompt):
        return True
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], int)


def run_all(
    session: Session, prompts: Iterable[PromptLike], done: Callable[[int, Group], None]
) -> None:
    """Runs every prompt; no more wait in the engine than it can soon admit."""
    coming: Iterator[tuple[int, PromptLike]] = iter(enumerate(prompts))
    inside: dict[int, Group] = {}
    more = True
    while more or inside:
        while more and len(inside) < 2 * _ROWS:
            try:
                index, prompt = next(coming)
            except StopIteration:
                more = False
                break
            inside[index] = session.submit(prompt, index)
        if inside:
            session.step()
        for index in [i for i, group in inside.items() if not group.live]:
            done(index, inside.pop(index))


class Stream:
    """Events of one or several prompts, as they happen.

    Iterating drives the engine; nothing runs between two events. Tokens of beams come when every
    possible result begins with them; with `beam_events` a `BeamEvent` per request and step shows
    the live beams behind them. `cancel()` ends every prompt with the tokens it has (their last
    events say so), `close()` ends them silently.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None,
        prompts: Sequence[PromptLike],
        *,
        beam_events: bool = False,
    ):
        self._session = session
        self._wording = Wording(tokenizer)
        self._beam_events = beam_events
        self._events: list[Event | BeamEvent] = []
        self.groups = [session.submit(prompt, i) for i, prompt in enumerate(prompts)]
        for group in self.groups:
            if (trim := session.trim(group)) is not None:
                self._wording.trim(group.request.request_id, *trim)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        while not self._events:
            if not self._session.engine.pending:
                raise StopIteration
            self._events += map(self._wording, self._session.step())
            if self._beam_events:
                table = self._session.engine.table
                self._events += [beam_event(g, table, self._wording) for g in self._beamed()]
        return self._events.pop(0)

    def cancel(self) -> None:
        """Every prompt ends here; the last event of each has the reason `cancelled`."""
        reason = FinishReason("cancelled")
        for group in self.groups:
            if group.live:
                self._events += map(self._wording, self._session.engine.cancel(group, reason))

    def close(self) -> None:
        """Every prompt ends here, and there are no more events."""
        self.cancel()
        self._events = []

    def results(self) -> list[list[Generated]]:
        """What every finished prompt has become, in the order of the prompts."""
        return [self._session.generated(group) for group in self.groups]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beamed(self) -> list[Group]:
        return [g for g in self.groups if g.live and g.opened and not g.request.strategy.streams]
