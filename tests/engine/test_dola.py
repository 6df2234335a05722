"""DoLa: the candidate layers, what executors say of them, and that everything else goes with it."""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import everystep as es
from everystep.engine import DoLa, Guidance
from everystep.engine.dola import candidate_layers
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.testing.models import tiny_llama
from everystep.types import Extra, Verb, Work
from everystep.types.protocols import Predictions
from tests.models.tiny import reference_decoder

IDS = torch.tensor([[5, 9, 23, 41]])
FOUR = partial(tiny_llama, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("asked", "layers", "tied", "found"),
    [
        ("low", 8, False, (0, 2)),
        ("low", 8, True, (2,)),
        ("low", 12, True, (2, 4)),
        ("high", 8, True, (4, 6)),
        ("low", 48, False, tuple(range(0, 20, 2))),
        ("high", 48, False, tuple(range(28, 48, 2))),
        ("low", 2, True, (1,)),
        ("low", 4, True, (2,)),
        ("low", 1, True, (0,)),
        ("low", 1, False, (0,)),
        ([3, 1, 9], 4, True, (3, 1)),
    ],
)
def test_candidate_layers(asked: Any, layers: int, tied: bool, found: tuple[int, ...]) -> None:
    assert candidate_layers(asked, layers, tied=tied) == found


def test_the_layer_that_differs_most_is_taken_row_by_row() -> None:
    logits = torch.tensor([[4.0, 3.0, 0.0], [0.0, 3.0, 4.0]])
    alike, apart = logits + 1.0, logits.flip(1)
    early = torch.stack([torch.stack([alike[0], apart[1]]), torch.stack([apart[0], alike[1]])])
    mixed = DoLa((0, 1)).mix(Predictions(logits, [], early))
    wanted = logits.log_softmax(-1) - apart.log_softmax(-1)
    wanted[0, 2] = wanted[1, 0] = -torch.inf  # below a tenth of the best
    assert torch.allclose(mixed, wanted)
    guided = DoLa((0, 1), Guidance(2.0)).mix(Predictions(logits, [logits.flip(0)], early))
    assert torch.allclose(
        guided, Guidance(2.0).mix(Predictions(mixed, [logits.flip(0)])), equal_nan=True
    )


def read(executor: Any, tokens: list[int], counts: list[int], early: list[tuple[int, ...]]) -> Any:
    """The answers of feeds of two rows; each wants logits of its last two positions."""
    verbs = tuple(Verb("allocate", row) for row in range(len(counts)))
    rows, zeros = np.arange(len(counts)), np.zeros(len(counts), np.int64)
    extras = {f: Extra(early=layers) for f, layers in enumerate(early) if layers}
    wanted = np.full(len(counts), 2)
    work = Work(verbs, rows, zeros, np.array(counts), wanted, np.array(tokens), extras)
    return executor.run(work)


def test_executors_read_earlier_layers_out_alike() -> None:
    lm = FOUR(dtype=torch.float32)
    asked = [(0, 3), (), (2,)]
    tokens, counts = [5, 9, 23, 41, 7, 8, 9, 4, 3], [4, 2, 3]
    ours = read(TorchExecutor(lm.core), tokens, counts, asked)
    assert [ours.answers[f].early.shape for f in (0, 2)] == [(2, 2, 48), (1, 2, 48)]
    heard = lm(torch.tensor([[5, 9, 23, 41]]), output_hidden_states=True).hidden_states
    head = lm.state_dict()["lm_head.weight"]
    for place, layer in enumerate((0, 3)):
        expected = heard[layer][0, 2:] @ head.T
        assert torch.allclose(ours.answers[0].early[place], expected, atol=1e-5)
    native = read(NativeExecutor(lm.core), tokens, counts, asked)
    assert 1 not in native.answers
    for f in (0, 2):
        assert torch.allclose(native.answers[f].early, ours.answers[f].early, atol=1e-4)
    again = read(NativeExecutor(lm.core), tokens[:4], counts[:1], asked[:1])
    assert torch.equal(again.answers[0].early, native.answers[0].early), "whatever else is fed"


def test_a_wrapped_model_gives_the_same_tokens() -> None:
    reference = reference_decoder("llama", torch.float64)
    reference.generation_config = transformers.GenerationConfig()
    wrapped, given = es.wrap(reference), {"max_new_tokens": 8, "dola_layers": [0, 1]}
    ids = torch.tensor([[5, 9, 23, 41, 7, 80]])
    assert {"early"} <= wrapped.executor().abilities
    found = wrapped.generate(ids, **given)
    assert found.tolist() != wrapped.generate(ids, max_new_tokens=8).tolist()
    from tests.models.tiny import ours

    own = es.LanguageModel(ours(reference), es.GenerationConfig())
    assert own.generate(ids, **given).tolist() == found.tolist()


