"""The keywords that runs go by, and the engine that a run shares with its forks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from everystep.cache.formats import Quantization
from everystep.config import ChatDefaults
from everystep.drivers.driver import Driver, Mailbox, reopen_after_fork
from everystep.drivers.session import Session
from everystep.engine import Beginning, Engine, Known, Turns
from everystep.engine.recording import name_of
from everystep.engine.sight import Sight
from everystep.engine.watching import StepRecord
from everystep.errors import RequestError, shown
from everystep.nn.modes import inference_mode
from everystep.requests.arrays import as_numbers
from everystep.requests.inputs import Inputs
from everystep.requests.options import Options
from everystep.requests.prepare import Call, prepare, require_unfilled
from everystep.requests.prompts import Tokenizing
from everystep.requests.subject import Subject
from everystep.strategies import Beam
from everystep.types import Event, Group, Request
from everystep.types.request import SecondStates

if TYPE_CHECKING:
    from everystep.requests.keywords import PromptOptions

_BUDGET = 1024
_READ_ONCE = (
    *("add_generation_prompt", "trim_stop_strings", "return_dict_in_generate"),
    *("tools", "tool_choice", "parallel_tool_calls", "enable_thinking", "thinking_budget"),
    *("record", "negative_prompt", "prefix", "cache_salt", "adapter_names", "adapters", "hooks"),
    "steer",
)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The keywords and the seed that a run goes by, and the defaults of a chat if it is one."""

    options: Mapping[str, object]
    seed: int | Sequence[int] | None
    chat: ChatDefaults | None = None

    def session(self, model: Subject, tokenizer: object) -> Session:
        """Return what reads the prompt and prepares its call."""
        if self.options.get("return_dict_in_generate") is False:
            raise RequestError(
                "return_dict_in_generate=False contradicts a run, whose result is an object",
                wanted="True, or nothing",
                do="Leave it out, and take run.result().text or .tokens",
            )
        # A step has room for all that is else part of the output object alone.
        common = {**self.options, "return_dict_in_generate": True}
        chat = self.chat
        return Session(model, tokenizer, [""], None, self.seed, common, gives_steps=True, chat=chat)

    def changed(self, changes: PromptOptions) -> Asked:
        """Return the same with other values of some of them."""
        rest = {name: value for name, value in changes.items() if name != "seed"}
        return Asked({**self.options, **rest}, changes.get("seed", self.seed), self.chat)


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """The options in force, and how many tokens a run may choose by them.

    `asked`: the keywords they were read from. `inputs`, `first`: the prompt, and the first request
    of the run, whose prompts its later ones share. `quantization`: how its rows are kept.
    `second`: what the encoders of second models made of the prompt. `without`: names of processors
    that are left out.
    """

    asked: Asked
    options: Options
    inputs: Inputs
    first: Request
    room: int
    quantization: Quantization | None
    second: SecondStates
    without: tuple[str, ...] = ()

    @classmethod
    def of(cls, asked: Asked, call: Call, first: Request | None = None) -> Rules:
        """Return those of a prepared call."""
        (request,) = call.requests
        room = int(call.options.effective.max_length) - call.inputs.counted_width
        # The prompt stands after its prefix already.
        options = replace(call.options, prefix=None)
        kept = first or request
        return cls(asked, options, call.inputs, kept, room, call.quantization, request.second)

    def request(self, model: Subject, given: int, name: str) -> Request:
        """Return the request of a run with so many given ids, for which there is more room."""
        new, effective = self.room + given, self.options.effective
        unlimited = effective.max_new_tokens is None and effective.source("max_length") == "default"
        if unlimited and model.reach is not None:  # what the model was made for is the limit
            new = min(new, model.reach - self.first.prompt.length or new)
        effective = effective.replaced("call", max_new_tokens=new)
        (made,) = prepare(model, replace(self.options, effective=effective), self.inputs).requests
        keeps, beside, strategy = is_one(made), self.first.companions, made.strategy
        if isinstance(strategy, Beam):
            # It may be asked for more hypotheses when it is over.
            keeps, strategy = True, replace(strategy, gathers=True)
        if self.without:
            # Drafts change no token, and those of a grammar would still be forced.
            left = [one for one in made.processors if name_of(one) not in self.without]
            made = replace(made, processors=tuple(left), drafter=None)
        return replace(
            made,
            strategy=strategy,
            request_id=name,
            prompt=self.first.prompt,
            companions=beside if len(beside) == len(made.companions) else made.companions,
            second=self.second,
            linger=keeps,
            keeps=keeps,
            watcher=self.first.watcher,
        )

    def require_room(self, model: Subject, length: int) -> None:
        """Raise OversizeError where so many ids after the prompt fill the model's context."""
        require_unfilled(self.first.prompt.length + length, model)


def is_one(request: Request) -> bool:
    """Return whether the request has one sequence, whose tokens are settled as they are chosen."""
    return request.strategy.streams and request.strategy.returns == 1


def over(group: Group) -> bool:
    """Return whether the group chooses nothing any more."""
    return not group.live or group.finished


