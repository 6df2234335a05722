"""A call about prompts: what is asked for each, their requests, and what drives them."""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from everystep.config import (
    FIELDS,
    META,
    ChatDefaults,
    Effective,
    GenerationConfig,
    is_configuration,
    is_data,
)
from everystep.config.kinds import POSITIVE
from everystep.dialogue.asked import Dialogue, read_dialogue
from everystep.draws import seed_of
from everystep.drivers.complete import completed
from everystep.drivers.driver import Driver, Mailbox, reopen_after_fork, shared_driver
from everystep.drivers.generated import Reply, end_of_prompt
from everystep.drivers.synced import refuse_parts, synced
from everystep.engine import Continuous, Engine, Reuse
from everystep.engine.collect import Captures
from everystep.engine.explained import Again
from everystep.errors import EverystepError, RequestError, UnsupportedError, shown
from everystep.models.model import Model
from everystep.nn.modes import inference_mode
from everystep.records import RecordWriter, record_writer
from everystep.requests.absent import OF_LAYERS, OF_STEPS, refuse_argument, refuse_rectangular
from everystep.requests.caches import row_quantization
from everystep.requests.door import KEYWORDS, NOTHING_BESIDE, Beside, PromptValues, sort
from everystep.requests.inputs import Inputs
from everystep.requests.options import NO_RECORDING, Options, read_seeds
from everystep.requests.pictures import Seen
from everystep.requests.prepare import Call, prepare, require_unfilled
from everystep.requests.prompts import (
    PromptLike,
    TokenizerLike,
    messages_of,
    read_negative,
    read_prompt,
)
from everystep.requests.reading import read_options, require_output_object
from everystep.requests.rectangles import read_inputs, require_guided, with_negative
from everystep.requests.strategies import strategy_of
from everystep.requests.subject import Subject
from everystep.stops.ends import moment
from everystep.strategies import BestOf
from everystep.types import Event, Group, Request
from everystep.types.request import Strategy

OptionsLike = Mapping[str, object] | GenerationConfig

_ROWS = 32
_OBSERVED = frozenset(("layers", "attentions"))  # needs of requests that show their layers
_INSIDE = _ROWS + 8  # prompts in an engine: the fewer wait there, the sooner come other threads'
_TOKEN_BUDGET = 1024
_NOTHING_TO_TRIM = (
    "trim_stop_strings has no effect without stop_strings. Set stop_strings, or leave "
    "trim_stop_strings out."
)
_NO_TEMPLATE = (
    "add_generation_prompt has no effect on a prompt that is no conversation. Pass messages, or "
    "leave add_generation_prompt out."
)
KEPT = 4096
"""Positions that the rows of prompts that have ended may hold, for others to go on from."""


