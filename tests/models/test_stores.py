"""Models whose rows forget: Mistral's window and Mamba's states give transformers' logits and
tokens through the engine, under padding, chunks, beams, drafts and preemption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import everystep as es
from everystep.api.model import LanguageModel
from everystep.draws import SeededDraws
from everystep.engine import Continuous, Engine
from everystep.errors import EverystepError, UnsupportedError
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import Beam
from everystep.types import Prompt, Request, Verb, Work
from tests.executors.works import one_feed
from tests.judges.drive import Drive
from tests.models.tiny import farthest, ids, ours, reference_decoder, reference_logits
from tests.models.tiny import reference_mamba as make_mamba

WINDOW = 6
NEW = 14
QUIET = {"pad_token_id": 0, "eos_token_id": 96, "max_new_tokens": NEW}
MAMBAS: dict[str, dict[str, Any]] = {
    "mamba": {},
    "mamba, biases and a head": {
        "use_bias": True,
        "tie_word_embeddings": False,
        "time_step_rank": 3,
    },
    "mamba, plain convolution": {
        "use_conv_bias": False,
        "residual_in_fp32": False,
        "conv_kernel": 3,
        "expand": 3,
    },
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@dataclass(frozen=True)
class Pair:
    """A tiny model of transformers in float64, and ours with its weights."""

    reference: PreTrainedModel
    model: LanguageModel


@cache
def pair(family: str) -> Pair:
    torch.manual_seed(3)
    if family == "mamba":
        reference = make_mamba(torch.float64)
    else:
        reference = reference_decoder("mistral", torch.float64, sliding_window=WINDOW)
    config = es.GenerationConfig.from_model_config(reference.config)
    return Pair(reference, LanguageModel(ours(reference), config))


each_family = pytest.mark.parametrize("family", ["mistral", "mamba"])


# --- the plain forward ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MAMBAS)
def test_mamba_is_the_references(name: str, dtype: torch.dtype) -> None:
    reference, read = make_mamba(dtype, **MAMBAS[name]), ids(3, 30)
    found = ours(reference).forward(read)
    assert farthest(found, reference_logits(reference, read)) < TOLERANCE[dtype]


@each_family
def test_padding_on_both_sides_is_not_seen(family: str) -> None:
    read, model = ids(3, 20), pair(family)
    mask = torch.ones_like(read)
    mask[0, :6] = 0
    mask[1, -5:] = 0
    expected = reference_logits(model.reference, read, mask)
    found = model.model(read, attention_mask=mask).logits
    assert farthest(found[mask > 0], expected[mask > 0]) < 1e-10


@pytest.mark.parametrize("rows", [0, 1])
def test_rows_of_padding_alone_are_the_references_in_mamba(rows: int) -> None:
    read, model = ids(2, 6), pair("mamba")
    mask = torch.zeros_like(read)
    mask[:rows] = 1
    expected = reference_logits(model.reference, read, mask)
    assert farthest(model.model(read, attention_mask=mask).logits, expected) < 1e-5


# --- generate -------------------------------------------------------------------------------------

PROMPTS = torch.tensor(
    [[5, 9, 23, 41, 7, 80, 3, 3, 61, 12, 9, 44], [0, 0, 0, 0, 0, 15, 12, 33, 60, 2, 71, 15]]
)
MASK = (PROMPTS != 0).long()
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "4 beams": {"num_beams": 4, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "top_k": 10},
}


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("way", WAYS)
@each_family
def test_tokens_are_the_references(family: str, way: str, chunk: int | None) -> None:
    both = pair(family)
    given = {**QUIET, **WAYS[way], "attention_mask": MASK}
    torch.manual_seed(7)
    expected = both.reference.generate(PROMPTS, **given)
    torch.manual_seed(7)
    found = both.model.generate(PROMPTS, **given, prefill_chunk_size=chunk)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("chunk", [1, 5, 9, 40])
@each_family
def test_logits_are_those_of_a_forward_over_everything(family: str, chunk: int) -> None:
    both, lengths = pair(family), (40, 23)
    executor, read = TorchExecutor(both.model.core), ids(2, 40)
    rows: list[list[Tensor]] = [[], []]
    for start in range(0, 40, chunk):
        fed = [row for row in range(2) if start < lengths[row]]
        counts = np.array([min(chunk, lengths[row] - start) for row in fed])
        tokens = np.concatenate(
            [read[row, start : start + chunk][:n] for row, n in zip(fed, counts, strict=True)]
        )
        verbs = () if start else (OPEN, Verb("allocate", 1))
        work = Work(verbs, np.array(fed), np.full(len(fed), start), counts, counts, tokens)
        for row, logits in zip(fed, executor.run(work).logits.split(counts.tolist()), strict=True):
            rows[row].append(logits)
    expected = reference_logits(both.reference, read)
    for row, length in enumerate(lengths):
        assert farthest(torch.cat(rows[row]), expected[row, :length]) < 1e-10


@each_family
def test_drafts_are_verified_and_taken_back(family: str) -> None:
    both, read = pair(family), torch.tensor([[5, 9, 23, 5, 9, 23, 5, 9, 23, 5, 9]])
    given = {**QUIET, "max_new_tokens": 40, "eos_token_id": None}
    expected = both.reference.generate(read, **given)
    found = both.model.generate(read, **given, prompt_lookup_num_tokens=4)
    assert torch.equal(found, expected)


@each_family
def test_preempted_requests_go_on_as_before(family: str) -> None:
    both = pair(family)
    prompts = [PROMPTS[0].tolist(), [7, 7, 30, 11], [12, 33, 60, 2, 71, 15] * 3]
    expected = [
        both.reference.generate(torch.tensor([one]), **QUIET, num_beams=4)[0, len(one) :].tolist()
        for one in prompts
    ]
    engine = Engine(TorchExecutor(both.model.core), Continuous(token_budget=9))
    run = Drive(engine)
    for request in requests(prompts):
        run.submit(request)
    rng = np.random.default_rng(2)
    while engine.pending:
        run.step()
        if engine.scheduler.groups and rng.random() < 0.25 and engine.counts.preemptions < 12:
            engine.preempt(engine.scheduler.groups[rng.integers(len(engine.scheduler.groups))])
    assert engine.counts.preemptions_in_decode > 3
    for number, wanted in enumerate(expected):
        tokens = list(run.results[str(number)][0].tokens)
        assert tokens == wanted[: len(tokens)]


def requests(prompts: list[list[int]]) -> Iterator[Request]:
    for number, prompt in enumerate(prompts):
        stops = (EosToken((96,)), MaxLength(len(prompt) + NEW))
        yield Request(
            str(number),
            Prompt(ids=np.array(prompt)),
            Beam(width=4),
            SeededDraws(0),
            stops=stops,
            max_length=len(prompt) + NEW,
        )


# --- what rows hold -------------------------------------------------------------------------------


OPEN = Verb("allocate", 0)


def step(executor: TorchExecutor, count: int, start: int, *verbs: Verb, wanted: int = 1) -> Tensor:
    """Feeds `count` tokens to row 0; the logits of the last `wanted`."""
    arrays = [np.array([n]) for n in (0, start, count, wanted)]
    tokens = (np.arange(start, start + count) * 7) % 97
    return executor.run(Work(verbs, *arrays, tokens)).logits


@pytest.mark.parametrize("prompt", [1, 500])
def test_a_window_bounds_what_a_row_keeps(prompt: int) -> None:
    executor = TorchExecutor(pair("mistral").model.core)
    step(executor, prompt, 0, OPEN)
    for start in range(prompt, prompt + 120):
        step(executor, 1, start)
    (part,), (bank,) = executor.cache[0].parts, executor.cache.banks
    assert part.length == prompt + 120
    assert WINDOW <= part.length - part.first <= 2 * WINDOW + 16
    assert bank.tails.capacity <= 128
    past = executor.export(0)
    assert {x.shape[1] for layer in past.layers for x in layer} == {WINDOW}


@each_family
def test_what_was_wanted_can_be_taken_back(family: str) -> None:
    model = pair(family).model.core
    read = torch.from_numpy((np.arange(40) * 7) % 97)[None]
    expected = model.forward(read)[0]
    for length in range(30, 36):
        executor = TorchExecutor(model)
        step(executor, 20, 0, OPEN)
        step(executor, 15, 20, wanted=5)
        found = step(executor, 2, length, Verb("truncate", 0, length), wanted=2)
        assert farthest(found, expected[length : length + 2]) < 1e-10


@each_family
def test_what_is_gone_is_not_taken_back_but_fed_again(family: str) -> None:
    model = pair(family).model.core
    executor = TorchExecutor(model)
    step(executor, 20, 0, OPEN)
    step(executor, 3, 20)
    with pytest.raises(EverystepError, match=r"cannot be cut"):
        step(executor, 1, 21, Verb("truncate", 0, 21))
    read = torch.from_numpy((np.arange(22) * 7) % 97)[None]
    found = step(executor, 22, 0, OPEN)
    assert farthest(found, model.forward(read)[0, -1:]) < 1e-10


def test_an_idle_row_keeps_its_own_state_only() -> None:
    executor = TorchExecutor(pair("mamba").model.core)
    verbs = tuple(Verb("allocate", row) for row in range(8))
    rows, ones = np.arange(8), np.ones(8, dtype=np.int64)
    executor.run(Work(verbs, rows, 0 * ones, ones, ones, rows + 3))
    assert len(executor.cache[5].marks[-1].record[0][0]) == 8
    step(executor, 1, 1)
    assert [len(executor.cache[row].marks[-1].record[0][0]) for row in range(8)] == [1] * 8


def test_a_state_is_exported_and_restored() -> None:
    model = pair("mamba").model.core
    executor, other = TorchExecutor(model), TorchExecutor(model)
    step(executor, 9, 0, OPEN)
    past = executor.export(0)
    arrays = [np.array([n]) for n in (4, 9, 2, 2)]
    work = Work((Verb("allocate", 4),), *arrays, np.array([8, 1]), pasts={4: past})
    read = torch.tensor([[*((np.arange(9) * 7) % 97).tolist(), 8, 1]])
    assert farthest(other.run(work).logits, model.forward(read)[0, -2:]) < 1e-10


# --- loading --------------------------------------------------------------------------------------


@each_family
def test_a_folder_is_loaded(family: str, tmp_path: Path) -> None:
    both = pair(family)
    weights = {name: x.contiguous().clone() for name, x in both.reference.state_dict().items()}
    if family == "mamba":
        del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(both.reference.config.to_dict(), default=str))
    model = es.load_model(tmp_path, dtype=torch.float64)
    given = {**QUIET, "attention_mask": MASK}
    assert torch.equal(model.generate(PROMPTS, **given), both.model.generate(PROMPTS, **given))
    assert {*model.state_dict()} == {*weights}


@pytest.mark.native
@each_family
def test_it_runs_natively(family: str) -> None:
    if family == "mamba":
        reference = make_mamba(torch.float32, **MAMBAS["mamba, biases and a head"])
    else:
        reference = reference_decoder("mistral", torch.float32, sliding_window=WINDOW)
    model = LanguageModel(ours(reference), es.GenerationConfig())
    assert model.runs_on.startswith("native")
    for way in (WAYS["greedy"], WAYS["4 beams"]):
        asked = {**QUIET, **way, "attention_mask": MASK}
        assert torch.equal(model.generate(PROMPTS, **asked), reference.generate(PROMPTS, **asked))


@pytest.mark.native
@pytest.mark.parametrize("name", MAMBAS)
def test_native_states_give_the_references_logits(name: str) -> None:
    reference, read = make_mamba(torch.float32, **MAMBAS[name]), ids(1, 30)
    executor = NativeExecutor(ours(reference))
    found = torch.cat(
        [
            executor.run(one_feed(read[0, :21].tolist(), verbs=(OPEN,))).logits,
            executor.run(one_feed(read[0, 21:].tolist(), start=21)).logits,
        ]
    )
    assert farthest(found, reference_logits(reference, read)[0]) < TOLERANCE[torch.float32]


# --- what cannot be had ---------------------------------------------------------------------------


def test_a_recurrent_model_has_no_cache_object() -> None:
    model = pair("mamba").model
    out = model.generate(PROMPTS, **QUIET, return_dict_in_generate=True)
    assert out.past_key_values is None
    for options in ({"past_key_values": es.DynamicCache()}, {"cache_implementation": "static"}):
        with pytest.raises(EverystepError, match=r"models of attention|recurrent layers"):
            model.generate(PROMPTS, **QUIET, **options)
    assert model(PROMPTS).past_key_values is None
    with pytest.raises(EverystepError, match="recurrent"):
        model(PROMPTS, use_cache=True)


def test_a_recurrent_model_has_no_positions_and_no_weights() -> None:
    model = pair("mamba").model
    places = torch.arange(12).expand(2, 12)
    with pytest.raises(UnsupportedError, match="position_ids"):
        model(PROMPTS, position_ids=places)
    for options in ({"position_ids": places}, {"output_attentions": True}):
        with pytest.raises(EverystepError, match=r"positions|attentions"):
            model.generate(PROMPTS, **QUIET, **options, return_dict_in_generate=True)
