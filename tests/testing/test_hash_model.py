"""The fake is strict: every misuse is an error, and everything in a row changes its logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from everystep.errors import InvariantError
from everystep.testing.hash_model import HashExecutor
from everystep.types import Extra, Verb, Work
from tests.executors.works import answer, asking, embedded

VOCABULARY = 16


def work(
    *verbs: Verb, feeds: tuple[tuple[int, int, list[int]], ...] = (), logits: int = 1, **more: Any
) -> Work:
    """Verbs, then feeds of (row, start, ids), each wanting the same number of logits."""
    return Work(
        verbs=verbs,
        rows=np.array([row for row, _, _ in feeds], dtype=np.int64),
        starts=np.array([start for _, start, _ in feeds], dtype=np.int64),
        counts=np.array([len(ids) for _, _, ids in feeds], dtype=np.int64),
        logits=np.full(len(feeds), logits, dtype=np.int64),
        tokens=np.array([token for _, _, ids in feeds for token in ids], dtype=np.int64),
        **more,
    )


OPEN = Verb("allocate", 0)


def bringing(**extra: Any) -> Work:
    """One position of a new row, with something beyond its id."""
    return work(OPEN, feeds=((0, 0, [1]),), extras={0: Extra(**extra)})


@pytest.fixture
def executor() -> HashExecutor:
    """Row 0 holds three positions, row 1 is a fork of it."""
    executor = HashExecutor(VOCABULARY)
    executor.run(work(OPEN, feeds=((0, 0, [1, 2, 3]),)))
    executor.run(work(Verb("fork", 1, 0)))
    return executor


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(work(feeds=((0, 2, [4]),)), id="a feed before the end of the row"),
        pytest.param(work(feeds=((0, 4, [4]),)), id="a feed beyond the end of the row"),
        pytest.param(work(feeds=((7, 0, [4]),)), id="a feed of an unknown row"),
        pytest.param(work(Verb("free", 1), feeds=((1, 3, [4]),)), id="a feed of a freed row"),
        pytest.param(work(feeds=((0, 3, []),)), id="an empty feed"),
        pytest.param(work(feeds=((0, 3, [4]), (0, 4, [5]))), id="two feeds of one row"),
        pytest.param(work(feeds=((0, 3, [4]),), logits=2), id="logits of unfed positions"),
        pytest.param(work(feeds=((0, 3, [VOCABULARY]),)), id="an id beyond the vocabulary"),
        pytest.param(work(feeds=((0, 3, [-1]),)), id="an embedding that is not given"),
        pytest.param(
            work(feeds=((0, 3, [4]),), extras={0: embedded(0, torch.zeros(1, 4))}),
            id="an id where an embedding is given",
        ),
        pytest.param(
            work(feeds=((0, 3, [-1]),), extras={0: embedded(0, torch.zeros(1, 5))}),
            id="an embedding of another width",
        ),
        pytest.param(
            work(feeds=((0, 3, [4]),), extras={0: Extra(positions=torch.arange(2))}),
            id="too many position ids",
        ),
        pytest.param(work(OPEN), id="allocating a live row"),
        pytest.param(work(Verb("fork", 1, 0)), id="forking onto a live row"),
        pytest.param(work(Verb("fork", 2, 7)), id="forking an unknown row"),
        pytest.param(work(Verb("truncate", 0, 4)), id="truncating beyond the end"),
        pytest.param(work(Verb("truncate", 7, 0)), id="truncating an unknown row"),
        pytest.param(work(Verb("free", 1), Verb("free", 1)), id="freeing twice"),
        pytest.param(
            replace(work(feeds=((0, 3, [4]),)), counts=np.array([2])), id="counts without inputs"
        ),
    ],
)
def test_misuse_is_an_error(executor: HashExecutor, misuse: Work) -> None:
    with pytest.raises(InvariantError):
        executor.run(misuse)


def test_rows_are_limited() -> None:
    executor = HashExecutor(VOCABULARY, max_rows=1)
    executor.run(work(OPEN))
    with pytest.raises(InvariantError, match="beyond the 1"):
        executor.run(work(Verb("allocate", 1)))


@pytest.mark.parametrize(
    ("ability", "asking"),
    [
        ("truncate", work(OPEN, Verb("truncate", 0, 0))),
        ("encoder", work(OPEN, encoders={0: torch.zeros(1, 4)})),
        ("positions", bringing(positions=torch.arange(1))),
        ("mask", bringing(mask=torch.ones(1, 1, 1).bool())),
        ("hidden", bringing(hidden=True)),
        ("layers", bringing(layers=True)),
        ("attentions", bringing(attentions=True)),
        ("embeds", work(OPEN, feeds=((0, 0, [-1]),), extras={0: embedded(0, torch.zeros(1, 4))})),
    ],
)
def test_an_ability_that_is_missing_cannot_be_used(ability: str, asking: Work) -> None:
    HashExecutor(VOCABULARY).run(asking)
    without = HashExecutor(VOCABULARY).abilities - {ability}
    with pytest.raises(InvariantError):
        HashExecutor(VOCABULARY, abilities=without).run(asking)


def last_logits(ids: list[int], extra: Extra | None = None, **more: Any) -> torch.Tensor:
    """(V,) logits after a prompt that is fed at once."""
    extras = {} if extra is None else {0: extra}
    asked = work(OPEN, feeds=((0, 0, ids),), extras=extras, **more)
    return HashExecutor(VOCABULARY).run(asked).logits[-1]


@pytest.mark.parametrize(
    "other",
    [
        last_logits([5, 2, 3]),
        last_logits([2, 1, 3]),
        last_logits([1, 1, 2, 3]),
        last_logits([1, 2, 3], Extra(positions=torch.tensor([0, 1, 3]))),
        last_logits([1, 2, 3], Extra(positions=torch.tensor([[0, 1, 2], [0, 1, 1], [0, 1, 2]]))),
        last_logits(
            [1, 2, 3], Extra(mask=torch.tensor([[[1, 0, 0], [0, 1, 0], [1, 1, 1]]]).bool())
        ),
        last_logits([1, 2, 3], encoders={0: torch.ones(2, 4)}),
        last_logits([-1, 2, 3], embedded(0, torch.ones(1, 4))),
    ],
    ids=["id", "order", "length", "position", "axis of a position", "mask", "encoder", "embedding"],
)
def test_everything_in_the_row_changes_the_logits(other: torch.Tensor) -> None:
    assert not torch.equal(last_logits([1, 2, 3]), other)


def test_chunks_change_nothing() -> None:
    executor = HashExecutor(VOCABULARY)
    executor.run(work(OPEN, feeds=((0, 0, [1]),), logits=0))
    assert torch.equal(
        executor.run(work(feeds=((0, 1, [2, 3]),))).logits[-1], last_logits([1, 2, 3])
    )


def test_a_truncated_row_forgets(executor: HashExecutor) -> None:
    output = executor.run(work(Verb("truncate", 1, 1), feeds=((1, 1, [5]),)))
    assert torch.equal(output.logits[0], last_logits([1, 5]))


def test_a_fork_shares_nothing(executor: HashExecutor) -> None:
    output = executor.run(work(feeds=((0, 3, [4]), (1, 3, [5]))))
    assert torch.equal(output.logits[1], last_logits([1, 2, 3, 5]))
    assert executor.audit() == {0: 4, 1: 4}


def test_hidden_states_are_those_of_the_fed_positions() -> None:
    hidden, whole = Extra(hidden=True), HashExecutor(VOCABULARY)
    executor = HashExecutor(VOCABULARY)
    executor.run(work(OPEN, feeds=((0, 0, [1, 2]),)))
    found = executor.run(work(Verb("fork", 1, 0), feeds=((1, 2, [3]),), extras={0: hidden}))
    wanted = whole.run(work(OPEN, feeds=((0, 0, [1, 2, 3]),), extras={0: hidden}))
    assert torch.equal(answer(found).hidden, answer(wanted).hidden[2:])


def test_layers_and_attentions_have_their_shapes(executor: HashExecutor) -> None:
    work_of_two = work(feeds=((0, 3, [4, 5]), (1, 3, [6])))
    output = executor.run(asking(work_of_two, layers=True, attentions=True))
    first, second = answer(output, 0), answer(output, 1)
    assert [layer.shape for layer in (*first.layers, *second.layers)] == [(2, 4)] * 3 + [(1, 4)] * 3
    assert [one.attentions[0].shape for one in (first, second)] == [(2, 2, 5), (2, 1, 4)]


def test_logits_are_distinct_and_exact() -> None:
    logits = last_logits([1, 2, 3])
    assert len(set(logits.tolist())) == VOCABULARY
    assert torch.equal(logits * 2**18, (logits * 2**18).round())


def test_what_was_asked_is_counted(executor: HashExecutor) -> None:
    executor.run(work(Verb("truncate", 1, 2), Verb("free", 0), feeds=((1, 2, [4]),), logits=0))
    counts = executor.counts
    assert (counts["forwards"], counts["tokens"]) == (2, 4)
    assert (counts["allocate"], counts["fork"], counts["truncate"], counts["free"]) == (1, 1, 1, 1)
