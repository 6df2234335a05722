"""Prompts and requests: where positions and visible ids stand, and what an executor must be able
to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from everystep.draws import SeededDraws
from everystep.strategies import Greedy
from everystep.types import Past, Prompt, Request, Rows, Sequence, TokenTable, Wants

IDS = np.array([5, 6, 7])
EMBEDS = torch.zeros(3, 4)


def past(length: int) -> Past:
    return Past(length, ((torch.zeros(1, length, 4),) * 2,))


def request(prompt: Prompt, **rest: Any) -> Request:
    return Request("r", prompt, Greedy(), SeededDraws(0), **rest)


@pytest.mark.parametrize(
    ("prompt", "length", "hidden", "start"),
    [
        (Prompt(IDS), 3, 0, 0),
        (Prompt(embeds=EMBEDS), 3, 3, 0),
        (Prompt(IDS, EMBEDS), 3, 0, 0),
        (Prompt(IDS, past=past(5), before=5), 8, 5, 5),
        (Prompt(IDS, past=past(2)), 3, 0, 2),
        (Prompt(past=past(4), before=4), 4, 4, 4),
    ],
)
@pytest.mark.parametrize("pad_prefix", [0, 2])
def test_positions_and_visible_ids_differ_by_the_shift(
    prompt: Prompt, length: int, hidden: int, start: int, pad_prefix: int
) -> None:
    asked = request(prompt, pad_prefix=pad_prefix)
    assert (prompt.length, prompt.hidden, prompt.start) == (length, hidden, start)
    assert asked.shift == pad_prefix - hidden
    assert asked.prompt_visible == pad_prefix + length - hidden
    sequence = Sequence(asked, 0, length + 4)
    assert sequence.generated == 4
    assert sequence.visible == asked.prompt_visible + 4


@pytest.mark.parametrize(
    ("asked", "needs"),
    [
        (request(Prompt(IDS)), set()),
        (request(Prompt(embeds=EMBEDS, positions=torch.arange(3))), {"embeds", "positions"}),
        (request(Prompt(IDS, encoder=EMBEDS)), {"encoder"}),
        (request(Prompt(IDS, past=past(2))), {"past"}),
        (request(Prompt(IDS), wants=Wants(layers=True, cache=True)), {"layers", "past"}),
        (request(Prompt(IDS), wants=Wants(attentions=True)), {"attentions"}),
        (request(Prompt(IDS), adapters=(("a", 1.0),)), {"adapters", "adapters: 'a'"}),
    ],
)
def test_what_a_request_brings_and_wants_is_what_it_needs(asked: Request, needs: set[str]) -> None:
    assert asked.needs == needs


def test_rows_are_prefixes_of_their_sequences() -> None:
    table, asked = TokenTable(), request(Prompt(IDS))
    lines = [table.open(np.arange(10 * i, 10 * i + 5)) for i in range(3)]
    sequences = [Sequence(asked, line, 5) for line in lines]
    rows = Rows(table, sequences, np.array([2, 5, 3]))
    assert (len(rows), rows.width) == (3, 5)
    found = rows.ids()
    assert found.dtype == torch.int64
    for i, length in enumerate((2, 5, 3)):
        assert found[i, :length].tolist() == list(range(10 * i, 10 * i + length))
    chosen = rows.select(np.array([2, 0]))
    assert chosen.sequences == [sequences[2], sequences[0]]
    assert chosen.lengths.tolist() == [3, 2]
    assert chosen.ids()[0].tolist() == [20, 21, 22]
    assert Rows(table, [], np.array([], dtype=np.int64)).width == 0