FEATURES: dict[str, dict[str, Any]] = {
    "drafts": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 1},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_invisible_stays_so(feature: str, sampled: bool) -> None:
    lm = FOUR()
    given = {"max_new_tokens": 12, "dola_layers": "high", "eos_token_id": None, "seed": 4}
    given |= {"do_sample": True, "top_k": 9} if sampled else {"repetition_penalty": 1.2}
    ids = torch.tensor([[5, 9, 5, 9, 5], [7, 8, 7, 8, 7]])
    plain = lm.generate(ids, **given)
    assert plain.tolist() == lm.generate(ids, **given, **FEATURES[feature]).tolist()
    alone = [es.generate(lm, None, [row.tolist()], **given)[0] for row in ids[:1]]
    assert alone == [plain[0, 5:].tolist()]


def test_the_native_executor_serves_it() -> None:
    lm = FOUR(dtype=torch.float32)
    assert lm.executor(frozenset({"early"})).__class__ is NativeExecutor
    given = {"max_new_tokens": 8, "dola_layers": [1, 2], "eos_token_id": None}
    assert lm.generate(IDS, **given).tolist() == FOUR().generate(IDS, **given).tolist()


def test_layers_beyond_the_model_are_told() -> None:
    with pytest.warns(UserWarning, match=r"no layers \[9\]"):
        found = FOUR().generate(IDS, max_new_tokens=5, dola_layers=[1, 9])
    assert found.tolist() == FOUR().generate(IDS, max_new_tokens=5, dola_layers=[1]).tolist()


def test_layers_of_a_decoder_beside_an_encoder_are_counted_in_the_decoder() -> None:
    from tests.models.tiny import ours, reference_pair

    reference = reference_pair("bart", torch.float64, encoder_layers=1, decoder_layers=4)
    lm = es.LanguageModel(ours(reference), es.GenerationConfig())
    given = {"max_new_tokens": 3, "decoder_start_token_id": 3}
    high = lm.generate(IDS, **given, dola_layers="high")
    assert high.tolist() == lm.generate(IDS, **given, dola_layers=[2]).tolist()


def banned_but(kept: list[int]) -> dict[str, Any]:
    """Keywords that leave these tokens alone."""
    others = [one for one in range(48) if one not in kept]
    return {"suppress_tokens": others, "eos_token_id": None, "max_new_tokens": 8}


def by_the_book(lm: es.LanguageModel, layer: int, kept: list[int]) -> tuple[list[int], int]:
    """Eight tokens by whole forwards, and how often the likely ones were all banned."""
    ids, head, again = IDS[0].tolist(), lm.state_dict()["lm_head.weight"], 0
    for _ in range(8):
        out = lm(torch.tensor([ids]), output_hidden_states=True)
        last = out.logits[0, -1].log_softmax(-1)
        early = (out.hidden_states[layer][0, -1] @ head.T).log_softmax(-1)
        likely = [one for one in kept if last[one] >= last.max() + math.log(0.1)]
        if not likely:
            best, again = max(last[kept]), again + 1
            likely = [one for one in kept if last[one] >= best + math.log(0.1)]
        ids.append(max(likely, key=lambda one: float(last[one] - early[one])))
    return ids[IDS.shape[1] :], again


@pytest.mark.parametrize("executor", ["auto", "torch"])
def test_where_all_that_is_likely_is_banned_the_likely_of_the_rest_are_contrasted(
    executor: Any,
) -> None:
    lm = FOUR(dtype=torch.float32)
    lm = es.LanguageModel(lm.core, lm.generation_config, executor=executor)
    repeated = 0
    for seed in range(12):
        kept = random.Random(seed).sample(range(3, 48), 4)
        wanted, again = by_the_book(lm, 2, kept)
        given = {**banned_but(kept), "dola_layers": [2]}
        assert lm.generate(IDS, **given)[0, IDS.shape[1] :].tolist() == wanted
        repeated += again
    assert repeated > 20


def test_a_row_that_is_read_again_leaves_its_neighbours_and_is_explained() -> None:
    lm, asked = FOUR(), {"dola_layers": [2]}

    def only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        left = torch.full_like(scores, -torch.inf)
        left[:, 9] = scores[:, 9]
        return left

    calls = []

    def seen(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(len(ids))
        return scores

    options = [
        {**asked, "logits_processor": [only], "eos_token_id": None, "max_new_tokens": 5},
        {**asked, "logits_processor": [seen], "eos_token_id": None, "max_new_tokens": 5},
    ]
    prompts = [IDS[0].tolist(), [7, 8, 7]]
    both = es.generate(lm, None, prompts, options=options)
    assert both[0] == [9] * 5 and len(calls) == 5, "the neighbour's code ran once for each token"
    assert both[1] == es.generate(lm, None, prompts[1:], **options[1])[0]
    run = es.open(lm, None, prompts[0], **banned_but([9]), **asked)
    step = next(run)
    why = run.explain(0)
    assert why.effects[0].name == "dola" and why.chosen.token == 9
    assert step.changes[0].after[0, 9].isfinite() and step.changes[1].after[0].isfinite().sum() == 1


def test_a_record_has_the_stages_of_the_last_reading(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    es.generate(FOUR(), None, [IDS[0].tolist()], **banned_but([9]), dola_layers=[2], record=path)
    for step in es.read_record(path).runs["0"].steps:
        (row,) = step.rows
        assert [stage.name for stage in row.stages] == ["dola", "SuppressTokensLogitsProcessor"]
        assert row.stages[0].removed < 48 and row.scores[0] is not None
