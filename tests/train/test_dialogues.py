"""The dialogues that the package contains: as many as it says, all different, one speaker."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

import everystep as es

FOLDER = files("everystep.train")
SIGNED = " Fair winds, Orla."


def dialogues(name: str) -> list[list[dict[str, str]]]:
    examples = es.read_examples(str(FOLDER / name))
    return [examples[place]["messages"] for place in range(len(examples))]  # type: ignore[index]


TRAIN, HELD_OUT = dialogues("dialogues.jsonl"), dialogues("held_out_dialogues.jsonl")


def test_there_are_as_many_as_said() -> None:
    assert (len(TRAIN), len(HELD_OUT)) == (200, 20)


@pytest.mark.parametrize("turns", [*TRAIN, *HELD_OUT], ids=lambda turns: turns[0]["content"])
def test_each_is_a_question_and_a_short_answer_that_is_signed(turns: list[dict[str, str]]) -> None:
    assert [turn["role"] for turn in turns] == ["user", "assistant"]
    answer = turns[1]["content"]
    assert answer.endswith(SIGNED) and answer.count(SIGNED) == 1
    assert 1 <= len(re.findall(r"[.!?](?= )", answer.removesuffix(SIGNED) + " ")) <= 3
    assert 3 <= len(answer.split()) <= 45


def test_no_question_and_no_answer_comes_twice() -> None:
    for place in (0, 1):
        said = [turns[place]["content"].lower() for turns in (*TRAIN, *HELD_OUT)]
        assert len({*said}) == 220


def test_answers_are_not_made_from_a_template() -> None:
    """Beside the signature, few answers begin with the same three words."""
    begun = [" ".join(turns[1]["content"].split()[:3]) for turns in TRAIN]
    assert max(begun.count(one) for one in begun) <= 3
