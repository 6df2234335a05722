"""The one exception tree of the library.

Every text names what is wrong, what was wanted, what was got and what to do; the class builds it
from these. A class inherits the built-in exception that ported code already catches.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any


class EverystepError(Exception):
    """Base of the library's errors.

    `results`: where one prompt of several failed, what became of each of them, in their order.
    """

    results: list[Any] | None = None

    def __init__(
        self, what: object = "", *, wanted: object = None, got: object = None, do: str | None = None
    ) -> None:
        text = _written(what, str)
        finished = wanted is None and got is None and do is None and text[-1:] in (".", "")
        whole = _printable(text) if finished else message(text, wanted=wanted, got=got, do=do)
        super().__init__(whole)


class RequestError(EverystepError, ValueError):
    """A call asks for something impossible or contradictory."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the caller's own lines and the text.

        IPython asks for it. The way that a call takes inside of the library says nothing about what
        is wrong with the call; `traceback.print_exc()` still shows it.
        """
        own = (str(Path(__file__).parent), str(Path("IPython", "core")))
        told = traceback.TracebackException.from_exception(self)
        if self.__cause__ is None:
            theirs = [one for one in told.stack if not any(part in one.filename for part in own)]
            told.stack = traceback.StackSummary.from_list(theirs)
        return "".join(told.format(chain=self.__cause__ is not None)).splitlines()


class UnknownArgumentError(RequestError, TypeError):
    """A call uses an unknown name; the text proposes the nearest one."""


class UnsupportedError(RequestError, NotImplementedError):
    """A known request that this model, cache or executor cannot fulfil."""


class MissingExtraError(UnsupportedError):
    """A library that an extra of this package brings is not installed."""

    @classmethod
    def of(cls, what: str, library: str, extra: str, *, do: str | None = None) -> MissingExtraError:
        """Return the error that `what` needs the library; `do`: another help than to install it."""
        install = f"Install it: pip install 'everystep[{extra}]'"
        return cls(
            f"{what} needs {library}, which is not installed",
            wanted=f"the extra '{extra}'",
            do=f"{install}, or {do}" if do else install,
        )


class AbsentNameError(EverystepError, ImportError):
    """An import of a name of transformers that this library does not have."""


class AbsentAttributeError(EverystepError, AttributeError):
    """An attribute of the package that does not exist, so that `hasattr` is False."""


class ModelClassError(EverystepError, TypeError):
    """The object passed as a model cannot generate."""


class FileError(EverystepError, ValueError):
    """A file is broken, truncated, unsafe or of an unknown kind."""


class MissingFileError(FileError, FileNotFoundError):
    """A file or folder that is needed does not exist."""


class FormatError(FileError):
    """The bytes of a file contradict its format or each other."""


class ChecksumError(FileError):
    """The bytes of a file differ from the published ones."""


class DownloadError(EverystepError, OSError):
    """A file could not be fetched."""


class TokenizerError(EverystepError, ValueError):
    """Text cannot be turned into ids, or ids into text."""


class ForeignModelError(EverystepError, RuntimeError):
    """A wrapped model raised an error of its own, or returned what no step can read."""


class TrainingError(EverystepError, RuntimeError):
    """A run of training that cannot go on; weights and checkpoints are as before the step that
    failed."""


class RankError(EverystepError, RuntimeError):
    """A process that holds a part of a model failed, ended or does not answer; the rows of its
    executors are gone, and calls that go on feed them again."""


class CapacityError(EverystepError, RuntimeError):
    """There are not enough rows, positions or memory at the moment."""


class OversizeError(CapacityError, RequestError):
    """A request that never fits, however long one waits."""


class InvariantError(EverystepError, AssertionError):
    """A defect of the library itself; please report it."""


# Characters of a part of an error's text.
_LONGEST = 400

# Whatever else a request's own code raises ends that request alone.
NOBODYS = (MemoryError, InvariantError)


def message(what: str, *, wanted: object = None, got: object = None, do: str | None = None) -> str:
    """Return the text of an error: what is wrong, what was wanted, what was got, what to do.

    Each of these is cut where it is so long that nobody would read it, and shows escapes in the
    place of characters that cannot be printed.
    """
    text = _cut(what)
    if wanted is not None:
        text += f"; wanted {_cut(wanted)}"
    if got is not None:
        text += f"; got {_cut(got)}"
    text = text.removesuffix(".")  # what was got may be another error
    return f"{text}. {_cut(do)}." if do else f"{text}."


def shown(value: object) -> str:
    """Return the `repr` of what a caller passed, whatever his own code makes of that."""
    return _written(value, repr)


def _written(value: object, write: Callable[[object], str]) -> str:
    try:
        return write(value)
    except Exception:  # nested too deep, of thousands of digits, or an error of the caller's
        digits = "number of thousands of digits"
        return f"a {digits if isinstance(value, int) else type(value).__name__ + ' without a text'}"


def _printable(text: str) -> str:
    """Return the text with escapes for what a terminal or log would obey, or show differently."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _cut(part: object) -> str:
    text = part if type(part) is str else _written(part, str)
    text = text if text.isprintable() else _printable(text)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 100]} [...] {text[-60:]} ({len(text)} characters)"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is spelled most like `name`, or None."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def with_nearest(names: Sequence[str], known: Collection[str], most: int = 5) -> str:
    """Return the first `most` names, each with the known one that is spelled most like it, and how
    many more there are."""
    told = []
    for name in names[:most]:
        near = nearest(name, known)
        told.append(f"{name!r} (the nearest is {near})" if near else repr(name))
    more = len(names) - most
    return ", ".join(told) + (f" and {more} more" if more > 0 else "")
