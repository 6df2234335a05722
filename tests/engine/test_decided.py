"""What a strategy of one's own returns is judged before the engine acts on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from everystep.engine.decided import results_of
from everystep.errors import RequestError
from everystep.types import Finished, FinishReason, Group, Prompt, Request

DONE = Finished(np.array([1]), -1.0, FinishReason("length"), 0, 0, {})


def group_of(found: Any) -> Group:
    strategy = SimpleNamespace(finish=lambda group: found)
    request = Request("r", Prompt(ids=np.array([1])), cast(Any, strategy), cast(Any, None))
    return Group(request, 0, done=[DONE])


@pytest.mark.parametrize("found", [[DONE], (DONE, DONE)])
def test_a_list_of_finished_is_taken_as_it_is(found: Any) -> None:
    assert results_of(group_of(found)) == list(found)


@pytest.mark.parametrize(
    "found", [None, DONE, [DONE, "done"], ["done", DONE], [None], "", iter(())]
)
def test_anything_else_is_refused(found: Any) -> None:
    with pytest.raises(RequestError, match="from finish; wanted a list of Finished"):
        results_of(group_of(found))


def test_what_is_finished_has_a_result() -> None:
    with pytest.raises(RequestError, match="at least one of what is finished"):
        results_of(group_of([]))
