"""One engine for many prompts: what is asked for each, its turn, and what became of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from everystep.config import GenerationConfig, is_configuration
from everystep.draws import seed_of
from everystep.drivers.complete import completed
from everystep.drivers.generated import Generated as Generated
from everystep.drivers.shared_engine import SharedEngine, is_data, shared_engine
from everystep.engine import Continuous, Engine, Reuse
from everystep.engine.decided import results_of
from everystep.engine.logprobs import choice_logprobs, prompt_logprobs
from everystep.errors import (
    CapacityError,
    EverystepError,
    RequestError,
    shown,
)
from everystep.models.model import Model
from everystep.nn.modes import inference_mode
from everystep.requests.absent import OF_TENSORS, refuse_of_rectangles, refuse_rectangular
from everystep.requests.caches import row_quantization
from everystep.requests.inputs import Inputs
from everystep.requests.options import CONFIG_FIELDS, MODEL_INPUTS, Options, read_seeds
from everystep.requests.prepare import Call, prepare
from everystep.requests.prompts import Messages as Messages
from everystep.requests.prompts import PromptLike as PromptLike
from everystep.requests.prompts import TokenizerLike as TokenizerLike
from everystep.requests.prompts import is_messages as is_messages
from everystep.requests.prompts import listed as listed
from everystep.requests.prompts import needed, read_prompt, refuse_inputs
from everystep.requests.reading import cut_by_default, read_options, require_output_object
from everystep.requests.rectangles import read_inputs
from everystep.requests.strategies import strategy_of
from everystep.requests.subject import Subject
from everystep.stops.strings import StopStrings
from everystep.text import Trimmer
from everystep.types import Event, Finished, FinishReason, Group, Request, needs_of_hooks

OptionsLike = Mapping[str, Any] | GenerationConfig

_OF_TEXTS = ("add_generation_prompt", "trim_stop_strings", "cache_salt")
_ROWS = 32
_INSIDE = _ROWS + 8  # prompts in an engine: the fewer wait there, the sooner come other threads'
_TOKEN_BUDGET = 1024
KEPT = 4096
"""Positions that the rows of prompts that have ended may hold, for others to go on from."""


class Session:
    """One engine for many prompts of one model.

    `options`: what holds for each prompt beside the `common` keywords. `seed`: from it and the
    prompt's number come the draws of each prompt, and from nothing else; without it one is taken
    from torch's global generator. Several are one per prompt, in their order. `gives_events`: a
    stream, whose events have room for log-probabilities. `gives_steps`: a run, whose steps have
    room for all that the output object of `model.generate` has. `scheduler`: that of the engine, or
    one with room for any prompt. Everything about the options is checked here, before any compute.
    """

    def __init__(
        self,
        model: Subject,
        tokenizer: TokenizerLike | None,
        prompts: Iterable[PromptLike],
        options: Sequence[OptionsLike] | None,
        seed: int | Sequence[int] | None,
        common: Mapping[str, Any],
        *,
        gives_events: bool = False,
        gives_steps: bool = False,
        scheduler: Continuous | None = None,
    ) -> None:
        self._model = model
        self._gives_events = gives_events or gives_steps
        self._gives_steps = gives_steps
        self.tokenizer = tokenizer
        self._cut = False
        self._mark = os.urandom(8).hex()  # of this call among others
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())
        if type(seed) is not int:
            seed = read_seeds(seed, _count(prompts, f"a seed each: got seed={shown(seed)}"))
        self._seed = seed
        self._own: dict[str, Options] = {}  # of prompts that were submitted with options
        if options is None:
            self._options = [self._read(common)]
        else:
            self._options = self._read_each(common, options, prompts)
        for notice in {one: None for each in self._options for one in each.effective.notices}:
            warnings.warn(notice, stacklevel=3)
        hooked = (needs_of_hooks(each.hooks) for each in self._options)
        self._abilities = needed(model, prompts).union(*hooked)
        self._scheduler = scheduler
        self._is_data = is_data((common, options))

    @cached_property
    def engine(self) -> Engine:
        """What runs the prompts that are submitted."""
        executor = self._model.executor(self._abilities, quantization=self._quantization)
        own = Continuous(max(_TOKEN_BUDGET, self._rows), self._rows, reuse=Reuse(KEPT))
        return Engine(executor, self._scheduler or own)

    @property
    def _rows(self) -> int:
        return max(_ROWS, *map(_rows_of, self._options))

    @property
    def _quantization(self) -> Any:
        options = self._options
        return row_quantization(options[0].effective, self._model) if options else None

    def _shared_engine(self) -> SharedEngine:
        """The engine of the calls like this one that run now; one of its own where an object of the
        caller's takes part."""
        model, core = self._model, self._model.core
        if not self._is_data or not isinstance(core, Model):
            return SharedEngine(self.engine)
        alike = (model.executor_name, model.cache_dtype, torch.get_num_threads())
        key = (self._abilities, self._quantization, self._rows, *alike)
        return shared_engine(core, key, lambda: self.engine)

    def asked(self, given: Mapping[str, Any]) -> Options:
        """What these keywords ask for a prompt that `submit` gets with them."""
        own = self._read(given)
        _require_alike(self._model, self._options[0], own, "the engine")
        return own

    def _read(self, given: Mapping[str, Any]) -> Options:
        """What is asked for a prompt by these keywords."""
        refuse_inputs(self._model, given)
        refuse_of_rectangles(given)
        beside = (*_OF_TEXTS, *MODEL_INPUTS, *OF_TENSORS)
        options = read_options(self._model, given, beside, self.tokenizer)
        refuse_rectangular(options.effective, in_steps=self._gives_steps)
        strategy_of(options, 1)  # which raises if none does what is asked for
        if not self._gives_events:
            require_output_object(options)
        return replace(
            options,
            seed=None if options.seed is None else read_seeds(options.seed, 1),
            starts_answer=given.get("add_generation_prompt") is not False,
            trims=bool(given.get("trim_stop_strings")) and self.tokenizer is not None,
        )

    def _read_each(
        self,
        common: Mapping[str, Any],
        options: Sequence[OptionsLike],
        prompts: Iterable[PromptLike],
    ) -> list[Options]:
        """What is asked for each prompt; an error names the prompt."""
        count = _count(prompts, "options each")
        several = isinstance(options, Sequence) and not isinstance(options, str)
        if not several or len(options) != count:
            wanted = f"a list of {count}, one per prompt"
            got = len(options) if several else type(options).__name__
            raise RequestError("options do not fit the prompts", wanted=wanted, got=got)
        read: list[Options] = []
        for index, own in enumerate(options):
            try:
                read.append(self._read({**common, **_said(own)}))
                if index:
                    _require_alike(self._model, read[0], read[-1], "prompt 0")
            except EverystepError as error:
                raise type(error)(f"options[{index}]: {error}") from error
        return read

    def _options_of(self, index: int | str) -> Options:
        """What is asked for the prompt of this number, or for all alike."""
        if str(index) in self._own:
            return self._own[str(index)]
        return self._options[0 if len(self._options) == 1 else int(index)]

    def submit(self, prompt: PromptLike, index: int, own: Options | None = None) -> Group:
        """Queues the prompt of this number, which is the id of its request, after everything about
        it is decided and computed but for its tokens.

        `own`: what is asked for it where it is a call of its own, which then is `forget`'s to end.
        """
        passed = self.read(prompt, index, own)
        if own is None:
            (request,) = self.prepared(passed, index).requests
            return self.engine.submit(request)
        if own.seed is None:
            own = replace(own, seed=self._seed_for(index, alone=True))
        (request,) = self._call(passed, own, 0).requests
        group = self.engine.submit(replace(request, request_id=str(index)))
        self._own[str(index)] = own
        return group

    def read(self, prompt: PromptLike, index: int, own: Options | None = None) -> dict[str, Any]:
        """The prompt of this number as one row of the inputs of `model.generate`."""
        options = self._options_of(index) if own is None else own
        begins, prefix = options.starts_answer, options.prefix
        return read_prompt(self._model, self.tokenizer, prompt, starts_answer=begins, prefix=prefix)

    def prepared(self, passed: Mapping[str, Any], index: int) -> Call:
        """The call of one prompt, read already, that has this number, with everything but its
        tokens decided and computed."""
        options = self._options_of(index)
        if options.seed is None:
            options = replace(options, seed=self._seed_for(index, alone=False))
        return self._call(passed, options, index)

    def _call(self, passed: Mapping[str, Any], options: Options, number: int) -> Call:
        inputs: Inputs = replace(read_inputs(self._model, passed, options), number=number)
        _require_one(inputs)
        before = 0 if options.prefix is None else len(options.prefix)
        _require_room(before + inputs.prompt_width, self._model.context)
        with inference_mode():
            return completed(self._model, prepare(self._model, options, inputs))

    def _seed_for(self, index: int, *, alone: bool) -> int | tuple[int, ...]:
        """Where the draws of a prompt come from that brings no seed."""
        if isinstance(self._seed, int):
            return (seed_of(self._seed, index),) if alone else self._seed
        return self._seed[index : index + 1]

    def forget(self, group: Group) -> None:
        """What was asked for a prompt that is over is not kept."""
        self._own.pop(group.request.request_id, None)

    def step(self) -> list[Event]:
        """One step of the engine."""
        with inference_mode():
            return self.engine.step()

    def run(
        self, prompts: Iterable[PromptLike]
    ) -> Generator[tuple[int, Any, Exception | None], None, None]:
        """Every prompt by number, as it ends: what `generate` gives for it, and its error if it
        failed. No more of them wait in the engine than it can soon admit."""
        coming = enumerate(prompts)
        inside: dict[int, Group] = {}
        shared = self._shared_engine()
        try:
            while (taken := list(islice(coming, _INSIDE - len(inside)))) or inside:
                for number, prompt in taken:
                    try:
                        request = self._alone(self.read(prompt, number), number)
                        inside[number] = shared.submit(request)
                    except Exception as error:
                        yield number, self._failed(error), error
                if inside:
                    shared.step_until(lambda: not all(group.live for group in inside.values()))
                for number in [n for n, group in inside.items() if not group.live]:
                    group = inside.pop(number)
                    self.note_cut(group)
                    yield number, self.shaped(group), group.error
        finally:
            shared.leave(inside.values())  # after an error or interrupt: others may continue

    def _alone(self, passed: Mapping[str, Any], number: int) -> Request:
        """The request of one prompt, which reuses rows of this call and of its own salt only, never
        those that another thread happened to leave."""
        (request,) = self.prepared(passed, number).requests
        return request if request.salt is not None else replace(request, salt=self._mark)

    def note_cut(self, group: Group, *, depth: int = 4) -> None:
        """Warns a caller once who set no length and shall not take a cut text for a whole one;
        `depth`: how many calls away the caller is, this one counted."""
        if self._cut:
            return
        options = self._options_of(group.request.request_id)
        for notice in cut_by_default(options, (done.reason for done in group.done)):
            self._cut = True
            warnings.warn(notice, stacklevel=depth)

    def generated(self, group: Group) -> list[Generated]:
        """The result of a group that has ended."""
        if (error := group.error) is not None:
            done = next(one for one in group.done if one.reason.kind == "error")
            return [self._failed(error, done.tokens, group.request.prompt.length)]
        return self.generated_from(group, results_of(group))

    def generated_from(self, group: Group, finished: Iterable[Finished]) -> list[Generated]:
        """These hypotheses of a group."""
        length, wants = group.request.prompt.length, group.request.wants
        asked = self._options_of(group.request.request_id).logprobs
        of_prompt = None if wants.prompt_logprobs is None else prompt_logprobs(group)
        trim = self.trim(group)
        results = []
        for done in finished:
            ids = done.tokens.tolist()
            text = self._text(ids)
            if trim is not None:
                text = Trimmer(*trim).finish(text, done.reason.matched)
            known = None if asked is None else choice_logprobs(done.memo, len(ids))
            counts = length, group.cached_tokens
            found = done.reason, done.score, *counts, known, of_prompt
            results.append(Generated(text, tuple(ids), *found))
        return results

    def _failed(self, error: Exception, tokens: Any = (), prompt: int = 0) -> Generated:
        """What stands in the place of a prompt that failed after these tokens."""
        ids = tuple(int(token) for token in tokens)
        return Generated(self._text(ids), ids, FinishReason("error", error), 0.0, prompt)

    def shaped(self, group: Group) -> Any:
        """What `generate` gives for a group that has ended."""
        values: list[Any] = list(self.generated(group))
        whole = self._options_of(group.request.request_id).effective.return_dict_in_generate
        if group.error is None and not whole:
            plain = self.tokenizer is None
            values = [list(one.tokens) if plain else one.text for one in values]
        return values[0] if len(values) == 1 else values

    def trim(self, group: Group) -> tuple[tuple[str, ...], str] | None:
        """The stop strings that the texts of a group lose and the end of its prompt, if asked."""
        if not self._options_of(group.request.request_id).trims:
            return None
        stops = (stop for stop in group.request.stops if isinstance(stop, StopStrings))
        strings = tuple(string for stop in stops for string in stop.strings)
        ids = group.request.prompt.ids
        longest = max((len(string.encode()) for string in strings), default=0)
        before = [] if ids is None or not longest else ids[-longest:].tolist()
        return strings, self._text(before)

    def _text(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _said(own: Any) -> Mapping[str, Any]:
    """The keywords that one prompt's options stand for."""
    if isinstance(own, Mapping):
        return own
    if not is_configuration(own):
        wanted = "a mapping or a GenerationConfig"
        raise RequestError("these are not options", wanted=wanted, got=type(own).__name__)
    said = GenerationConfig.of(own).to_diff_dict()
    return {name: value for name, value in said.items() if name in CONFIG_FIELDS}


def _require_alike(model: Subject, first: Options, other: Options, whose: str) -> None:
    """RequestError unless the rows of both can lie in one cache."""
    kinds = [row_quantization(one.effective, model) for one in (first, other)]
    if kinds[0] != kinds[1]:
        names = "cache_implementation and cache_config"
        raise RequestError(f"{names} differ from those of {whose}", do="Give all prompts the same")


def _rows_of(options: Options) -> int:
    """How many rows a prompt takes, however long it is."""
    return strategy_of(options, 1).width * (2 if options.effective.guidance_scale else 1)


def _require_one(inputs: Inputs) -> None:
    if inputs.batch > 1:
        do = "Pass each row as a prompt of its own, in a list"
        raise RequestError("a prompt has several rows", wanted=1, got=inputs.batch, do=do)


def _require_room(length: int, context: int | None) -> None:
    if context is not None and length >= context:
        raise CapacityError(
            "the prompt fills the model's context",
            wanted=f"fewer than {context} tokens",
            got=length,
            do="Shorten the prompt, or take a model with a longer context",
        )


def _count(prompts: Any, what: str) -> int:
    """How many prompts there are; RequestError where that cannot be known."""
    if isinstance(prompts, Sized):
        return len(prompts)
    do = "Pass list(prompts), or what holds for all of them"
    raise RequestError(
        f"prompts that come one by one cannot have {what}", wanted="a list of prompts", do=do
    )
