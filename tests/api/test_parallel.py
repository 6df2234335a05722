"""A model in parts on two processes answers as the whole does in one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.errors import RankError, RequestError, UnsupportedError
from everystep.executors.torch_executor import TorchExecutor
from everystep.models.decoder import Decoder
from everystep.testing.models import tiny_llama
from tests.adapters.making import PROJECTIONS, random_lora, write_folder
from tests.api.asking import require_nothing_left, runs
from tests.executors.parallel.children import LOOPBACK, children, listened
from tests.executors.works import Wanderer
from tests.matrix.rows import ROWS, Row

VOCABULARY = 48
SETTINGS = 20
MORE_SETTINGS = 200
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
LONG: dict[str, Any] = {"do_sample": True, "seed": 3, "min_new_tokens": 9, "max_new_tokens": 9}
IDS = torch.tensor([[5, 6, 7, 8]])
PATIENCE = 10.0
# Random settings are at times such that one of two has no effect.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def adapters(folder: Path, model: es.LanguageModel) -> dict[str, Path]:
    """Folders of adapters by their names: LoRAs, and one that scales what maps read and give."""
    weights = dict(model.state_dict())
    found = {}
    for seed, name in enumerate(("one", "two")):
        tensors = random_lora(weights, seed, PROJECTIONS[seed:])
        found[name] = write_folder(folder / name, tensors)
    drawn = torch.Generator().manual_seed(5)
    scales = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(("k_proj", "v_proj", "down_proj")):
            shape = (1, weight.shape[1]) if "down" in module else (weight.shape[0], 1)
            own = 1 + torch.randn(shape, generator=drawn, dtype=torch.float64) * 0.3
            scales[f"base_model.model.{module}.ia3_l"] = own
    targets = {"target_modules": ["k_proj", "v_proj", "down_proj"]}
    more = {**targets, "peft_type": "IA3", "feedforward_modules": ["down_proj"], "r": None}
    found["scaled"] = write_folder(folder / "scaled", scales, **more, lora_alpha=None)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    made = tmp_path_factory.mktemp("model")
    tiny_llama(seed=2, num_hidden_layers=3).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> es.LanguageModel:
    """The model in one process."""
    return es.load_model(folder)


@pytest.fixture(scope="module")
def parts(folder: Path, whole: es.LanguageModel) -> Iterator[es.LanguageModel]:
    """The same in two, started once; both have the same adapters."""
    made = es.load_model(folder, parallel=2, parallel_timeout=PATIENCE)
    for name, one in adapters(folder / "adapters", whole).items():
        for model in (whole, made):
            model.load_adapter(one, name)
    yield made
    made.close()


@pytest.fixture(scope="module")
def second() -> es.LanguageModel:
    """A model that drafts."""
    return tiny_llama(seed=9)


def asked(number: int, second: es.LanguageModel) -> tuple[Row, Tensor, dict[str, Any]]:
    """A strategy, prompts and keywords, drawn at random."""
    rng = random.Random(f"parts {number}")
    row = ROWS[number % len(ROWS)]
    rows, length = rng.randint(1, 3), rng.randint(1, 12)
    given: dict[str, Any] = {"max_new_tokens": rng.randint(2, 9), "seed": rng.randrange(1000)}
    given |= row.drawn.options if rng.random() < 0.5 else row.options
    if row.beside:
        given["negative_prompt_ids"] = torch.tensor([[7, 8]] * rows)
    if row.assisted:
        given["assistant_model"] = second
    if row.assisted or row.name in ("early_exit", "contrastive", "lookup"):
        rows = rows if row.name == "contrastive" else 1
    if rng.random() < 0.5:
        given["repetition_penalty"] = rng.choice([0.8, 1.3])
    if rng.random() < 0.3:
        given["min_new_tokens"] = 2
    if rng.random() < 0.3 and given.get("do_sample", "sample" in row.name):
        given["top_p"] = 0.9
    if rng.random() < 0.5:
        mixes = ("one", {"one": 0.7, "two": 1.0}, "scaled", {"two": 1.0, "scaled": 0.5})
        given["adapters"] = [rng.choice(mixes) for _ in range(rows)]
    drawn = torch.Generator().manual_seed(number)
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=drawn)
    if "negative_prompt_ids" in given:
        given["negative_prompt_ids"] = given["negative_prompt_ids"][:rows]
    return row, ids, given


def agree(number: int, parts: Any, whole: Any, second: Any) -> str:
    """Compare what both give for settings that are drawn; the name of the strategy."""
    row, ids, given = asked(number, second)
    shown = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    found, wanted = (one.generate(ids, **given, **shown) for one in (parts, whole))
    assert torch.equal(found.sequences, wanted.sequences), (row.name, given)
    for one, other in zip(found.logits, wanted.logits, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)  # as callers get them, in float32
    return row.name


@pytest.mark.parametrize("block", range(4))
def test_every_strategy_finds_the_tokens_of_one_process(
    block: int, parts: es.LanguageModel, whole: es.LanguageModel, second: es.LanguageModel
) -> None:
    """In random settings, with adapters of several kinds and rows that fork."""
    count = SETTINGS // 4
    for number in range(block * count, (block + 1) * count):
        agree(number, parts, whole, second)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_every_strategy_in_many_settings(
    block: int, parts: es.LanguageModel, whole: es.LanguageModel, second: es.LanguageModel
) -> None:
    count = MORE_SETTINGS // 10
    numbers = range(SETTINGS + block * count, SETTINGS + (block + 1) * count)
    names = {agree(number, parts, whole, second) for number in numbers}
    assert names == {row.name for row in ROWS}


def test_two_processes_have_the_logits_of_one_and_the_same_again(
    parts: es.LanguageModel, whole: es.LanguageModel
) -> None:
    """Of random works on rows that fork, in float64, and to the bit in another executor."""
    first, second, alone = parts.executor(), parts.executor(), TorchExecutor(whole.core)
    wanderer = Wanderer(whole.core, np.random.default_rng(3), positions=False, anywhere=False)
    seen = 0
    for _ in range(12):
        work = wanderer.work()
        found, again, wanted = (one.run(work).logits for one in (first, second, alone))
        assert found.dtype == torch.float64 and torch.equal(found, again)
        assert found.shape == wanted.shape
        assert not found.numel() or float((found - wanted).abs().max()) <= 1e-10
        seen += len(wanted)
    assert seen > 20


def test_rows_are_shared_exported_and_gone_on_from(
    parts: es.LanguageModel, whole: es.LanguageModel
) -> None:
    """Prompts that begin alike, caches that come and go, embeddings, steering, and scores."""
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 4 + one] for one in range(5)]
    assert texts(parts, prompts) == texts(whole, prompts)

    def gone_on(model: es.LanguageModel) -> list[Any]:
        shown = {"return_dict_in_generate": True, "use_cache": True}
        out = model.generate(IDS, **GREEDY, **shown)
        longer = torch.cat([out.sequences, torch.tensor([[9, 4]])], dim=1)
        again = model.generate(longer, **GREEDY, past_key_values=out.past_key_values)
        embedded = whole.get_input_embeddings()(IDS)
        read = model.generate(inputs_embeds=embedded, **GREEDY)
        steered = model.generate(IDS, **GREEDY, steer={1: torch.ones(32, dtype=torch.float64)})
        return [again.tolist(), read.tolist(), steered.tolist()]

    assert gone_on(parts) == gone_on(whole)
    for one, other in zip(
        es.score(parts, None, [[5, 6, 7, 8]]), es.score(whole, None, [[5, 6, 7, 8]]), strict=True
    ):
        assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-5)


def texts(model: es.LanguageModel, prompts: list[list[int]]) -> list[list[int]]:
    return list(es.generate(model, None, prompts, max_new_tokens=12))


def logits(model: es.LanguageModel) -> Tensor:
    out = model.generate(IDS, **GREEDY, return_dict_in_generate=True, output_logits=True)
    return torch.cat(out.logits)


def test_a_process_holds_half_and_says_so(parts: es.LanguageModel, whole: es.LanguageModel) -> None:
    held, every = (sum(one.weight_bytes.values()) for one in (parts, whole))
    assert held <= 0.6 * every and parts.num_parameters() == whole.num_parameters()
    assert "in parts on 2 processes" in repr(parts)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model(IDS),
        lambda model: model.get_input_embeddings()(IDS),
        lambda model: model.state_dict(),
        lambda model: model.to(torch.float32),
        lambda model: model.requires_grad_(),
        lambda model: model.frozen(),
        lambda model: model.as_module(),
        lambda model: model.merge_adapter(["one"]),
        lambda model: model.save_pretrained("anywhere", adapters=[]),
    ],
)
def test_what_reads_the_whole_is_refused(call: Any, parts: es.LanguageModel) -> None:
    with pytest.raises(UnsupportedError, match=r"lie in parts on several.*without parallel"):
        call(parts)
    assert logits(parts).isfinite().all()  # and nobody was left waiting


def test_adapters_without_parts_are_refused(
    tmp_path: Path, parts: es.LanguageModel, whole: es.LanguageModel
) -> None:
    dora = random_lora(dict(whole.state_dict()), 1, ("q_proj",))
    dora |= {
        name.replace("lora_B.weight", "lora_magnitude_vector"): one.norm(dim=1)
        for name, one in dora.items()
        if "lora_B" in name
    }
    written = write_folder(tmp_path / "dora", dora, use_dora=True)
    with pytest.raises(UnsupportedError, match=r"lie in parts on several"):
        parts.load_adapter(written, "dora")
    head = random_lora(dict(whole.state_dict()), 1, ("lm_head",))
    parts.load_adapter(write_folder(tmp_path / "head", head, target_modules=["lm_head"]), "head")
    with pytest.raises(UnsupportedError, match=r"changed heads"):
        parts.generate(IDS, **GREEDY, adapters={"head": 1.0})
    parts.delete_adapter("head")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parallel": 0}, "parallel"),
        ({"parallel": "2"}, "parallel"),
        ({"parallel": 2, "parallel_timeout": 0}, "parallel_timeout"),
        ({"parallel": 3}, "2 key heads cannot be shared out"),
        ({"parallel": 2, "quantize": "int8"}, "quantize='int8'"),
        ({"parallel": 2, "executor": "native"}, "executor='native'"),
        ({"parallel": 2, "without": ("vision",)}, "without="),
    ],
)
def test_what_cannot_be_loaded_is_refused_before(
    given: dict[str, Any], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(RequestError, match=words):
        es.load_model(folder, **given)


def test_a_dead_process_ends_the_call_and_the_next_goes_on(
    parts: es.LanguageModel, whole: es.LanguageModel, tmp_path: Path
) -> None:
    """A call alone ends with the error; a saved run is resumed by the processes that follow; and
    what they compute has the same bits."""
    before, [child] = logits(parts), children()
    run = es.open(parts, None, [5, 6, 7, 8], **LONG)
    for _ in range(4):
        next(run)
    run.save(tmp_path / "saved.run")
    os.kill(child, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"process 1: it was ended by signal 9.*Call again"):
        parts.generate(IDS, **GREEDY)
    assert time.monotonic() - began < PATIENCE, "the dead are not waited for"
    assert torch.equal(logits(parts), before)
    assert children() != [child]
    again = es.resume(tmp_path / "saved.run", parts, None)
    straight = es.open(whole, None, [5, 6, 7, 8], **LONG)
    for one in (again, straight):
        assert list(one)
    assert again.tokens == straight.tokens and len(again.tokens) > 4


@pytest.mark.parametrize(
    "sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_lost_process_leaves_no_row_behind(
    sent: signal.Signals, parts: es.LanguageModel, whole: es.LanguageModel
) -> None:
    """Of prompts that end by its loss, and of those that go on: killed, or silent for good."""

    async def work() -> None:
        engine = es.AsyncEngine(parts, max_rows=4)
        many: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40}
        streams = [engine.stream([5, 6, 7 + one], **many) for one in range(3)]
        first = [await anext(one) for one in streams]
        os.kill(children()[0], sent)
        ends = [await ended(one) for one in streams]
        assert len(first) == 3 and all(one in ("", "RankError") for one in ends)
        await require_nothing_left(engine)
        again = await engine.generate([5, 6, 7, 8], **GREEDY)
        assert again == es.generate(whole, None, [5, 6, 7, 8], **GREEDY)
        await require_nothing_left(engine)
        await engine.close()

    async def ended(stream: Any) -> str:
        try:
            async for _ in stream:
                pass
        except RankError as error:
            return type(error).__name__
        return ""

    runs(work())


def test_calls_together_go_on_by_themselves(
    parts: es.LanguageModel, whole: es.LanguageModel
) -> None:
    """Several prompts, whose rows are lost with a process: they are fed again from their ids."""
    prompts, seen = [[5, 6, 7], [8, 9], [10, 11, 12, 13]], list[int]()

    def kill(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(1)
        if len(seen) == 6:
            os.kill(children()[0], signal.SIGKILL)
        return scores

    found = es.generate(parts, None, prompts, max_new_tokens=12, logits_processor=[kill])
    assert list(found) == texts(whole, prompts) and len(seen) > 6


def test_closing_ends_the_processes(folder: Path) -> None:
    before = children()
    model = es.load_model(folder, parallel=2, dtype=torch.float32)
    [other] = {*children()} - {*before}
    assert listened(other) == {LOOPBACK}  # and nothing is reached from another machine
    first = logits(model)
    assert torch.equal(logits(model), first)
    wanted = logits(es.load_model(folder, dtype=torch.float32, executor="torch"))
    assert torch.allclose(first, wanted, atol=1e-4)
    model.close()
    model.close()
    assert children() == before
    with pytest.raises(RankError, match=r"lost a process for good.*it was closed"):
        model.generate(IDS, **GREEDY)


def test_an_interrupt_in_mid_step_forgets_no_adapter(
    folder: Path, parts: es.LanguageModel, whole: es.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in which the others were to hear of it ends in the middle."""
    for model in (parts, whole):
        model.load_adapter(folder / "adapters" / "two", "again")
    [child], added, steps = children(), Decoder._added, list[int]()

    def broken(*given: Any) -> Tensor:
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return added(*given)

    monkeypatch.setattr(Decoder, "_added", broken)
    with pytest.raises(KeyboardInterrupt):
        parts.generate(IDS, **GREEDY, adapters="again")
    found, wanted = (one.generate(IDS, **GREEDY, adapters="again") for one in (parts, whole))
    assert torch.equal(found, wanted) and children() == [child]


