"""Templates in a cage: each runs in a process of its own, which can be ended at any time.

One operation of Python, such as comparing two large lists, can take hours or all memory, and
nothing in the same process can stop it. The process of a template is kept for the next chat, so
that only the first waits for its start. There are only so many processes at once, of all templates:
each may fill its memory.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import jinja2
import markupsafe

from everystep.errors import TokenizerError
from everystep.text import caged
from everystep.text.killable import SILENT, close_pipes, exchanged, kill, runs, started
from everystep.text.rendering import Rendering, WrongTemplate, exceeded, not_compiled
from everystep.text.sandbox import TemplateLimits

MOST_PROCESSES = 8
"""How many processes of templates there are at once, those that wait for a chat included."""
_KEPT = 2  # processes of one template that wait for its next chat, at most
_PATIENCE = 10.0  # seconds of the clock for each of processor time, on a busy machine
_GLANCE = 0.25  # seconds between looks for a place that nobody gave back
_BUSY = "No process that renders chat templates was free in time"
_LATER = "Try again, or render fewer chats at once"
_TOO_MUCH = "it needs more time or memory than a template gets"


class CagedProgram:
    """A template like `CompiledTemplate`, but compiled and rendered in processes of its own.

    WrongTemplate for a source that cannot be compiled, TokenizerError where no process starts.
    """

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._source, self._limits = source, limits
        try:
            first = _POOL.take(source, limits, self._deadline())
        except _AllBusyError as error:
            raise TokenizerError(_BUSY, got=str(error), do=_LATER) from None
        self.reads = first.reads
        _POOL.give_back(first, keep=True)

    def run(self, names: Mapping[str, Any]) -> Rendering:
        """Return the text as the template prints it, or why there is none."""
        try:
            question = caged.packed(dict(names))
        except (RecursionError, ValueError) as failure:
            what = "A message or variable has no place in a chat template"
            return Rendering(what=what, got=str(failure)[:500])
        deadline = self._deadline()
        try:
            cage = _POOL.take(self._source, self._limits, deadline)
        except _AllBusyError as error:
            return Rendering(what=_BUSY, got=str(error), do=_LATER)
        answer = cage.ask(question, deadline)
        # What failed may hold memory that the next chat needs.
        _POOL.give_back(cage, keep=answer.what is None)
        return answer

    def _deadline(self) -> float:
        """Return the moment by which a chat that comes now has its answer."""
        return time.monotonic() + min(_PATIENCE * (1 + self._limits.seconds), caged.DAY)


class _AllBusyError(Exception):
    """No process was free in time."""


class _Pool:
    """All processes of templates, those at work and those that wait for the next chat."""

    def __init__(self) -> None:
        self.cages: weakref.WeakSet[_Cage] = weakref.WeakSet()
        self._freed = threading.Condition()
        self._waiting: list[_Cage] = []

    def take(self, source: str, limits: TemplateLimits, deadline: float) -> _Cage:
        """Return a process that has the template and is free.

        Where none is, one starts; where there are as many as there may be, the one that has waited
        longest ends for it. Where all of them work, the first that is free is waited for.
        """
        with self._freed:
            while True:
                if (cage := self._kept(source, limits)) is not None:
                    return cage
                if len(self.cages) >= MOST_PROCESSES and self._waiting:
                    self._waiting.pop(0).end()
                if len(self.cages) < MOST_PROCESSES:
                    cage = _Cage(source, limits)
                    self.cages.add(cage)
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _AllBusyError(f"{MOST_PROCESSES} at work")
                self._freed.wait(min(left, _GLANCE))
        cage.start(deadline)
        return cage

    def give_back(self, cage: _Cage, *, keep: bool) -> None:
        """Keep a process for the next chat, or end it."""
        with self._freed:
            alike = [one for one in self._waiting if one.has(cage.source, cage.limits)]
            if keep and len(alike) < _KEPT:
                self._waiting.append(cage)
            else:
                cage.end()
            self._freed.notify()

    def end(self) -> None:
        """End all of them; after a fork, leave them to the process that they belong to."""
        for cage in list(self.cages):
            cage.end()
        # Another thread, which a forked process does not have, may have held the lock.
        self._freed, self._waiting = threading.Condition(), []

    def _kept(self, source: str, limits: TemplateLimits) -> _Cage | None:
        for cage in reversed(self._waiting[:]):
            if cage.has(source, limits):
                self._waiting.remove(cage)
                if cage.is_ours():
                    return cage
                cage.end()
        return None


class _Cage:
    """One process with one template; `reads` holds the names that the template takes."""

    reads: frozenset[str]

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self.source, self.limits = source, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def start(self, deadline: float) -> None:
        """Start the process and let it compile the template."""
        try:
            self._process = _started()
            if self._exchange(None, deadline) is None:
                raise _no_process(f"{sys.executable} ends at once")
            found = self._exchange(caged.packed([self.source, asdict(self.limits)]), deadline)
            if not isinstance(found, list):
                raise WrongTemplate(not_compiled(_TOO_MUCH) if found is None else _answer(found))
        except BaseException:
            self.end()
            raise
        self.reads = frozenset(map(str, found))

    def has(self, source: str, limits: TemplateLimits) -> bool:
        """Return True if this is its template."""
        return (self.source, self.limits) == (source, limits)

    def ask(self, names: bytes, deadline: float) -> Rendering:
        """Render the template with these names."""
        found = self._exchange(names, deadline)
        return exceeded("The chat template", _TOO_MUCH) if found is None else _answer(found)

    def is_ours(self) -> bool:
        """Return True if it runs and is not that of a process from which this one was forked."""
        return self._owner == os.getpid() and self._process is not None and runs(self._process)

    def end(self) -> None:
        """End the process; after a fork only close the pipes to it."""
        _POOL.cages.discard(self)
        process = self._process
        if process is None:
            return
        if self._owner == os.getpid():
            kill(process)
            process.wait()
        else:
            process.returncode = 0  # another process waits for it
        close_pipes(process)

    def __del__(self) -> None:
        self.end()

    def _exchange(self, question: bytes | None, deadline: float) -> Any:
        """Sends a question, if any, and returns the answer; None if there is none in time."""
        process = cast("subprocess.Popen[bytes]", self._process)
        # A character takes six bytes at most, written as an escape.
        most = 6 * self.limits.text_characters + (1 << 20)
        try:
            data = exchanged(process, question, deadline, most)
            return None if data is None else caged.unpacked(data)
        except SILENT:
            return None
        except BaseException:  # an interrupt: its answer would be taken for that of the next chat
            self.end()
            raise


_POOL = _Pool()
atexit.register(_POOL.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.end)


def _started() -> subprocess.Popen[bytes]:
    found = {str(Path(str(module.__file__)).parent.parent) for module in (jinja2, markupsafe)}
    try:
        # Isolated: neither the folder, nor variables, nor packages of the user are imported from.
        return started([sys.executable, "-I", "-S", str(caged.__file__), *sorted(found)])
    except OSError as error:
        raise _no_process(error) from error


def _no_process(cause: object) -> TokenizerError:
    return TokenizerError(
        "The process that renders this chat template does not start",
        wanted="a Python interpreter at sys.executable",
        got=str(cause)[:300],
        do="Pass the prompt as text",
    )


def _answer(found: object) -> Rendering:
    """Return the answer that a process sent, whatever the template made of that process."""
    if isinstance(found, dict):
        with suppress(TypeError):
            answer = Rendering(**found)
            said = (answer.refused, answer.what, answer.got, answer.do)
            whole = isinstance(answer.text, str) and isinstance(answer.generations, int)
            if whole and all(one is None or isinstance(one, str) for one in said):
                return answer
    return exceeded("The chat template", "its process was broken")
