"""The program of a process that renders one chat template; `cage.py` starts it.

It reads the template from its input, gives away what it could do harm with, and then answers each
chat with the text of the prompt, until its input ends. Every message is a JSON value with its
length before it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from io import RawIOBase
from pathlib import Path
from types import ModuleType
from typing import Any

DAY = 86400.0  # seconds: clocks of the system take no infinity
_LENGTH, _PIECE = 8, 1 << 16  # bytes
# A key that is not a text has no place in JSON: such a dict is written as a list of pairs. Nor has
# a tuple, which templates print in round brackets.
_PAIRS, _TUPLE = "\ufdd2pairs", "\ufdd2tuple"
_TEXT, _LONG = "\ufdd2text", 1 << 14  # which of the long texts, and of how many characters
_MEMORY = 256 << 20  # bytes
# Uses what opens files when it is first used: escapes, the time zone, entities, and a failure.
_FIRST = (
    r"""{{ "\n\u00e4" ~ strftime_now("%c") ~ ("&amp;" | striptags | urlencode | tojson) + 1 }}"""
)


def packed(value: Any) -> bytes:
    """Write a value of plain types as bytes; RecursionError or ValueError where JSON has no place.

    Long texts stand behind the JSON, whose reader and writer would hold the interpreter's lock for
    as long as they take.
    """
    texts: list[str] = []
    whole = json.dumps(_stored(value, texts), ensure_ascii=False, separators=(",", ":"))
    pieces = [one.encode("utf-8", "surrogatepass") for one in (whole, *texts)]
    return b"".join(part for piece in pieces for part in (_sized(piece), piece))


def unpacked(data: bytes) -> Any:
    """Read what `packed` wrote; LookupError, TypeError or ValueError for anything else."""
    pieces, place = list[str](), 0
    while place < len(data):
        start = place + _LENGTH
        place = start + int.from_bytes(data[place:start], "big")
        pieces.append(data[start:place].decode("utf-8", "surrogatepass"))
    whole, *texts = pieces

    def restored(stored: dict[str, Any]) -> Any:
        if _TEXT in stored:
            return texts[stored[_TEXT]]
        if _TUPLE in stored:
            return tuple(stored[_TUPLE])
        return dict(stored[_PAIRS]) if _PAIRS in stored else stored

    return json.loads(whole, object_hook=restored)


def send(stream: RawIOBase, data: bytes) -> None:
    """Writes one message."""
    waiting = memoryview(_sized(data) + data)
    while waiting:
        waiting = waiting[stream.write(waiting) or 0 :]


def receive(stream: RawIOBase, most: int | None = None) -> bytes | None:
    """Reads one message; None where the stream ends before, or it is longer than `most`."""
    length = int.from_bytes(_read(stream, _LENGTH), "big")
    if length == 0 or (most is not None and length > most):
        return None
    data = _read(stream, length)
    return data if len(data) == length else None


def _read(stream: RawIOBase, count: int) -> bytes:
    """Read so many bytes of the stream, or all that there are before its end."""
    found = bytearray()
    while piece := stream.read(min(count - len(found), _PIECE)):
        found += piece
    return bytes(found)


def _sized(data: bytes) -> bytes:
    """Return the bytes that say how many others follow."""
    return len(data).to_bytes(_LENGTH, "big")


def _stored(value: Any, texts: list[str]) -> Any:
    """Return the value as JSON can hold it; its long texts are in `texts`."""
    if isinstance(value, str) and len(value) > _LONG:
        texts.append(value)
        return {_TEXT: len(texts) - 1}
    if isinstance(value, list):
        return [_stored(item, texts) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_stored(item, texts) for item in value]}
    if not isinstance(value, dict):
        return value
    plain = all(isinstance(key, str) and len(key) <= _LONG for key in value)
    if plain and not {_PAIRS, _TUPLE, _TEXT} & value.keys():
        return {key: _stored(item, texts) for key, item in value.items()}
    pairs = value.items()
    return {_PAIRS: [[_stored(key, texts), _stored(item, texts)] for key, item in pairs]}


def _import_rendering(folders: list[str]) -> Any:
    """Import the module that renders, without the rest of this package, which would import
    torch."""
    sys.path += folders
    here = Path(__file__).parent
    for name, folder in (("everystep", here.parent), ("everystep.text", here)):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    from everystep.text import rendering, sandbox

    # Python and Jinja import some of themselves only when they first need it.
    rendering.CompiledTemplate(_FIRST, sandbox.TemplateLimits()).run({})
    return rendering


def _give_powers_away() -> None:
    """No more memory, files, processes or core dumps than rendering needs."""
    os.environ.clear()
    bound_resources(
        {
            "RLIMIT_AS": _MEMORY,
            "RLIMIT_NOFILE": 3,
            "RLIMIT_NPROC": 0,
            "RLIMIT_FSIZE": 0,
            "RLIMIT_CORE": 0,
        }
    )


def bound_resources(limits: Mapping[str, int]) -> None:
    """Let this process take at most so much of each resource, by its name in `resource`."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    for name, most in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (ValueError, OSError):  # some systems have a limit in name only
            continue


def end_after(seconds: float) -> None:
    """Let the system end this process after so much processor time; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, min(seconds, DAY))


def main(questions: RawIOBase, answers: RawIOBase) -> None:
    """Answers until the questions end."""
    rendering = _import_rendering(sys.argv[1:])
    send(answers, packed("ready"))
    source, values = unpacked(receive(questions) or b'["", {}]')
    limits = rendering.TemplateLimits(**values)
    # What counts its own steps reports the line that was too much; the rest is ended from outside.
    seconds = 1.25 * limits.seconds + 0.1
    _give_powers_away()
    end_after(seconds)
    try:
        program = rendering.CompiledTemplate(source, limits)
    except rendering.WrongTemplate as wrong:
        send(answers, packed(asdict(wrong.answer)))
        return
    end_after(0)
    send(answers, packed(sorted(program.reads)))
    while (question := receive(questions)) is not None:
        end_after(seconds)
        try:
            answer = program.run(unpacked(question))
        except MemoryError as failure:
            answer = rendering.failed(failure)
        end_after(0)
        send(answers, packed(asdict(answer)))


if __name__ == "__main__":
    with open(0, "rb", buffering=0) as incoming, open(1, "wb", buffering=0) as outgoing:
        main(incoming, outgoing)
