"""The bank of a search, and diverse beams by every way of calling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.strategies.banks import SearchBank
from everystep.strategies.diverse import DiverseBeam
from everystep.testing.models import tiny_llama
from everystep.types import Finished, FinishReason
from everystep.types.stored import from_bytes, to_bytes
from tests.strategies.making import batch_of

IDS = torch.tensor([[5, 9, 23], [7, 8, 41]])
CALLS: dict[str, dict[str, Any]] = {
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained": {"num_beams": 4, "force_words_ids": [[31, 7], [[12], [13, 14]]]},
    "dola": {"dola_layers": [0, 1], "repetition_penalty": 1.2},
    "contrastive": {"penalty_alpha": 1.3, "top_k": 4},
}
NEW = {"max_new_tokens": 9, "eos_token_id": [2, 11, 30]}


def test_of_equals_the_first_gives_way() -> None:
    bank = SearchBank()
    for serial, score in enumerate((-2.0, -1.0, -2.0)):
        bank = bank.with_one(score, serial, 3)
    assert bank.with_one(-2.0, 3, 3) is bank, "only what is better than the worst comes in"
    fuller = bank.with_one(-1.5, 4, 3)
    assert (fuller.scores, fuller.serials) == ((-1.0, -2.0, -1.5), (1, 2, 4))
    assert from_bytes(to_bytes((fuller,))) == (fuller,)


def test_a_bank_closes_when_nothing_better_is_to_be_expected() -> None:
    bank = SearchBank((-1.0,), (0,))
    assert bank.after(-3.0, 2) is bank, "there is a place left"
    assert bank.after(-0.5, 1) is bank
    assert bank.after(-1.0, 1).closed and bank.after(-torch.inf, 1).closed


def test_of_equals_what_was_cut_short_comes_last() -> None:
    strategy = DiverseBeam(width=2, groups=2)
    group = batch_of(strategy, [[0.0, 0.0]]).groups[0]
    group.state = (SearchBank((-1.0,), (4,)), SearchBank((-1.0, -3.0), (6, 9)))
    cut, dropped = finished(-1.0, -1), finished(-0.5, 5)
    held = [finished(score, serial) for score, serial in ((-1.0, 4), (-1.0, 6), (-3.0, 9))]
    group.done = [cut, *held, dropped]
    assert strategy.best(group) == [held[1], held[0], cut, held[2]]


def finished(score: float, serial: int) -> Finished:
    return Finished(np.array([5]), score, FinishReason("stop", 2), 0, 0, {}, serial)


@pytest.mark.parametrize("name", ["diverse", "constrained"])
def test_the_length_ends_a_search_whatever_else_ends(name: str) -> None:
    model = tiny_llama()
    ends = {"eos_token_id": list(range(0, 48, 2)), "max_new_tokens": 3, "length_penalty": 5.0}
    out = model.generate(IDS, return_dict_in_generate=True, **{**CALLS[name], **ends})
    assert max(map(len, out.new_tokens)) == 3


def test_groups_choose_away_from_each_other() -> None:
    model = tiny_llama()
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 1, "eos_token_id": None}
    plain = model.generate(IDS[:1], **options)[:, 3].tolist()
    groups = {"num_beam_groups": 4, "diversity_penalty": 100.0}
    found = model.generate(IDS[:1], **options, **groups)[:, 3].tolist()
    assert sorted(found) == sorted(plain), "each takes the best that is left"
    low = {"num_beam_groups": 4, "diversity_penalty": 1e-6}
    assert len({*model.generate(IDS[:1], **options, **low)[:, 3].tolist()}) == 1


@pytest.mark.parametrize("name", CALLS)
def test_every_way_of_calling_gives_the_same(name: str, tmp_path: Path) -> None:
    model, options = tiny_llama(), {**NEW, **CALLS[name]}
    out = model.generate(IDS, return_dict_in_generate=True, **options)
    prompts = [row.tolist() for row in IDS]
    assert [*map(list, es.generate(model, None, prompts, **options))] == out.new_tokens
    with es.stream(model, None, prompts, **options) as stream:
        events = list(stream)
    said: list[list[int]] = [[], []]
    for event in events:
        if event.token >= 0:
            said[int(event.request_id)].append(event.token)
    assert said == out.new_tokens
    run = es.open(model, None, prompts[0], **options)
    for _ in range(3):
        next(run)
    run.save(tmp_path / "run")
    for one in (run, es.resume(tmp_path / "run", model)):
        assert list(one.result().tokens) == out.new_tokens[0]


@pytest.mark.parametrize("name", ["diverse", "constrained"])
def test_scores_are_those_of_the_tokens(name: str) -> None:
    model = tiny_llama()
    shown = {"return_dict_in_generate": True, "output_scores": True, "length_penalty": 1.0}
    out = model.generate(IDS, num_return_sequences=3, **shown, **NEW, **CALLS[name])
    assert out.sequences_scores.shape == (6,)
    steps = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    lengths = torch.tensor([len(tokens) for tokens in out.new_tokens])
    assert torch.allclose(steps.sum(1) / lengths, out.sequences_scores, atol=1e-5)
