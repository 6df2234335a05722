"""Errors out of the code of a wrapped module: whose they are, and what to do about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from everystep.errors import EverystepError, ForeignModelError, RequestError
from everystep.executors.process import is_shortage

FAILURES = (
    ValueError,
    TypeError,
    RuntimeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    StopIteration,
)
"""The kinds of errors by which the code of a model fails."""


@contextmanager
def attributed(
    module: nn.Module, fed: Callable[[], str], whole: Mapping[str, Tensor]
) -> Iterator[None]:
    """Raise a ForeignModelError in the place of an error that a module raises within, or a
    RequestError where it was given something by name as a `whole`, which may not fit.

    `fed`: says what it was fed. Other errors than those of its code stay what they are.
    """
    try:
        yield
    except FAILURES as error:
        if not is_its_own(error):
            raise
        if whole:
            raise _refused(whole, error) from error
        raise ForeignModelError(
            f"{named(module)} raised {type(error).__name__}: {error}",
            got=fed(),
            do="The model's own code fails here: call its forward with such inputs to see why",
        ) from error


def is_its_own(error: Exception) -> bool:
    """Return whether the code of a module failed: the error is not ours, is not about memory, and
    has no class of its own that whoever calls may wait for."""
    known = type(error).__module__.partition(".")[0] in ("builtins", "torch")
    return known and not isinstance(error, EverystepError) and not is_shortage(error)


def _refused(whole: Mapping[str, Tensor], error: Exception) -> RequestError:
    """Return the error of a module that was given something for a prompt that does not fit it."""
    shown = ", ".join(f"{name} {tuple(one.shape)}" for name, one in sorted(whole.items()))
    return RequestError(
        f"what was given by name does not fit the prompt: {error or type(error).__name__}",
        got=shown,
        do="Pass ids and inputs as one call of the processor returned them",
    )


def named(module: nn.Module) -> str:
    """Return how errors speak of a module."""
    return f"the wrapped model {type(module).__name__}"
