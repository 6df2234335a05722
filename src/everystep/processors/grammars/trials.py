"""Grammars on trial: what a stranger asks for is compiled in a process that can be ended, first.

The library that compiles cannot be stopped, and what it compiled cannot go from one process to
another. So a process with bounds of time and memory reads and compiles a grammar, and only what it
came back from is compiled where texts are generated. What became of a grammar is remembered.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import tokenizers

from everystep.errors import (
    CapacityError,
    EverystepError,
    FormatError,
    RequestError,
    TokenizerError,
    UnsupportedError,
)
from everystep.processors.grammars.source import GrammarSource, Kind, plain_value
from everystep.processors.grammars.vocabulary import (
    GrammarVocabulary,
    library,
    packed_vocabulary,
)
from everystep.text import caged
from everystep.text.killable import SILENT, close_pipes, exchanged, kill, runs, started

_ERRORS: dict[str, type[EverystepError]] = {
    one.__name__: one for one in (RequestError, UnsupportedError, TokenizerError, FormatError)
}
_PROGRAM = Path(__file__).with_name("trial_program.py")
_PATIENCE = 10.0  # seconds of the clock for each of processor time, on a busy machine
_START = 60.0  # seconds for a process to start and to read a vocabulary
_MOST_ANSWER = 8 << 20  # bytes
_KEPT = 1024  # outcomes that are remembered,
_KEPT_CHARACTERS = 4 << 20  # and how many characters they have
_LARGE = 16 << 20
_SIMPLER = "Correct it, or ask for something simpler"


@dataclass(frozen=True, slots=True)
class TrialBounds:
    """The bounds of a grammar on trial: seconds of processor time and bytes of memory, and how many
    processes try at once."""

    seconds: float = 2.0
    memory: int = 256 << 20
    processes: int = 2


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial: the grammar as it is compiled, or the error that it is.

    `large`: it takes so much memory that it is not kept for others.
    """

    text: str
    error: type[EverystepError] | None = None
    large: bool = False

    def require(self) -> None:
        """Raise the error, if it is one."""
        if self.error is not None:
            raise self.error(self.text)


class GrammarTrials:
    """Processes that compile grammars first, and what became of those that they tried."""

    def __init__(self, bounds: TrialBounds | None = None) -> None:
        self.bounds = bounds or TrialBounds()
        self.count = 0  # of trials until now
        self._free = threading.Condition()
        self._idle: list[_TrialProcess] = []
        self._known: OrderedDict[bytes, TrialOutcome] = OrderedDict()
        self._characters = self._busy = 0
        self._line: deque[object] = deque()  # of those who wait for a process

    @property
    def processes(self) -> list[int]:
        """The numbers of the processes that wait for a grammar."""
        return [one.pid for one in self._idle]

    def read(self, kind: Kind, value: object, vocabulary: GrammarVocabulary) -> GrammarSource:
        """Return what was given under this keyword as `read_source` does, once it has compiled
        within the bounds; RequestError where it has not."""
        if isinstance(value, GrammarSource):
            return value
        plain = plain_value(value) if kind == "schema" else value
        outcome = self._outcome((kind, plain, False), vocabulary)
        outcome.require()
        source = GrammarSource(kind, outcome.text)
        self._remember(_digest((kind, source.text, True), vocabulary), outcome)
        return source

    def require(self, source: GrammarSource, vocabulary: GrammarVocabulary) -> bool:
        """Raise RequestError unless a grammar compiles within the bounds; return whether it is
        small enough to be kept."""
        outcome = self._outcome((source.kind, source.text, True), vocabulary)
        outcome.require()
        return not outcome.large

    def close(self) -> None:
        """End the processes that wait."""
        with self._free:
            idle, self._idle = self._idle, []
        for one in idle:
            one.end()

    # --- what is remembered -----------------------------------------------------------------------

    def _outcome(self, question: tuple[Any, ...], vocabulary: GrammarVocabulary) -> TrialOutcome:
        key = _digest(question, vocabulary)
        with self._free:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        found = self._try(question, vocabulary)
        if found is None:  # somebody else ended the process, for reasons of his own
            found = self._try(question, vocabulary) or (self._too_large(question[0]), False)
        outcome, lasts = found
        if lasts:
            self._remember(key, outcome)
        return outcome

    def _remember(self, key: bytes, outcome: TrialOutcome) -> None:
        with self._free:
            if (before := self._known.pop(key, None)) is not None:
                self._characters -= len(before.text)
            self._known[key] = outcome
            self._characters += len(outcome.text)
            while len(self._known) > _KEPT or self._characters > _KEPT_CHARACTERS:
                self._characters -= len(self._known.popitem(last=False)[1].text)

    # --- trying -----------------------------------------------------------------------------------

    def _try(
        self, question: tuple[Any, ...], vocabulary: GrammarVocabulary
    ) -> tuple[TrialOutcome, bool] | None:
        """Return what becomes of a grammar, and whether that is so at any other time too; None
        where the process was ended from outside."""
        self.count += 1
        one = self._take(vocabulary)
        keep = False
        try:
            late = time.monotonic() + _PATIENCE * (1 + self.bounds.seconds)
            found = one.ask(question, late)
            if found is None:
                by, is_late = one.end(), time.monotonic() >= late
                if by == signal.SIGPROF or is_late:
                    return self._too_slow(question[0]), not is_late
                outcome = self._too_large(question[0])
                return None if by == signal.SIGKILL else (outcome, True)
            error = None if found.get("error") is None else _ERRORS[found["error"]]
            large = int(found.get("bytes", 0)) > _LARGE
            keep = not large  # or how much the next one takes could not be told
            return TrialOutcome(str(found["text"]), error, large), True
        finally:
            self._give_back(one, keep=keep)

    def _too_slow(self, kind: str) -> TrialOutcome:
        error = RequestError(
            f"{kind} takes too long to compile",
            wanted=f"at most {self.bounds.seconds:g} s of processor time",
            do=_SIMPLER,
        )
        return TrialOutcome(str(error), RequestError)

    def _too_large(self, kind: str) -> TrialOutcome:
        error = RequestError(
            f"{kind} takes too much memory to compile",
            wanted=f"at most {self.bounds.memory >> 20} MB",
            do=_SIMPLER,
        )
        return TrialOutcome(str(error), RequestError)

    def _take(self, vocabulary: GrammarVocabulary) -> _TrialProcess:
        """Return a process that has the vocabulary, once one is free; who came first is first."""
        late, own = time.monotonic() + _PATIENCE * (1 + self.bounds.seconds), object()
        with self._free:
            self._line.append(own)
            try:
                while self._busy >= self.bounds.processes or self._line[0] is not own:
                    if not self._free.wait(late - time.monotonic()):
                        raise CapacityError(
                            "no process that compiles grammars was free in time",
                            wanted=f"one of {self.bounds.processes}",
                            do="Try again later",
                        )
            finally:
                self._line.remove(own)
                self._free.notify_all()
            self._busy += 1
            found = None
            for one in self._idle[::-1]:
                if one.vocabulary is vocabulary:
                    found = one
                    break
            if found is not None:
                self._idle.remove(found)
            elif self._busy + len(self._idle) > self.bounds.processes:
                self._idle.pop(0).end()
        if found is not None and found.is_ours():
            return found
        try:
            return _TrialProcess(vocabulary, self.bounds)
        except BaseException:
            self._give_back(None, keep=False)
            raise

    def _give_back(self, one: _TrialProcess | None, *, keep: bool) -> None:
        if one is not None and not keep:
            one.end()
        with self._free:
            self._busy -= 1
            if one is not None and keep:
                self._idle.append(one)
            self._free.notify_all()