class Session:
    """Prompts of one model, as one call asks for them: read, turned into requests, and driven.

    `options`: what holds for each prompt beside the `common` keywords. `seed`: from it and the
    prompt's number come the draws of each prompt, and from nothing else; without it one is taken
    from torch's global generator. Several are one per prompt, in their order. `gives_events`: a
    stream, whose events have room for log-probabilities. `gives_steps`: a run, whose steps have
    room for all that the output object of `model.generate` has. `gives_layers`: results have room
    for what layers show. `shares`: its engines may be those
    of other calls. `scheduler`: makes those of its engines, which otherwise have room for any
    prompt. `chat`: the defaults that hold for a prompt that was read elsewhere. `explains`: gives
    how what becomes of a prompt with its keywords and its seed is taken once more. Everything about
    the options is checked here, before any compute.

    Messages get the model's chat defaults, so the same keywords may ask for other things for them
    than for a text; each kind is read once.
    """

    def __init__(
        self,
        model: Subject,
        tokenizer: TokenizerLike | None,
        prompts: Iterable[PromptLike],
        options: Sequence[OptionsLike] | None,
        seed: int | Sequence[int] | None,
        common: Mapping[str, object],
        *,
        gives_events: bool = False,
        gives_steps: bool = False,
        gives_layers: bool = False,
        shares: bool = True,
        scheduler: Callable[[], Continuous] | None = None,
        chat: ChatDefaults | None = None,
        explains: Callable[[PromptLike, Mapping[str, object], object], Again] | None = None,
    ) -> None:
        self._model, self._explains = model, explains
        self._chat = model.chat_defaults if chat is None else chat
        self._conversations = set() if chat is None else {0}  # numbers of prompts
        self._gives_events = gives_events or gives_steps
        self._gives_steps = gives_steps
        if self._gives_events:
            refuse_parts(model)
        self._carried = OF_STEPS if gives_steps else OF_LAYERS if gives_layers else ()
        self._captures = Captures()
        self.tokenizer = tokenizer
        self._cut = False
        self._mark = os.urandom(8).hex()  # of this call among others
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())
        if type(seed) is not int:
            seed = read_seeds(seed, _count(prompts, f"a seed each: got seed={shown(seed)}"))
        self._seed = seed
        self._common, self._own = common, options
        self._options: dict[tuple[int, bool], Options] = {}
        self._records: dict[str, RecordWriter] = {}
        self._since = moment()
        if chat is not None:
            self._options_of(0)
        elif options is None:
            self._read_alike(prompts)
        else:
            self._read_each(options, prompts)
        read = self._options.values()
        for notice in {one: None for each in read for one in each.effective.notices}:
            warnings.warn(notice, stacklevel=3)
        self._scheduler = scheduler
        self._shares = shares and scheduler is None and is_data((common, options))
        self._drivers: dict[frozenset[str], Driver] = {}
        self._seen = Seen()
        self._away: tuple[object, bool, PromptValues | None] = None, True, None
        self.open_locks()
        reopen_after_fork(self)

    def open_locks(self) -> None:
        """Make the locks anew, as a forked child needs it."""
        self._opening = threading.Lock()
        self._seen.open_locks()

    # --- what is asked for ------------------------------------------------------------------------

    def asked(
        self,
        prompt: PromptLike,
        given: Mapping[str, object],
        since: float,
        *,
        in_chat: bool | None = None,
    ) -> Options:
        """Return what these keywords ask for a prompt that is a call of its own, made at the moment
        `since`; `in_chat`: whether it is a conversation, where ids do not show that."""
        chats = messages_of(prompt) is not None if in_chat is None else in_chat
        own = self._read(given, since, in_chat=chats)
        _require_alike(self._model, self._first, own, "the engine")
        return own

    def _read(
        self, given: Mapping[str, object], since: float | None = None, *, in_chat: bool
    ) -> Options:
        """Return what is asked for a prompt by these keywords of a call made at the moment `since`,
        that of the session unless given; `in_chat`: it is a conversation."""
        if given.get("record") is not None:
            given = {**given, "record": self._writer(given["record"])}
        asked = sort("texts", self._model, given)
        chat = self._chat if in_chat else None
        options = read_options(self._model, asked, self.tokenizer, chat)
        if options.effective.caller:
            refuse_rectangular(options.effective, self._carried)
        strategy = _strategy(options)  # which raises if none does what is asked for
        if self._carried == OF_LAYERS:
            _require_own_rows(options.effective, strategy)
        if not self._gives_events and options.recording is not NO_RECORDING:
            require_output_object(options.recording, options.effective)
        seed, beside = options.seed, asked.beside
        if seed is None and beside is NOTHING_BESIDE:
            return options
        if beside.negative_prompt is not None:
            require_guided("negative_prompt", options.effective.guidance_scale)
        if beside.trim_stop_strings and options.effective.stop_strings is None:
            options = replace(options, effective=options.effective.noting(_NOTHING_TO_TRIM))
        deadline = None
        if beside.timeout is not None:
            if self._gives_steps:
                refuse_argument("timeout", beside.timeout, KEYWORDS["timeout"].elsewhere)
            deadline = POSITIVE.checked(beside.timeout, "timeout", "Pass timeout=10.0, say")
            deadline += self._since if since is None else since
        return replace(
            options,
            seed=None if seed is None else read_seeds(seed, 1),
            deadline=deadline,
            starts_answer=beside.add_generation_prompt is not False,
            trims=bool(beside.trim_stop_strings) and self.tokenizer is not None,
            negative_prompt=beside.negative_prompt,
            dialogue=self._dialogue(beside, in_chat=in_chat),
        )

    def _dialogue(self, beside: Beside, *, in_chat: bool) -> Dialogue | None:
        """Return what is asked of tools and thoughts, which only a conversation has."""
        found = read_dialogue(
            self.tokenizer,
            beside.tools,
            beside.tool_choice,
            beside.parallel_tool_calls,
            beside.enable_thinking,
            beside.thinking_budget,
        )
        if found is not None and not in_chat:
            raise RequestError(
                "tools and thoughts belong to a conversation",
                wanted="messages",
                got="a text or ids",
                do="Pass [{'role': 'user', 'content': ...}] as the prompt",
            )
        return found

    def _writer(self, file: object) -> RecordWriter:
        """Return the one writer of a file, for all prompts that name it."""
        writer = record_writer(file)
        return self._records.setdefault(str(writer.path), writer)

    def _read_alike(self, prompts: Iterable[PromptLike]) -> None:
        """Read what is asked for all prompts; where they come one by one, it may suit one kind."""
        known = isinstance(prompts, list | tuple) and len(prompts) > 0
        try:
            for in_chat in {messages_of(one) is not None for one in prompts} if known else (False,):
                self._options_for(0, in_chat=in_chat)
        except RequestError:
            if known:
                raise
            self._options_for(0, in_chat=True)

    def _read_each(self, options: Sequence[OptionsLike], prompts: Iterable[PromptLike]) -> None:
        """Read what is asked for each prompt; an error names the prompt."""
        count = _count(prompts, "options each")
        several = isinstance(options, Sequence) and not isinstance(options, str)
        if not several or len(options) != count:
            wanted = f"a list of {count}, one per prompt"
            got = len(options) if several else type(options).__name__
            raise RequestError("options do not fit the prompts", wanted=wanted, got=got)
        for index, prompt in enumerate(prompts):
            try:
                own = self._options_for(index, in_chat=messages_of(prompt) is not None)
                _require_alike(self._model, self._first, own, "prompt 0")
            except EverystepError as error:
                raise type(error)(f"options[{index}]: {error}") from error

    @property
    def _first(self) -> Options:
        """The options that were read first."""
        return next(iter(self._options.values()))

    def reply(self, index: int, again: Again | None = None) -> Reply:
        """Return how the prompt of this number is answered."""
        return Reply(self._options_of(index), self.tokenizer, self._captures, again)

    def again(
        self, prompt: PromptLike, index: int, given: Mapping[str, object] | None = None
    ) -> Again | None:
        """Return how what becomes of the prompt of this number is taken once more; `given`: its
        keywords, where it is a call of its own."""
        if self._explains is None:
            return None
        own = {} if self._own is None else _said(self._own[index])
        given = {**self._common, **own} if given is None else given
        seed = given.get("seed")
        seed = list(self._seed_for(index, alone=True)) if seed is None else seed  # type: ignore[arg-type]
        return self._explains(prompt, given, seed)

    def _options_of(self, index: int) -> Options:
        """Return what is asked for the prompt of this number."""
        return self._options_for(index, in_chat=index in self._conversations)

    def _options_for(self, index: int, *, in_chat: bool) -> Options:
        """Return what is asked for this prompt of a kind, or for all of the kind alike."""
        own = self._own
        index, said = (0, {}) if own is None else (index, _said(own[index]))
        found = self._options.get((index, in_chat))
        if found is None:
            found = self._read({**self._common, **said}, in_chat=in_chat)
            self._options[index, in_chat] = found
        return found

    # --- requests ---------------------------------------------------------------------------------

    def request(self, prompt: PromptLike, index: int) -> Request:
        """Return the request of the prompt of this number, after everything about it is decided and
        computed but for its tokens."""
        (request,) = self.prepared(self.read(prompt, index), index).requests
        return request

    def own_request(self, prompt: PromptLike, index: int, options: Options) -> Request:
        """Return the request of a prompt that is a call of its own, with options of its own."""
        if options.seed is None:
            options = replace(options, seed=self._seed_for(index, alone=True))
        (request,) = self._completed(self.own_call(prompt, options)).requests
        return replace(request, request_id=str(index))

    def own_call(self, prompt: PromptLike, options: Options) -> Call:
        """Return the call of such a prompt with everything decided and nothing computed."""
        return self._planned(self._passed(prompt, options), options, 0)

    def read(self, prompt: PromptLike, index: int) -> PromptValues:
        """Return the prompt of this number as one row of the inputs of `model.generate`."""
        if messages_of(prompt) is not None:
            self._conversations.add(index)
        return self._passed(prompt, self._options_of(index))

    def _passed(self, prompt: PromptLike, options: Options) -> PromptValues:
        begins, prefix = options.starts_answer, options.prefix
        if not begins and messages_of(prompt) is None:
            warnings.warn(_NO_TEMPLATE, stacklevel=4)
        own = self._model, self.tokenizer
        dialogue = options.dialogue
        passed = read_prompt(*own, prompt, starts_answer=begins, prefix=prefix, dialogue=dialogue)
        if options.negative_prompt is None:
            return passed
        away = self._negative(options.negative_prompt, starts_answer=begins)
        return replace(
            passed,
            negative_prompt_ids=away.input_ids,
            negative_prompt_attention_mask=away.attention_mask,
        )

    def _negative(self, prompt: object, *, starts_answer: bool) -> PromptValues:
        """Return what is guided away from, read once where prompts have it in common."""
        known, begun, read = self._away
        if known is not prompt or begun is not starts_answer or read is None:
            own = self._model, self.tokenizer
            read = read_negative(*own, prompt, starts_answer=starts_answer)
            self._away = prompt, starts_answer, read
        return read

    def planned(self, passed: PromptValues, index: int) -> Call:
        """Return the call of one prompt, read already, that has this number, with everything
        decided and nothing computed."""
        return self._planned(passed, self._seeded(index), index)

    def prepared(self, passed: PromptValues, index: int) -> Call:
        """Return the same with everything computed but its tokens."""
        return self._completed(self._planned(passed, self._seeded(index), index))

    def _seeded(self, index: int) -> Options:
        options = self._options_of(index)
        if options.seed is not None:
            return options
        return replace(options, seed=self._seed_for(index, alone=False))

    def _planned(self, passed: PromptValues, options: Options, number: int) -> Call:
        read = read_inputs(self._model, passed, options.ends, options.prefix)
        inputs: Inputs = replace(read, number=number)
        if passed.negative_prompt_ids is not None:
            scale = options.effective.guidance_scale
            inputs = with_negative(self._model, passed, inputs, options.ends, scale)
        _require_one(inputs)
        before = 0 if options.prefix is None else len(options.prefix)
        require_unfilled(before + inputs.prompt_width, self._model)
        if options.dialogue is not None:
            options = _led(options, options.dialogue, passed, self._model.vocab_size)
        with inference_mode():
            call = prepare(self._model, options, inputs)
        for notice in call.options.effective.notices:
            if notice not in options.effective.notices:
                warnings.warn(notice, stacklevel=4)
        return call

    def _completed(self, call: Call) -> Call:
        with inference_mode():
            return completed(self._model, call, self._seen)

    def _seed_for(self, index: int, *, alone: bool) -> int | tuple[int, ...]:
        """Return where the draws of a prompt come from that brings no seed."""
        if isinstance(self._seed, int):
            return (seed_of(self._seed, index),) if alone else self._seed
        return self._seed[index : index + 1]

    # --- driving ----------------------------------------------------------------------------------

    def driver(self, request: Request) -> Driver:
        """Return what runs this request: the driver of the executor that can do what it needs.

        Which one that is follows from the request alone. Calls like this one that run now share it,
        unless an object of the caller's takes part.
        """
        needs = request.needs
        if not needs & _OBSERVED and needs <= self._plain.engine.executor.abilities:
            return self._plain
        return self._driver_for(needs)

    @property
    def _plain(self) -> Driver:
        """The driver of prompts that need nothing special."""
        return self._driver_for(frozenset())

    def _driver_for(self, needs: frozenset[str]) -> Driver:
        with self._opening:
            if needs not in self._drivers:
                self._drivers[needs] = self._opened(needs)
            return self._drivers[needs]

    def _opened(self, needs: frozenset[str]) -> Driver:
        model, core = self._model, self._model.core
        quantization = row_quantization(self._first.effective, model)
        rows = max(_ROWS, *map(_rows_of, self._options.values()))

        def engine() -> Engine:
            executor = model.executor(needs, quantization=quantization)
            own = Continuous(max(_TOKEN_BUDGET, rows), rows, reuse=Reuse(KEPT))
            scheduler = own if self._scheduler is None else self._scheduler()
            return Engine(executor, scheduler, (self._captures,) if needs & _OBSERVED else ())

        apart = needs & _OBSERVED or model.sharded() is not None
        if apart or not self._shares or not isinstance(core, Model):
            return Driver(engine())
        alike = (model.executor_name, model.cache_dtype, torch.get_num_threads())
        return shared_driver(core, (needs, quantization, rows, *alike), engine)

    def submit(
        self, request: Request, *, events: deque[Event] | None = None, most: int | None = None
    ) -> tuple[Driver, Mailbox]:
        """Let the request take part from the next step on; return what drives it, and where what
        becomes of it is found. `events`, `most`: as for `Driver.submit`; calls that share no steps
        are never behind."""
        driver = self.driver(request)
        if self._shares and request.salt is None:
            # It reuses rows of this call, never those that another thread happened to leave.
            request = replace(request, salt=self._mark)
        most = most if self._shares else None
        return driver, driver.submit((request,), events=events, most=most)

    def run(
        self, prompts: Iterable[PromptLike]
    ) -> Generator[tuple[int, object, Exception | None], None, None]:
        """Yield every prompt by number, as it ends: what `generate` gives for it, and its error if
        it failed. No more of them wait in the engine than it can soon admit."""
        coming = enumerate(prompts)
        inside: dict[int, tuple[Driver, Mailbox]] = {}
        asked: dict[int, PromptLike] = {}
        with synced(self._model, self._options.values(), None):
            try:
                while (taken := list(islice(coming, _INSIDE - len(inside)))) or inside:
                    for number, prompt in taken:
                        try:
                            asked[number] = prompt
                            inside[number] = self.submit(self.request(prompt, number))
                        except Exception as error:
                            yield number, self.reply(number).failed(error), error
                    for driver in {driver: None for driver, _ in inside.values()}:
                        own = [box for one, box in inside.values() if one is driver]
                        driver.step_until(partial(_any_over, own))
                    for number in [n for n, (_, box) in inside.items() if box.over]:
                        (group,) = inside.pop(number)[1].groups
                        self.note_cut(number, group)
                        again = self.again(asked.pop(number), number)
                        yield number, self.reply(number, again).shaped(group), group.error
            finally:
                for driver, box in inside.values():  # after an error or interrupt: others may go on
                    driver.leave(box)

    def note_cut(self, index: int, group: Group, *, depth: int = 4) -> None:
        """Warn a caller once whose texts are cut at the default length; `depth`: how many calls
        away the caller is, this one counted."""
        if self._cut:
            return
        for notice in self.reply(index).cut(group):
            self._cut = True
            warnings.warn(notice, stacklevel=depth)


