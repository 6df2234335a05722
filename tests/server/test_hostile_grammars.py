"""Drawn grammars that mean harm: each is an error or works, and no neighbour notices."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.hostile_grammars import KINDS, drawn
from tests.server.serving import Served, chunks_of, joined
from tests.server.test_strangers import HELLO, idle

LONG: Any = {"prompt": "hello the", "max_tokens": 60, "ignore_eos": True, "temperature": 1}


def test_a_number_is_the_same_grammar_each_time() -> None:
    found = [json.dumps(drawn(number)) for number in range(500)]
    assert found == [json.dumps(drawn(number)) for number in range(500)]
    assert len({*found}) > 450 and max(map(len, found)) < 4 << 20
    assert {*drawn(0)} | {*drawn(5)} | {*drawn(12)} | {*drawn(17)} == {
        "regex",
        "schema",
        "grammar",
        "choices",
    }


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([*range(3 * len(KINDS), 4 * len(KINDS))], id="one of each kind"),
        pytest.param([*range(500)], id="500", marks=pytest.mark.slow),
    ],
)
def test_a_drawn_grammar_is_an_error_or_works_and_changes_no_neighbour(
    server: Served, numbers: list[int]
) -> None:
    neighbours = [{**LONG, "seed": number} for number in range(4)]
    wanted = [server.completion(**one)["choices"][0]["text"] for one in neighbours]
    statuses: Counter[int] = Counter()
    with ThreadPoolExecutor(4) as pool:
        for start in range(0, len(numbers), 6):
            streams = [
                pool.submit(server.post, "/v1/completions", **one, stream=True)
                for one in neighbours
            ]
            for number in numbers[start : start + 6]:
                answer = server.post("/v1/completions", **HELLO, **drawn(number))
                statuses[answer.status_code] += 1
                assert answer.status_code in (200, 400), (number, answer.text)
                assert len(answer.content) < 8192, number
            assert [joined(chunks_of(one.result().text)) for one in streams] == wanted, start
    assert statuses.total() == len(numbers) and min(statuses[200], statuses[400]) > 2
    assert idle(server) and server.client.get("/ready").status_code == 200
