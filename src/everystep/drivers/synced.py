"""Calls whose forwards several processes run together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from everystep.errors import UnsupportedError
from everystep.executors.synced import SyncedForwards
from everystep.requests.options import Options
from everystep.requests.subject import Subject


@contextmanager
def synced(model: Subject, options: Iterable[Options], asked: bool | None) -> Iterator[None]:
    """Run a call within whose forwards are made by all processes together, where that is `asked`
    for; None: where weights that it reads lie in parts on several processes.

    A model of this library whose weights are whole waits for nobody. A call inside of such a call
    is part of it.
    """
    subjects: list[Any] = [model]
    for one in options:
        if one.drafting.assistant is not None:
            subjects.append(one.drafting.assistant.model)
        if one.choosing.amateur is not None:
            subjects.append(one.choosing.amateur)
    models = [found for one in subjects if (found := one.sharded()) is not None]
    if asked is None:
        asked = any(one.in_parts for one in models)
    begun = any(one.synced is not None for one in models)
    with SyncedForwards(models).held() if asked and models and not begun else nullcontext():
        yield


def refuse_parts(model: Subject) -> None:
    """Refuse a call that steps when its caller wants it to, for a model whose forwards all
    processes have to make together."""
    sharded = model.sharded()
    if sharded is not None and sharded.in_parts:
        raise UnsupportedError(
            "streams, runs and engines step when their callers want them to, and the weights of "
            "this model lie in parts on several processes that have to step together",
            wanted="a model whose weights are whole",
            do="Call model.generate or es.generate on every process, or gather the weights",
        )