def _led(options: Options, dialogue: Dialogue, passed: PromptValues, size: int) -> Options:
    """Return the options with what leads the answer to this prompt: the grammar of its calls, and
    the bound of its thoughts."""
    tokenizer, steering = options.tokenizer, options.steering
    prompt = end_of_prompt(tokenizer, passed.input_ids)
    mask = dialogue.mask(prompt, tokenizer, options.ends.eos, size)
    bound = dialogue.bound(prompt, tokenizer)
    rival = steering.grammar is not None
    if rival and (mask is not None or (bound is not None and bound.thinks)):
        kind = steering.grammar.grammar.source.kind  # type: ignore[union-attr]
        asked = "tools" if mask is not None else "thinking_budget"
        raise RequestError(
            f"an answer cannot follow {kind} and what {asked} asks for at once",
            wanted="one of them",
            do=f"Leave {kind} out, or {asked}",
        )
    if mask is not None and not options.ends.eos:
        what, do = "forced calls need a token that ends a text", "Set eos_token_id"
        raise RequestError(what, wanted="eos_token_id", got="none", do=do)
    led = replace(steering, grammar=mask or steering.grammar, thoughts=bound)
    return replace(options, steering=led)


def _require_own_rows(e: Effective, strategy: Strategy) -> None:
    """Refuse to show layers of a search, whose hypotheses change their rows from step to step."""
    asked = [name for name in OF_LAYERS if e[name]]
    if asked and not (strategy.streams or isinstance(strategy, BestOf)):
        raise UnsupportedError(
            f"{asked[0]} shows the rows of a search step by step, and a result is one hypothesis",
            wanted="greedy decoding, sampling or contrastive search",
            got=shown(strategy),
            do="Call model.generate, whose steps show every row",
        )


