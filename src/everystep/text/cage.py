"""Templates in a cage: each runs in a process of its own, which can be ended at any time.

One operation of Python, such as comparing two large lists, can take hours or all memory, and
nothing in the same process can stop it. The process of a template is kept for the next chat, so
that only the first waits for its start.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, cast

import jinja2
import markupsafe

from everystep.errors import TokenizerError
from everystep.text import caged
from everystep.text.rendering import Rendering, WrongTemplate, exceeded, not_compiled
from everystep.text.sandbox import TemplateLimits

# How it shows that a process has ended, or says what it never would.
_SILENT = (OSError, ValueError, TypeError, LookupError, RecursionError)
_KEPT = 2  # processes of one template that wait for its next chat, at most
_PATIENCE = 10.0  # seconds of the clock for each of processor time, on a busy machine
_TOO_MUCH = "it needs more time or memory than a template gets"


class CagedProgram:
    """A template like `CompiledTemplate`, but compiled and rendered in processes of its own.

    WrongTemplate for a source that cannot be compiled, TokenizerError where no process starts.
    """

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._source, self._limits = source, limits
        first = _Cage(source, limits)
        self.reads = first.reads
        self._waiting = deque([first], maxlen=_KEPT)

    def run(self, names: Mapping[str, Any]) -> Rendering:
        """Return the text as the template prints it, or why there is none."""
        try:
            question = caged.packed(dict(names))
        except (RecursionError, ValueError) as failure:
            what = "A message or variable has no place in a chat template"
            return Rendering(what=what, got=str(failure)[:500])
        cage = self._next()
        answer = cage.ask(question)
        # What failed may hold memory that the next chat needs.
        if answer.what is None:
            self._waiting.append(cage)
        else:
            cage.end()
        return answer

    def _next(self) -> _Cage:
        while True:
            try:
                cage = self._waiting.pop()
            except IndexError:
                return _Cage(self._source, self._limits)
            if cage.is_ours():
                return cage


class _Cage:
    """One process with one template; `reads` holds the names that the template takes."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._limits = limits
        self._process = _started()
        self._owner = os.getpid()
        _RUNNING.add(self)
        if self._exchange(None) is None:
            self.end()
            raise _no_process(f"{sys.executable} ends at once")
        found = self._exchange(caged.packed([source, asdict(limits)]))
        if not isinstance(found, list):
            self.end()
            raise WrongTemplate(not_compiled(_TOO_MUCH) if found is None else _answer(found))
        self.reads = frozenset(map(str, found))

    def ask(self, names: bytes) -> Rendering:
        """Render the template with these names."""
        found = self._exchange(names)
        return exceeded("The chat template", _TOO_MUCH) if found is None else _answer(found)

    def is_ours(self) -> bool:
        """Return True if it runs and is not that of a process from which this one was forked."""
        return self._owner == os.getpid() and self._process.poll() is None

    def end(self) -> None:
        """End the process; after a fork only close the pipes to it."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        else:
            self._process.returncode = 0  # another process waits for it
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                cast(FileIO, pipe).close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.end()

    def _exchange(self, question: bytes | None) -> Any:
        """Sends a question, if any, and returns the answer; None if there is none in time."""
        process = self._process
        seconds = min(_PATIENCE * (1 + self._limits.seconds), caged.DAY)
        clock = threading.Timer(seconds, process.kill)
        clock.daemon = True
        clock.start()
        try:
            if question is not None:
                caged.send(cast(FileIO, process.stdin), question)
            # A character takes six bytes at most, written as an escape.
            most = 6 * self._limits.text_characters + (1 << 20)
            data = caged.receive(cast(FileIO, process.stdout), most)
            return None if data is None else caged.unpacked(data)
        except _SILENT:
            return None
        except BaseException:  # an interrupt: its answer would be taken for that of the next chat
            self.end()
            raise
        finally:
            clock.cancel()


_RUNNING: weakref.WeakSet[_Cage] = weakref.WeakSet()


def _end_all() -> None:
    for cage in list(_RUNNING):
        cage.end()


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)


def _started() -> subprocess.Popen[bytes]:
    found = {str(Path(str(module.__file__)).parent.parent) for module in (jinja2, markupsafe)}
    # Isolated: neither the folder, nor variables, nor packages of the user are imported from.
    line = [sys.executable, "-I", "-S", str(caged.__file__), *sorted(found)]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        # In a session of its own Ctrl-C in the terminal does not reach it. Its pipes have no
        # buffer: that has a lock, and a process that is forked while another thread holds the lock
        # could never close the pipe.
        return subprocess.Popen(
            line, bufsize=0, stdin=pipe, stdout=pipe, stderr=nothing, start_new_session=True
        )
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
