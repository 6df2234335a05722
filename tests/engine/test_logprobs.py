"""How likely tokens were: beside torch's log_softmax, for choices and for prompts."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.engine.logprobs import (
    choice_logprobs,
    likelihoods,
    note_choices,
    prompt_rows,
    with_prompt,
)
from everystep.types import Children, Group, Prompt, Request, Sequence, Wants

VOCABULARY = 9


def logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)) * 3


def group_of(prompt: Prompt, **wants: Any) -> Group:
    return Group(Request("r", prompt, cast(Any, None), cast(Any, None), wants=Wants(**wants)), 0)


@pytest.mark.parametrize("best", [0, 1, 3, 20])
def test_likelihoods_are_those_of_torch(best: int) -> None:
    given, tokens = logits(5), np.array([3, 0, -1, VOCABULARY, 8])
    logs = given.log_softmax(dim=-1)
    for r, one in enumerate(likelihoods(given, tokens, best)):
        values, ids = logs[r].topk(min(best, VOCABULARY))
        assert one.token == tokens[r]
        assert one.top_tokens.tolist() == ids.tolist()
        assert one.top_logprobs.tolist() == pytest.approx(values.tolist(), abs=1e-5)
    known = [one.logprob for one in likelihoods(given, tokens, best)]
    assert known[:2] == pytest.approx([float(logs[0, 3]), float(logs[1, 0])], abs=1e-5)
    assert np.isnan(known[2]) and known[3] == -np.inf


def test_each_child_remembers_as_many_as_its_own_request_wants() -> None:
    asked = [2, None, 0, 4]
    sequences = []
    for number, best in enumerate(asked):
        group = group_of(Prompt(ids=np.array([1])), logprobs=best)
        sequences.append(Sequence(group.request, number, 1))
    tokens = np.array([[3, 4], [5, 0], [6, 0], [7, 0]])
    counts, parents = np.array([2, 1, 1, 1]), np.array([0, 1, 2, 3])
    children = Children(parents, tokens, counts, np.zeros(4), [None] * 4)
    given = logits(5)
    after, noted = note_choices(sequences, [0, 2, 3, 4], children, given)
    assert noted and after.memo is not None
    logs = given.log_softmax(dim=-1)
    for child, best in enumerate(asked):
        memo, length = after.memo[child], int(counts[child])
        if best is None:
            assert not memo
            continue
        found, first = choice_logprobs(cast(Any, memo), length), [0, 2, 3, 4][child]
        assert found.tokens.tolist() == tokens[child, :length].tolist()
        rows = logs[first : first + length]
        wanted = rows.gather(1, found.tokens[:, None])[:, 0]
        assert torch.allclose(found.logprobs, wanted, atol=1e-5)
        assert torch.equal(found.top_tokens, rows.topk(best).indices)
    silent = [sequences[1], sequences[1]]
    pair = Children(np.array([0, 1]), tokens[:2, :1], np.ones(2, int), np.zeros(2), [None] * 2)
    assert note_choices(silent, [0, 1], pair, given) == (pair, False)


def test_of_a_prompt_without_ids_the_best_alone_are_known() -> None:
    given = logits(3)
    group = group_of(Prompt(embeds=torch.zeros(4, 2)), prompt_logprobs=2)
    assert prompt_rows(group, 0, 4) == range(3)
    found = with_prompt(group, range(3), given)
    assert all(np.isnan(one.logprob) and one.token == -1 for one in found)
    assert [one.top_tokens.tolist() for one in found] == given.topk(2).indices.tolist()


def test_a_prompt_is_known_piece_by_piece() -> None:
    group, given = group_of(Prompt(ids=np.array([4, 5, 6, 7])), prompt_logprobs=1), logits(4)
    for start, count, wanted in ((0, 2, range(2)), (1, 2, range(2, 3)), (2, 2, range(3, 3))):
        rows = prompt_rows(group, start, count)
        assert [*rows] == [*wanted]
        group.prompt_known = with_prompt(group, rows, given[rows.start : rows.stop])
    logs = given.log_softmax(dim=-1)
    assert [one.token for one in group.prompt_known] == [5, 6, 7]
    wanted_logs = [float(logs[i, 5 + i]) for i in range(3)]
    assert [one.logprob for one in group.prompt_known] == pytest.approx(wanted_logs, abs=1e-5)
    assert len(prompt_rows(group_of(Prompt(ids=np.array([4, 5]))), 0, 2)) == 0
