"""Watermarks where transformers is wrong; one test, or more, per heading of parity.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from tests.parity.defects import without
from tests.parity.draws import Draw
from tests.parity.models import pair
from tests.parity.options import Mode, Shape
from tests.parity.sides import ours, plain_reference


def _draw(mode: Mode, prompt: tuple[int, ...] = (7, 8, 9, 10), **settings: Any) -> Draw:
    """A draw of the plain model."""
    shape = Shape(mode, 40, 1, len(prompt), (), settings.get("num_beams", 1))
    settings = {"max_new_tokens": 6, **settings}
    return Draw(0, "llama-plain", shape, (prompt,), "left", 0, True, False, settings)


def test_self_hashed_green_lists_take_a_vocabulary_of_fewer_than_forty_tokens() -> None:
    draw = _draw("greedy", watermarking_config={"seeding_scheme": "selfhash", "bias": 5.0})
    draw = replace(draw, model="llama-grouped-tied")
    assert isinstance(plain_reference(draw).error, IndexError)
    assert ours(draw).result.shape == (1, 10)


def test_self_hashed_green_lists_may_leave_out_every_candidate() -> None:
    mark = {"seeding_scheme": "selfhash", "greenlist_ratio": 0.01}
    draw = _draw("greedy", watermarking_config=mark)
    assert isinstance(plain_reference(draw).error, IndexError)
    assert ours(draw).result.shape == (1, 10)


MARK = {"ngram_len": 3, "keys": [5, 6, 7, 8, 9, 10]}


def test_synthid_follows_its_beams() -> None:
    """The best beam's score is what its own tokens, marked by themselves, add up to."""
    scored = {"return_dict_in_generate": True, "output_scores": True, "length_penalty": 0.0}
    draw = _draw("beam", num_beams=4, max_new_tokens=10, watermarking_config=MARK, **scored)
    mine, theirs = ours(draw).result, plain_reference(draw).result
    assert float(mine.sequences_scores[0]) == pytest.approx(_marked(mine.sequences[0]), abs=1e-4)
    apart = float(theirs.sequences_scores[0]) - _marked(theirs.sequences[0])
    assert abs(apart) > 0.1


def _marked(ids: torch.Tensor) -> float:
    """The marked log-probability of what follows a prompt of four ids."""
    model, total = pair("llama-plain").reference, 0.0
    mark = transformers.SynthIDTextWatermarkingConfig(**MARK).construct_processor(40, "cpu")
    with torch.no_grad():
        scores = model(ids[None]).logits[0].float().log_softmax(-1)
    for place in range(4, len(ids)):
        marked = mark(ids[None, :place], scores[None, place - 1])
        total += float(marked[0, ids[place]])
    return total


def test_synthid_knows_what_a_draft_replaced() -> None:
    draw = _draw("lookup", (19, 14, 19, 14, 19), max_new_tokens=12, watermarking_config=MARK)
    drafted = without(draw, prompt_lookup_num_tokens=3)
    assert torch.equal(ours(drafted).result, plain_reference(draw).result)
    assert not torch.equal(plain_reference(drafted).result, ours(drafted).result)