def read_ids(model: Subject, tokenizer: Tokenizing | None, ids: Sequence[int] | str) -> list[int]:
    """Return the ids of what was sent, each of them in the vocabulary."""
    if isinstance(ids, str):
        if tokenizer is None:
            raise RequestError("text needs a tokenizer", do="Pass ids, or open with a tokenizer")
        ids = tokenizer.encode(ids, add_special_tokens=False)
    size = model.vocab_size
    found = as_numbers("what is sent", ids, "a text or a list of ids", "Pass such").reshape(-1)
    whole = found.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not len(found) or not whole or int(found.min()) < 0 or int(found.max()) >= size:
        wanted = f"integers from 0 to {size - 1}, at least one"
        raise RequestError("these are no ids to send", wanted=wanted, got=shown(ids))
    return [int(one) for one in found.tolist()]


def require_changeable(old: Request, new: Request, names: Iterable[str]) -> None:
    """Raise RequestError unless a run of the old request may go on as one of the new."""
    changed = ", ".join(sorted(names))
    what = f"this cannot change while a run is under way: {changed}"
    if fixed := [name for name in sorted(names) if name in _READ_ONCE]:
        raise RequestError(what, got=", ".join(fixed), do="Open a new run with it")
    alike = old.strategy == new.strategy or (
        old.strategy.reads.alone and new.strategy.reads.alone and old.strategy.width == 1
    )
    same = alike and new.strategy.width == old.strategy.width and old.wants == new.wants
    if not same or len(old.companions) != len(new.companions):
        raise RequestError(
            what,
            wanted="the same number of sequences, of prompts beside them, and things to record",
            do="Open a new run with it, from the ids of this one",
        )


class Hands:
    """The driver that a run and its forks share, and the sight of each one's last step.

    `sights`: by group. `lock`: held by the thread that steps or changes a run. Code of the caller's
    that a step calls has it too, so `require_between` tells it apart.
    """

    def __init__(self, model: Subject, call: Call) -> None:
        (request,) = call.requests
        self.sights: dict[int, Sight] = {}
        self.open_locks()
        reopen_after_fork(self)
        self.quantization = call.quantization
        self._turns = Turns(max(_BUDGET, 2 * request.strategy.width))
        executor = model.executor(request.needs, call.quantization)
        self.engine = Engine(executor, self._turns, (self._observe,))
        self._driver = Driver(self.engine)
        self._boxes: dict[str, Mailbox] = {}  # by request
        self._names = 0
        self._explaining: int | None = None  # the thread that does
        self._later: deque[Callable[[], None]] = deque()

    def open_locks(self) -> None:
        """Make the lock anew, as a forked child needs it."""
        self.lock = threading.RLock()

    def _observe(self, record: StepRecord) -> None:
        """Take the record of a step, in which one group alone took part."""
        self.sights[id(record.scored.groups[0])] = Sight(record)

    # --- groups -----------------------------------------------------------------------------------

    def submit(self, request: Request) -> Group:
        """Return the group of a request, before its first step."""
        return self._adopted(self.engine.submit(request))

    def restore(self, request: Request, data: bytes) -> Group:
        """Return the group that was dumped."""
        return self._adopted(self.engine.restore(request, data))

    def replace(self, group: Group, request: Request, beginning: Beginning) -> None:
        """Make the group one of this request, which begins with other ids."""
        with inference_mode():
            self.engine.replace(group, request, beginning)
        self._adopted(group)

    def fork(
        self, group: Group, request: Request | None = None, known: Known | None = None
    ) -> Group:
        """Return a group that is as this one, and goes on by itself; `request`, `known`: as for
        `Engine.fork`."""
        twin = replace(group.request, request_id=self.name()) if request is None else request
        with inference_mode():
            return self._adopted(self.engine.fork(group, twin, known))

    def _adopted(self, group: Group) -> Group:
        """Collect the events of the group from now on."""
        name = group.request.request_id
        self._boxes[name] = self._driver.adopt(group, self._boxes.get(name))
        return group

    def mail(self, group: Group) -> deque[Event]:
        """Return the events that the run of the group has not seen."""
        return self._boxes[group.request.request_id].events

    def cancel(self, group: Group) -> None:
        """End the group here, and report it."""
        self._driver.end(self._boxes[group.request.request_id])

    def drop(self, group: Group) -> None:
        """Give up the rows of the group, and what it reported."""
        self.cancel(group)
        del self._boxes[group.request.request_id]
        self.sights.pop(id(group), None)

    def name(self) -> str:
        """Return an id that no request of the engine has."""
        self._names += 1
        return f"0.{self._names}"

    # --- steps ------------------------------------------------------------------------------------

    def step(self, group: Group) -> Sight | None:
        """Step until the group has chosen or is over, and return what its choice saw."""
        self._turns.turn = group
        while not over(group) and id(group) not in self.sights:
            self._driver.step()
        return self.sights.pop(id(group), None)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Count all that this thread does inside as one step."""
        outer = self._explaining
        try:
            self._explaining = threading.get_ident()
            yield
        finally:
            self._explaining = outer

    def _is_inside(self) -> bool:
        """Return whether code that a step calls is running in this thread."""
        return self._driver.is_stepping_here() or self._explaining == threading.get_ident()

    def require_between(self, what: str) -> None:
        """Raise RequestError for what is asked for by code that a step of this thread calls."""
        if self._is_inside():
            raise RequestError(
                f"{what} was called inside a step, by code that the step calls",
                wanted="no step under way in this thread",
                do="Call it between steps",
            )

    def between_steps(self, act: Callable[[], None]) -> None:
        """Act now, or when the step that this thread is in is over."""
        if self._is_inside():
            self._later.append(act)
        else:
            act()

    def catch_up(self) -> None:
        """Do what was put off in a step, which is over."""
        while self._later:
            self._later.popleft()()
