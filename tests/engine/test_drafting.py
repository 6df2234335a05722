"""Draft models whose rows forget: what cannot be taken back is fed again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from everystep.engine import DraftModel, Engine, Lockstep
from everystep.engine.watching import StepRecord
from everystep.executors.torch_executor import TorchExecutor
from everystep.strategies import Greedy, Sample
from everystep.types import Prompt, Request, Rows
from everystep.types.request import Drafter
from tests.executors.models import family_model
from tests.executors.requests import ids, request
from tests.judges.drive import Drive

FAMILIES = {"mistral": {"sliding_window": 5}, "mamba": {"state_size": 4}}


def asked(drafter: Drafter | None) -> list[Request]:
    """Two requests that draft."""
    return [
        request("greedy", Greedy(), Prompt(ids(1, 17)), drafter=drafter),
        request("sampled", Sample(2), Prompt(ids(2, 6)), drafter=drafter),
    ]


def tokens(executor: TorchExecutor, drafter: Drafter | None) -> tuple[list[list[int]], int]:
    """What the requests end with, and in how many steps."""
    going = Drive(Engine(executor, Lockstep()))
    for one in asked(drafter):
        going.submit(one)
    going.finish()
    found = [done.tokens.tolist() for group in going.groups.values() for done in group.done]
    return sorted(found), going.engine.counts.steps


@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_models_that_forget_change_no_token(family: str, target: str) -> None:
    draft, model = (family_model(name, **FAMILIES[name]) for name in (family, target))
    drafter = DraftModel(partial(TorchExecutor, draft), 4)
    wanted, plain = tokens(TorchExecutor(model), None)
    found, steps = tokens(TorchExecutor(model), drafter)
    assert found == wanted
    # A model that drafts for itself is right every time.
    assert steps <= plain and (family != target or steps < plain)


def nothing_after(length: int, rows: Rows, scores: Tensor) -> Tensor:
    """Nothing may follow so many ids."""
    late = torch.from_numpy(rows.lengths >= length)[:, None]
    return scores.masked_fill(late, -torch.inf)


@pytest.mark.parametrize("last", range(18, 24))
def test_tokens_before_an_error_are_there_whoever_drafts(last: int) -> None:
    """Where nothing may follow a drafted token, those before it stand."""
    draft = model = family_model("mistral", sliding_window=64)
    found = []
    for drafter in (None, DraftModel(partial(TorchExecutor, draft), 4)):
        going = Drive(Engine(TorchExecutor(model), Lockstep()))
        ban = partial(nothing_after, last)
        going.submit(request("a", Greedy(), Prompt(ids(1, 17)), drafter=drafter, processors=(ban,)))
        going.finish()
        (done,) = going.groups["a"].done
        found.append((done.tokens.tolist(), done.reason.kind))
    assert found[0] == found[1] and len(found[0][0]) == last - 17
    assert found[0][1] == "error"


@pytest.mark.parametrize("count", [1, 2])
def test_a_draft_ends_where_its_model_is_not_sure(count: int) -> None:
    """Of one sequence alone, as of several."""
    model = family_model("mistral", **FAMILIES["mistral"])
    longest = []
    for threshold in (0.0, 1.0):
        lengths = list[int]()

        def note(step: StepRecord, lengths: list[int] = lengths) -> None:
            lengths.extend(map(len, step.scored.layout.drafts))

        drafter = DraftModel(partial(TorchExecutor, model), 4, threshold=threshold)
        engine = Engine(TorchExecutor(model), Lockstep(), (note,))
        for name in "ab"[:count]:
            engine.submit(request(name, Greedy(), Prompt(ids(1, 17)), drafter=drafter))
        while engine.pending:
            engine.step()
        longest.append(max(lengths))
    assert longest == [4, 1]  # the guess that it is not sure of is the last
