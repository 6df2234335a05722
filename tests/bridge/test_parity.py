"""Through the bridge a model gives the tokens of its own `generate`, in float64, for any settings.

Eight random calls of each family by default, 200 in all.
"""

from __future__ import annotations

import random

import pytest
import torch

import everystep as es
from tests.bridge.families import FAMILIES, model_of, prompts, settings

PER_BLOCK, BLOCKS = 8, 25


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in range(1, BLOCKS))]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_model_itself(name: str, block: int) -> None:
    model = model_of(name)
    wrapped = es.wrap(model)
    for number in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        draw = random.Random(f"{name} {number}")
        given = prompts(draw, name) | settings(draw, name)
        torch.manual_seed(number)
        expected = model.generate(**given)
        torch.manual_seed(number)
        found = wrapped.generate(**given)
        assert found.tolist() == expected.tolist(), (number, given)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_ragged_batch_is_its_rows(name: str, beams: int) -> None:
    wrapped = es.wrap(model_of(name))
    rows = [[5], [7, 8, 9, 12], [21, 22, 23, 24, 25, 26, 27, 28], [30, 31, 32]]
    texts = es.generate(wrapped, None, rows, max_new_tokens=9, num_beams=beams)
    for row, found in zip(rows, texts, strict=True):
        alone = model_of(name).generate(
            torch.tensor([row]),
            attention_mask=torch.ones(1, len(row), dtype=torch.int64),
            max_new_tokens=9,
            num_beams=beams,
        )
        skipped = 1 if model_of(name).config.is_encoder_decoder else len(row)
        assert found == alone[0, skipped:].tolist()


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"mamba"}))
def test_drafts_change_nothing(name: str) -> None:
    """Rows are cut back where a draft is rejected: windows too, which have dropped columns."""
    wrapped = es.wrap(model_of(name))
    rows = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 9, 8, 8, 9, 9, 8, 8, 9]])
    given = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 24, "seed": 3}
    for sampled in (False, True):
        plain = wrapped.generate(rows, **given, do_sample=sampled)
        drafted = wrapped.generate(rows, **given, do_sample=sampled, prompt_lookup_num_tokens=4)
        assert drafted.tolist() == plain.tolist()


def test_a_state_cannot_be_cut_back() -> None:
    with pytest.raises(es.EverystepError, match="truncate"):
        es.wrap(model_of("mamba")).generate(
            torch.tensor([[5, 6, 7]]), max_new_tokens=4, prompt_lookup_num_tokens=2
        )
