"""Errors out of the code of a wrapped module: whose they are, and what to do about them."""

from __future__ import annotations

from collections.abc import Mapping

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


def failure(
    module: nn.Module, error: Exception, fed: str, whole: Mapping[str, Tensor]
) -> EverystepError | None:
    """Return the error to raise for one that a module raised when it was fed this.

    That is a RequestError where it was given something by name as a `whole`, which may not fit.
    None where the error is ours, is about memory, or has a class of its own that whoever calls may
    wait for.
    """
    known = type(error).__module__.partition(".")[0] in ("builtins", "torch")
    if isinstance(error, EverystepError) or is_shortage(error) or not known:
        return None
    if whole:
        return refused(whole, error)
    return ForeignModelError(
        f"{named(module)} raised {type(error).__name__}: {error}",
        got=fed,
        do="The model's own code fails here: call its forward with such inputs to see why",
    )


def refused(whole: Mapping[str, Tensor], error: Exception) -> RequestError:
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
