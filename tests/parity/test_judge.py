"""The judge lets nothing pass that should not, and nothing fail that should pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from everystep.errors import RequestError
from everystep.strategies.base import undrawable
from tests.parity.draws import Draw, draw
from tests.parity.judge import NO_CHOICE, UNFILLED, judge
from tests.parity.options import Shape
from tests.parity.parts import PROCESSORS
from tests.parity.shrink import shrink
from tests.parity.sides import Outcome, ours, plain_reference, reference

EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "max_new_tokens": 4,
    "eos_token_id": [3, 4],
    "pad_token_id": 5,
}
GREEDY = Draw(
    number=0,
    model="llama-plain",
    shape=Shape("greedy", 40, 2, 4, (3, 4), 1),
    prompts=((7, 8, 9, 10), (11, 12)),
    padding="left",
    fill=5,
    masked=True,
    as_config=False,
    settings=EVERYTHING,
)
BEAMS = replace(
    GREEDY,
    shape=Shape("beam", 40, 2, 4, (3, 4), 3),
    settings={**EVERYTHING, "num_beams": 3, "num_return_sequences": 2},
)


@pytest.mark.parametrize("draw", [GREEDY, BEAMS])
def test_the_reference_equals_itself(draw: Draw) -> None:
    verdict = judge(draw, reference, reference)
    assert verdict.ran
    assert verdict.problems == ()


def _changed(name: str, change: Callable[[Any], Any]) -> Callable[[Draw], Outcome]:
    """transformers with one field of its result changed."""

    def side(draw: Draw) -> Outcome:
        result = reference(draw).result
        result[name] = change(result[name])
        return Outcome(result)

    return side


def _added(at: tuple[int, ...], value: float) -> Callable[[Any], Any]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[at] += value
        return tensor

    return change


def _in_step(step: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda steps: (*steps[:step], change(steps[step]), *steps[step + 1 :])


WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "another token": ("sequences", _added((1, 5), 1)),
    "a shorter result": ("sequences", lambda tensor: tensor[:, :-1]),
    "a wider type": ("sequences", lambda tensor: tensor.int()),
    "a score": ("scores", _in_step(1, _added((0, 3), 1e-6))),
    "a nan": ("scores", _in_step(1, _added((0, 3), torch.nan))),
    "a missing step": ("logits", lambda steps: steps[:-1]),
    "another type of scores": ("logits", _in_step(0, lambda tensor: tensor.double())),
    "no scores": ("scores", lambda steps: None),
    "a hidden state": ("hidden_states", _in_step(0, _in_step(1, _added((1, 2, 0), 1e-6)))),
    "a missing layer": ("hidden_states", _in_step(2, lambda layers: layers[:-1])),
    "an attention": ("attentions", _in_step(1, _in_step(0, _added((1, 0, 0, 3), 1e-6)))),
    "a beam index": ("beam_indices", _added((0, 1), 1)),
    "a beam's score": ("sequences_scores", _added((3,), 1e-6)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str) -> None:
    assert judge(BEAMS, reference, _changed(*WRONG[what])).problems


@pytest.mark.parametrize(
    ("name", "at"),
    [("hidden_states", (3, 1, 0)), ("attentions", (3, 0, 1, 0)), ("attentions", (3, 0, 3, 1))],
)
def test_what_stands_at_padding_is_not_asked(name: str, at: tuple[int, ...]) -> None:
    changed = _changed(name, _in_step(0, _in_step(0, _added(at, 1.0))))
    assert judge(BEAMS, reference, changed).problems == ()


def _refusing(draw: Draw) -> Outcome:
    return Outcome(error=ValueError("no"))


def test_a_refusal_of_one_side_is_a_difference() -> None:
    assert [str(one) for one in judge(GREEDY, reference, _refusing).problems] == [
        "only this library refused: ValueError('no')"
    ]
    assert len(judge(GREEDY, _refusing, reference).problems) == 1


def test_refusals_of_both_sides_are_none() -> None:
    verdict = judge(GREEDY, _refusing, _refusing)
    assert (verdict.ran, verdict.problems) == (False, ())


def _without_choice(draw: Draw) -> Outcome:
    error = undrawable().matched
    assert isinstance(error, RequestError)
    return Outcome(error=error)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_refusal_is_explained_only_where_the_reference_shows_no_choice(leaves: bool) -> None:
    suppressed = list(range(40)) if leaves else [7]
    draw = replace(GREEDY, settings={"max_new_tokens": 2, "suppress_tokens": suppressed})
    verdict = judge(draw, reference, _without_choice)
    assert not verdict.ran
    assert (NO_CHOICE in verdict.explained, bool(verdict.problems)) == (leaves, not leaves)
    assert judge(draw, reference, _refusing).problems


def test_right_padded_prompts_reach_only_this_library() -> None:
    right = replace(GREEDY, padding="right")
    assert judge(right).problems == ()
    assert torch.equal(plain_reference(right).result.sequences[1, :2], torch.tensor([5, 5]))


def test_shrinking_leaves_what_matters() -> None:
    processors = tuple(sorted(PROCESSORS))
    start = replace(GREEDY, processors=processors, settings={**EVERYTHING, "top_k": 3})
    small = shrink(start, lambda draw: "DependsOnRow" in draw.processors)
    assert small.processors == ("DependsOnRow",)
    assert "top_k" not in small.settings


def test_both_sides_start_from_the_same_seed() -> None:
    sampled = replace(GREEDY, settings={"do_sample": True, "max_new_tokens": 12})
    assert torch.equal(ours(sampled).result, ours(sampled).result)


def test_a_beam_that_never_ended_is_known_by_its_sum() -> None:
    # A length penalty of 2 makes -2.5e6 of the -1e9 that it began with.
    verdict = judge(draw(9410))
    assert verdict.ran
    assert verdict.problems == ()
    assert verdict.explained == (UNFILLED,)
