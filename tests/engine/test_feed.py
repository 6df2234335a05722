"""Only the feeds of a request that wants something are asked for it, and only once; embeddings that
are injected are fed in one piece per run of neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from everystep.engine import Engine, Lockstep
from everystep.engine.given import Span
from everystep.strategies import Contrastive, Greedy
from everystep.testing.hash_model import HashExecutor
from everystep.types import COLUMNS, Extra, Prompt, StepOutput, Wants, Work
from everystep.types.ends import Injected
from tests.executors.requests import ids, request
from tests.judges import textbook
from tests.judges.drive import result


@dataclass
class Watched(HashExecutor):
    """The fake model, with every work that it was given."""

    works: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(40)

    def run(self, work: Work) -> StepOutput:
        self.works.append(work)
        return super().run(work)


CONTRASTIVE = request("contrastive", Contrastive(3, 0.6), Prompt(ids(8, 5)))


@pytest.mark.parametrize("want", ["layers", "attentions"])
def test_a_want_is_asked_of_the_feeds_that_choose(want: str) -> None:
    executor = Watched()
    engine = Engine(executor, Lockstep(4))
    asking = request("asking", Greedy(), Prompt(ids(1, 10)))
    engine.submit(request("plain", Greedy(), Prompt(ids(2, 3))))
    engine.submit(replace(asking, wants=Wants(**{want: True})))
    for _ in range(4):
        engine.step()
    # Two chunks of four, then what is left of the prompt; the plain request waits for it.
    asked = [dict(work.extras) for work in executor.works]
    rows = [work.rows.tolist() for work in executor.works]
    assert [len(one) for one in asked[-2:]] == [1, 1]
    for work, extras in zip(rows, asked, strict=True):
        assert all(getattr(extra, want) and work[f] == rows[-1][-1] for f, extra in extras.items())
    chunks = [f for work in executor.works for f in work.extras if work.logits[f] == 0]
    assert chunks == []


def test_plain_requests_bring_and_want_nothing() -> None:
    executor = Watched()
    engine = Engine(executor, Lockstep())
    engine.submit(request("plain", Greedy(), Prompt(ids(2, 3))))
    while engine.pending:
        engine.step()
    assert all(work.extras == {} for work in executor.works)


@pytest.mark.parametrize("forget", [False, True])
def test_hidden_states_survive_a_preemption_or_are_asked_for_again(forget: bool) -> None:
    executor = Watched()
    engine = Engine(executor, Lockstep(4))
    group = engine.submit(CONTRASTIVE)
    for _ in range(5):
        engine.step()
    assert group.opened
    engine.preempt(group)
    if forget:
        for sequence in group.live:
            sequence.memo.pop(COLUMNS)
    done = len(executor.works)
    while engine.pending:
        engine.step()
    (shared,) = [work for work in executor.works[done:] if work.counts.max(initial=0) > 1]
    assert any(extra.hidden for extra in shared.extras.values()) is forget
    wanted = textbook.generate(CONTRASTIVE, executor.function)
    assert [h.tokens for h in result(group)] == [h.tokens for h in wanted]


def test_a_sequence_remembers_the_states_of_its_own_positions() -> None:
    executor = Watched()
    engine = Engine(executor, Lockstep())
    group = engine.submit(CONTRASTIVE)
    for _ in range(4):
        engine.step()
    for sequence in group.live:
        tokens = engine.table.data[sequence.line, : sequence.visible - 1]
        fresh = HashExecutor(40)
        work = executor.works[0]
        whole = replace(
            work,
            counts=np.array([len(tokens)]),
            logits=np.array([0]),
            tokens=tokens,
            extras={0: Extra(hidden=True)},
        )
        states = fresh.run(whole).answers[0].hidden
        assert torch.equal(torch.cat(sequence.memo[COLUMNS].pieces), states)


def test_neighbours_that_are_injected_are_one_piece() -> None:
    values = torch.arange(5.0)[:, None].expand(5, 8)
    prompt = Prompt(np.arange(12), injected=Injected(np.array([2, 3, 4, 7, 8]), values))
    found = Span(prompt, 3, 6).inputs({})
    assert [(one.name, one.start, len(one.values)) for one in found] == [
        ("embeds", 0, 2),
        ("embeds", 4, 2),
    ]
    assert [one.values[:, 0].tolist() for one in found] == [[1.0, 2.0], [3.0, 4.0]]