class _TrialProcess:
    """One process with one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary, bounds: TrialBounds) -> None:
        self.vocabulary = vocabulary
        paths = {str(Path(str(one.__file__)).parent.parent) for one in (np, tokenizers, library())}
        told = {
            "vocabulary": packed_vocabulary(vocabulary),
            "memory": bounds.memory,
            "seconds": bounds.seconds,
        }
        line = [sys.executable, "-I", "-S", str(_PROGRAM), *sorted(paths)]
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = started(line, {"TOKENIZERS_PARALLELISM": "false"})
            late = time.monotonic() + _START
            if self._exchange(caged.packed(told), late) != "ready":
                raise OSError(f"{sys.executable} ends at once")
        except OSError as error:
            self.end()
            raise CapacityError(
                "the process that compiles grammars does not start",
                got=str(error)[:200],
                do="Try again later",
            ) from error

    @property
    def pid(self) -> int:
        """The number of the process."""
        return cast("subprocess.Popen[bytes]", self._process).pid

    def ask(self, question: tuple[Any, ...], late: float) -> dict[str, Any] | None:
        """Return what becomes of a grammar; None where the process has ended, at the moment `late`
        or before."""
        found = self._exchange(caged.packed([*question]), late)
        return found if isinstance(found, dict) and isinstance(found.get("text"), str) else None

    def is_ours(self) -> bool:
        """Return True if it runs and is not that of a process from which this one was forked."""
        return self._owner == os.getpid() and self._process is not None and runs(self._process)

    def __del__(self) -> None:
        self.end()

    def end(self) -> int:
        """End the process, if it has not ended; return the number of the signal that did, 0 for
        none."""
        process = self._process
        if process is None or self._owner != os.getpid():
            return 0
        try:
            # Without questions it ends by itself; where it already has, its end says why.
            close_pipes(process)
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            kill(process)
            process.wait()
        return max(-process.returncode, 0)

    def _exchange(self, question: bytes, late: float) -> Any:
        process = cast("subprocess.Popen[bytes]", self._process)
        try:
            data = exchanged(process, question, late, _MOST_ANSWER)
            return None if data is None else caged.unpacked(data)
        except SILENT:
            return None


def _digest(question: tuple[Any, ...], vocabulary: GrammarVocabulary) -> bytes:
    whole = caged.packed([*question, vocabulary.number])
    return hashlib.sha256(whole).digest()


# --- which trials hold ----------------------------------------------------------------------------

_HELD: ContextVar[GrammarTrials | None] = ContextVar("grammars on trial", default=None)


@contextmanager
def on_trial(trials: GrammarTrials | None) -> Iterator[None]:
    """Have grammars that are compiled in the block tried first; None: not."""
    before = _HELD.set(trials)
    try:
        yield
    finally:
        _HELD.reset(before)


def trials_held() -> GrammarTrials | None:
    """Return who tries the grammars of this thread first, None for nobody."""
    return _HELD.get()