def _any_over(boxes: Sequence[Mailbox]) -> bool:
    return any(box.over for box in boxes)


def _said(own: object) -> Mapping[str, object]:
    """Return the keywords that one prompt's options stand for."""
    if isinstance(own, Mapping):
        return own
    if not is_configuration(own):
        wanted = "a mapping or a GenerationConfig"
        raise RequestError("these are not options", wanted=wanted, got=type(own).__name__)
    said = GenerationConfig.of(own).to_diff_dict()
    return {name: value for name, value in said.items() if name in FIELDS and name not in META}


def _require_alike(model: Subject, first: Options, other: Options, whose: str) -> None:
    """Refuse options unless the rows of both can lie in one cache."""
    kinds = [row_quantization(one.effective, model) for one in (first, other)]
    if kinds[0] != kinds[1]:
        names = "cache_implementation and cache_config"
        raise RequestError(f"{names} differ from those of {whose}", do="Give all prompts the same")


def _strategy(options: Options) -> Strategy:
    """Return what chooses a prompt's tokens, however long it is."""
    return strategy_of(options.effective, options.choosing, len(options.ends.eos), most=1)


def _rows_of(options: Options) -> int:
    """Return the number of rows that a prompt takes, however long it is."""
    return _strategy(options).width * (2 if options.effective.guidance_scale else 1)


def _require_one(inputs: Inputs) -> None:
    if inputs.batch > 1:
        do = "Pass each row as a prompt of its own, in a list"
        raise RequestError("a prompt has several rows", wanted=1, got=inputs.batch, do=do)


def _count(prompts: object, what: str) -> int:
    """Return the number of prompts; RequestError where that cannot be known."""
    if isinstance(prompts, Sized):
        return len(prompts)
    do = "Pass list(prompts), or what holds for all of them"
    raise RequestError(
        f"prompts that come one by one cannot have {what}", wanted="a list of prompts", do=do
    )
