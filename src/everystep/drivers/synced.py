"""Calls whose forwards several processes run together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from everystep.bridge.core import ForeignModel
from everystep.bridge.synced import SyncedForwards, is_in_parts
from everystep.errors import UnsupportedError
from everystep.requests.options import Options
from everystep.requests.subject import Subject


@contextmanager
def synced(model: Subject, options: Iterable[Options], asked: bool | None) -> Iterator[None]:
    """Run a call within whose forwards are made by all processes together, where that is `asked`
    for; None: where weights of a module that it runs lie in parts on several processes.

    A model of this library has gathered its weights before, and waits for none. A call
    inside of such a call is part of it.
    """
    modules = [one.foreign for one in _cores(model, options) if isinstance(one, ForeignModel)]
    if asked is None:
        asked = any(is_in_parts(one.module) for one in modules)
    begun = any(one.synced is not None for one in modules)
    with SyncedForwards(modules).held() if asked and modules and not begun else nullcontext():
        yield


def refuse_parts(model: Subject) -> None:
    """Refuse a call that steps when its caller wants it to, for a module whose forwards all
    processes have to make together."""
    core = model.core
    if isinstance(core, ForeignModel) and is_in_parts(core.foreign.module):
        raise UnsupportedError(
            "streams, runs and engines step when their callers want them to, and the weights of "
            "this module lie in parts on processes that have to step together",
            wanted="a module whose weights are whole",
            do="Call model.generate or es.generate on every process, or gather the weights",
        )


def _cores(model: Subject, options: Iterable[Options]) -> Iterator[object]:
    """Yield what holds the weights of the model and of those beside it, the model's first."""
    yield model.core
    for one in options:
        if one.drafting.assistant is not None:
            yield one.drafting.assistant.core
        if one.choosing.amateur is not None:
            yield one.choosing.amateur.core
