"""On an accelerator every strategy of the matrix says what it says on the CPU, in every call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.testing.models import tiny_llama
from tests.matrix.rows import ROWS, Row
from tests.matrix.subjects import PLAIN, SEED, VOCABULARY, Subject, plain


@cache
def _moved(layers: int) -> LanguageModel:
    return tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=layers).to("cuda")


pytestmark = pytest.mark.cuda
THERE = Subject(_moved)


def require_near(found: Sequence[es.Generated], wanted: Sequence[es.Generated]) -> None:
    """The same tokens, with scores as near as cosines of another device let them be."""
    assert [(one.tokens, one.finish_reason.kind) for one in found] == [
        (one.tokens, one.finish_reason.kind) for one in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-4)


def forbid(_: Tensor, scores: Tensor) -> Tensor:
    """A caller's processor: one token is never chosen."""
    return scores.index_fill(1, torch.tensor([45], device=scores.device), -torch.inf)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_said(row: Row) -> None:
    require_near(THERE.say(row), plain(row))
    options = {"seed": [SEED], **THERE.options(row)}
    ids = torch.tensor([PLAIN.ids], device="cuda")
    out = THERE.model.generate(ids, **options)
    assert out.sequences.is_cuda
    assert tuple(out.new_tokens[0]) == plain(row)[0].tokens
    run = es.open(THERE.model, THERE.tokenizer, [*PLAIN.ids], **options)
    assert all(step.logits is None or step.logits.is_cuda for step in run)
    found = run.result()
    require_near(found if isinstance(found, list) else [found], plain(row))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_processors(row: Row) -> None:
    more = {"logits_processor": [forbid], "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    require_near(THERE.say(row, **more), PLAIN.say(row, **more))


def test_prompts_of_every_strategy_in_one_engine() -> None:
    async def main() -> None:
        async with es.AsyncEngine(THERE.model, THERE.tokenizer, max_rows=32) as engine:
            asked = [
                engine.generate([*PLAIN.ids], seed=[SEED], **THERE.options(row)) for row in ROWS
            ]
            for row, found in zip(ROWS, await asyncio.gather(*asked), strict=True):
                require_near(found if isinstance(found, list) else [found], plain(row))

    asyncio.run(main())


def test_scores() -> None:
    ids = torch.tensor([PLAIN.ids])
    here, there = (es.score(one.model, None, [[5, 6, 7]])[0] for one in (PLAIN, THERE))
    assert here.total == pytest.approx(there.total, abs=1e-4)
    near = THERE.model(ids.cuda()).logits.cpu()
    torch.testing.assert_close(near, PLAIN.model(ids).logits, rtol=1e-5, atol=1e-5)
