"""What contrastive search returns beside tokens: one row per sequence, one step per token."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from everystep.api.load import from_weights
from everystep.api.model import LanguageModel
from tests.outputs.test_transition_scores import tiny_llama

TOP_K, ALPHA, NEW, PENALTY = 4, 0.6, 6, 1.3
IDS = torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14], [3, 30, 21, 9]])
KEPT = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


class Step(NamedTuple):
    """What a token was drawn from: logits and scores (V,), and the last positions' layers."""

    logits: Tensor
    scores: Tensor
    layers: tuple[Tensor, ...]
    attentions: tuple[Tensor, ...]


@pytest.fixture(scope="module")
def reference() -> Any:
    model = tiny_llama()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)
    return model


@pytest.fixture(scope="module")
def model(reference: Any) -> LanguageModel:
    return from_weights(reference.config.to_dict(), reference.state_dict(), dtype=torch.float64)


def searched(reference: Any, ids: Tensor, new: int) -> tuple[list[int], list[Step]]:
    """The search by the book, for one row, with everything computed anew for every candidate."""
    steps: list[Step] = []
    start = len(ids)
    with torch.no_grad():
        for _ in range(new):
            out = reference(ids[None], output_hidden_states=True, output_attentions=True)
            logits = out.logits[0, -1].float()
            scores = penalised(logits, ids)
            last = 0 if not steps else -1
            layers = tuple(one[0, last:] for one in out.hidden_states)
            steps.append(
                Step(logits, scores, layers, tuple(a[0, :, last:] for a in out.attentions))
            )
            likely, candidates = scores.softmax(-1).topk(TOP_K)
            ratings = [
                (1 - ALPHA) * float(chance) - ALPHA * similarity(reference, ids, candidate)
                for chance, candidate in zip(likely, candidates, strict=True)
            ]
            best = max(range(TOP_K), key=ratings.__getitem__)
            ids = torch.cat([ids, candidates[best : best + 1]])
    return ids[start:].tolist(), steps


def penalised(logits: Tensor, ids: Tensor) -> Tensor:
    scores = logits.clone()
    seen = ids.unique()
    scores[seen] = torch.where(logits[seen] < 0, logits[seen] * PENALTY, logits[seen] / PENALTY)
    return scores


def similarity(reference: Any, ids: Tensor, candidate: Tensor) -> float:
    out = reference(torch.cat([ids, candidate[None]])[None], output_hidden_states=True)
    hidden = torch.nn.functional.normalize(out.hidden_states[-1][0], dim=-1)
    return float((hidden[:-1] @ hidden[-1]).max())


def generated(model: LanguageModel, **options: Any) -> Any:
    settings = {
        "penalty_alpha": ALPHA, "top_k": TOP_K, "max_new_tokens": NEW, "eos_token_id": None,
        "repetition_penalty": PENALTY, "return_dict_in_generate": True, **dict.fromkeys(KEPT, True),
    }  # fmt: skip
    mask = torch.ones_like(IDS)
    return model.generate(IDS, attention_mask=mask, **{**settings, **options})


@pytest.mark.parametrize("use_cache", [True, False])
def test_every_step_is_what_its_candidates_were_drawn_from(
    model: LanguageModel, reference: Any, use_cache: bool
) -> None:
    out = generated(model, use_cache=use_cache)
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == NEW
    for row, ids in enumerate(IDS):
        tokens, steps = searched(reference, ids, NEW)
        assert out.new_tokens[row] == tokens
        for at, step in enumerate(steps):
            torch.testing.assert_close(out.scores[at][row], step.scores)
            torch.testing.assert_close(out.logits[at][row], step.logits)
            if use_cache:
                close(out.hidden_states[at], row, step.layers)
                close(out.attentions[at], row, step.attentions)


def close(layers: tuple[Tensor, ...], row: int, expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(layers, expected, strict=True):
        assert len(ours) == len(IDS)
        torch.testing.assert_close(ours[row], theirs, atol=1e-6, rtol=1e-6)


def test_transition_scores_are_those_of_the_tokens(model: LanguageModel) -> None:
    out = generated(model)
    found = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    for row, tokens in enumerate(out.new_tokens):
        for at, token in enumerate(tokens):
            assert found[row, at] == out.scores[at][row].log_softmax(-1)[token]


def test_a_row_that_has_ended_shows_nothing(model: LanguageModel) -> None:
    free = generated(model)
    end = free.new_tokens[0][2]
    assert end not in free.new_tokens[1]
    out = generated(model, eos_token_id=end, pad_token_id=0)
    assert out.new_tokens[0] == free.new_tokens[0][:3] and len(out.new_tokens[1]) == NEW
    assert len(out.scores) == len(out.hidden_states) == NEW
    for name in ("scores", "logits"):
        steps, others = getattr(out, name), getattr(free, name)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(steps[:3], others, strict=False))
        assert all(torch.isneginf(step[0]).all() for step in steps[3:])
    assert all(not layer[0].any() for step in out.hidden_states[3:] for layer in step)
    for normalized in (False, True):
        scores = model.compute_transition_scores(
            out.sequences, out.scores, normalize_logits=normalized
        )
        assert not scores[0, 3:].any() and scores[1].all()


def test_criteria_are_given_ids_and_no_scores(model: LanguageModel) -> None:
    """Which row the scores of a candidate belong to is known a step later."""
    seen: list[Any] = []

    def watch(ids: Tensor, scores: Any, **_: Any) -> bool:
        seen.append(scores)
        return False

    generated(model, stopping_criteria=[watch])
    assert seen and not any(seen)