def test_threads_take_turns(parts: es.LanguageModel, whole: es.LanguageModel) -> None:
    prompts = [[[4 + one, 6, 7 + one]] for one in range(6)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(partial(texts, parts), prompts))
    assert found == [texts(whole, one) for one in prompts]


def test_a_forked_process_has_no_part_in_it(
    parts: es.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("everystep.executors.parallel.crew.os.getpid", lambda: -1)
        with pytest.raises(RequestError, match=r"forked from it.*Load the model there too"):
            parts.generate(IDS, **GREEDY)
    assert logits(parts).isfinite().all()


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(
    parts: es.LanguageModel, whole: es.LanguageModel
) -> None:
    """Ten of them, two by stopping for good, while several prompts run."""
    rng, prompts = random.Random(4), [[4 + one, 6, 7] for one in range(6)]
    wanted = texts(whole, prompts)
    for number in range(10):
        sent = signal.SIGSTOP if number % 5 == 4 else signal.SIGKILL
        clock = threading.Timer(rng.uniform(0, 0.3), os.kill, (children()[0], sent))
        clock.start()
        assert texts(parts, prompts) == wanted
        clock.join()
        # The last moment may have been after the last step.
        try:
            logits(parts)
        except RankError:
            assert logits(parts).isfinite().all()
