"""Adapters natively: what torch operators give, and rows that do not know what others ask for."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.adapters import (
    Adapter,
    Delta,
    Dense,
    InputScaling,
    Kronecker,
    Magnitude,
    OutputScaling,
    Rotation,
    read_adapter,
)
from everystep.adapters.adapter import ROLES
from everystep.adapters.changes import AdapterChange, Replacement
from everystep.api.model import LanguageModel
from everystep.draws import SeededDraws
from everystep.engine import Engine, Lockstep, PromptLookup, prefixes
from everystep.errors import InvariantError, RequestError
from everystep.executors.native import NativeExecutor, changes
from everystep.executors.native.changes import AdaptersOfStep, PackedAdapter, PackedAdapters
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, named_weights
from everystep.models.decoder import Decoder
from everystep.nn.panels import SIXTEEN_BITS
from everystep.nn.rounding import Rounding
from everystep.stops.ends import MaxLength
from everystep.strategies import Beam, Greedy, Sample
from everystep.types import Extra, Prompt, Request, StepOutput, Verb, Work
from tests.adapters.making import PROJECTIONS, random_lora, write_folder
from tests.adapters.test_kinds import MADE, READ, base, mixture, trained
from tests.executors.members import members
from tests.executors.models import SPECS, narrow_model, random_model
from tests.executors.works import one_feed
from tests.judges.dice import Dice
from tests.judges.drive import Drive, result, run_scheduled, run_together
from tests.judges.mixes import random_schedule
from tests.judges.mutants import replaced
from tests.judges.textbook import Hypothesis
from tests.models.tiny import ours

pytestmark = pytest.mark.native

FORMATS: tuple[Rounding | None, ...] = (None, "int8", "int4")
Mixed = tuple[tuple[str, float], ...]
MIXES: tuple[Mixed, ...] = (
    (),
    (("a", 1.0),),
    (("folded", 1.0),),
    (("b", 1.0),),
    (("a", 0.7), ("b", 0.3)),
    (("read", 1.0),),
    (("scales", 0.5), ("folded", 0.5), ("a", 1.0)),
    (("a", 1.0), ("turned", 0.5)),
    (("dense", 1.0),),
    (("turned", 0.7), ("b", -0.5), ("read", 1.0)),
    (("lengths", 1.0),),
    (("lengths", 0.4), ("read", 0.6)),
    (("b", 1.0), ("folded", 0.6), ("turned", 1.0)),
    (("a", 0.0),),
    (
        *(("folded", 0.3), ("a", 0.2), ("b", 0.2), ("dense", 0.2), ("scales", 0.2)),
        *(("read", 0.4), ("lengths", 0.2)),
    ),
    (("few", 1.5),),
)
KINDS = ("a", "b", "dense", "scales", "lengths", "few", "folded", "turned", "read")


# --- adapters of a decoder, of every class of change ----------------------------------------------


def made(model: Model, kind: str) -> Adapter:
    """Random changes whose rows begin and end anywhere, within panels and across matrices."""
    assert isinstance(model.network, Decoder)
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    targets: dict[str, tuple[AdapterChange, ...]] = {}
    for index, layer in enumerate(model.network.layers):
        for role in ROLES:
            base = getattr(layer, role)
            if base is None or (kind == "few" and (index == 0 or role != "qkv")):
                continue
            rows, width = _shape(model, role)
            cuts = [0, rows // 3 + 1, rows // 2 + 3, rows]
            found = [
                _change(kind, start, stop - start, width, generator, model.dtype)
                for start, stop in pairwise(cuts)
            ]
            targets[f"layers.{index}.{role}"] = tuple(found[1:] if kind == "b" else found)
    return Adapter(targets)


def _shape(model: Model, role: str) -> tuple[int, int]:
    spec = model.spec
    heads = spec.attention.heads * spec.attention.head_dim
    keys = spec.attention.kv_heads * spec.attention.head_dim
    inner = spec.mlp.size
    return {
        "qkv": (heads + 2 * keys, spec.width),
        "out": (spec.width, heads),
        "up": (inner * (2 if spec.mlp.gated else 1), spec.width),
        "down": (spec.width, inner),
    }[role]


def _change(
    kind: str, start: int, rows: int, width: int, generator: Any, dtype: torch.dtype
) -> AdapterChange:
    def drawn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.2).to(dtype)

    if kind == "dense":
        return Dense(drawn(rows, width) * 0.3, start)
    if kind == "scales":
        return OutputScaling(1 + drawn(rows), start)
    if kind == "folded":
        own = next(one for one in (5, 4, 3, 2, 1) if rows % one == 0)
        return Kronecker(drawn(rows // own, width // 4), drawn(own, 4) * 0.5, start)
    if kind == "turned":
        return Rotation(torch.eye(4, dtype=dtype) + drawn(width // 4, 4, 4) * 0.5, rows, start)
    if kind == "read":
        return InputScaling(1 + drawn(width), rows, start)
    rank = {"a": 3, "b": 21}.get(kind, 5)
    shift = drawn(rows) if kind == "b" else None
    delta = Delta(drawn(rank, width), drawn(rows, rank), 0.8, start, shift)
    return Magnitude(delta, 1 + drawn(rows), start) if kind == "lengths" else delta


@cache
def adapters_of(model: Model) -> Mapping[str, Adapter]:
    return {kind: made(model, kind) for kind in KINDS}


def extra_of(model: Model, mix: Mixed) -> Extra:
    known = adapters_of(model)
    return Extra(adapters=mix, resolved=tuple(known[name] for name, _ in mix))


def work_of(model: Model, mixes: Sequence[Mixed], counts: Sequence[int], start: int = 0) -> Work:
    """A row for each mix, which feeds its own ids from `start` on and wants all logits."""
    ids = [np.random.default_rng(row).integers(0, 40, start + n) for row, n in enumerate(counts)]
    each = np.array(counts, dtype=np.int64)
    return Work(
        tuple(Verb("allocate", row) for row in range(len(mixes))) if not start else (),
        np.arange(len(mixes)),
        np.full(len(mixes), start),
        each,
        each,
        np.concatenate([one[start:] for one in ids]),
        {row: extra_of(model, mix) for row, mix in enumerate(mixes) if mix},
    )


def logits_of(executor: Any, work: Work) -> list[Tensor]:
    found: StepOutput = executor.run(work)
    return list(found.logits.split(work.logits.tolist()))


# --- what is computed -----------------------------------------------------------------------------


@cache
def specified(name: str) -> Model:
    return random_model(SPECS[name], dtype=torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "biases", "plain mlp", "layer norm", "plus one", "parallel", "norms behind"),
        *("parallel with two norms", "experts", "window", "gelu"),
    ],
)
def test_they_are_what_torch_operators_make_of_them(name: str) -> None:
    model = specified(name)
    counts = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
    work = work_of(model, MIXES, counts)
    found, wanted = logits_of(NativeExecutor(model), work), logits_of(TorchExecutor(model), work)
    plain = logits_of(NativeExecutor(model), replace(work, extras={}))
    for mix, one, other, without in zip(MIXES, found, wanted, plain, strict=True):
        assert (one - other).abs().max() <= 2e-5 * other.abs().max(), mix
        nothing = all(weight == 0 for _, weight in mix)
        assert ((one - without).abs().max() <= 1e-5 * other.abs().max()) == nothing, mix


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_they_stand_beside_codes(family: str, rounding: Rounding) -> None:
    model, far = narrow_model(family, rounding), []
    work = work_of(model, MIXES, [4] * 16)
    found, wanted = logits_of(NativeExecutor(model), work), logits_of(TorchExecutor(model), work)
    for one, other in zip(found, wanted, strict=True):
        # An activation between two codes may go either way, and all that follows it differs then.
        apart = (one - other).abs().amax(1) / other.abs().max()
        assert apart.max() < 0.05
        far += (apart > 2e-5).tolist()
    assert sum(far) <= 0.1 * len(far)


@pytest.mark.parametrize("rounding", FORMATS)
@pytest.mark.parametrize("threads", [1, 3])
def test_no_bit_depends_on_neighbours_chunks_or_threads(
    rounding: Rounding | None, threads: int
) -> None:
    model = narrow_model("llama", rounding)
    with members(threads):
        together, chunked = NativeExecutor(model), NativeExecutor(model)
    found = logits_of(together, work_of(model, MIXES, [13] * 16))
    pieces = [logits_of(chunked, work_of(model, MIXES, [1] * 16))]
    pieces += [
        logits_of(chunked, work_of(model, MIXES, [n] * 16, at)) for at, n in ((1, 5), (6, 7))
    ]
    with members(1):
        alone = NativeExecutor(model)
    for row, mix in enumerate(MIXES):
        work = work_of(model, MIXES, [13] * 16)
        own = slice(13 * row, 13 * row + 13)
        single = replace(
            work,
            verbs=(Verb("allocate", row),),
            extras={0: extra_of(model, mix)} if mix else {},
            **{name: getattr(work, name)[row : row + 1] for name in _OF_FEEDS},
            tokens=work.tokens[own],
        )
        (wanted,) = logits_of(alone, single)
        assert torch.equal(found[row], wanted), mix
        assert torch.equal(torch.cat([one[row] for one in pieces]), wanted), mix


_OF_FEEDS = ("rows", "starts", "counts", "logits")


def test_a_feed_longer_than_the_buffers_keeps_its_mix() -> None:
    model = narrow_model("llama", "int4")
    mixes = (MIXES[4], (), MIXES[11])
    work = work_of(model, mixes, [200, 150, 170])
    found = logits_of(NativeExecutor(model), work)
    for row, mix in enumerate(mixes):
        alone = NativeExecutor(model)
        first = work_of(model, [mixes[row]] * 3, [200, 150, 170])
        wanted = logits_of(alone, first)
        assert torch.equal(found[row], wanted[row]), mix


@pytest.mark.parametrize("rounding", FORMATS)
def test_the_order_of_what_adds_changes_no_bit(rounding: Rounding | None) -> None:
    model = narrow_model("llama", rounding)
    mix = (("dense", 0.3), ("folded", 0.4), ("b", 0.6), ("a", 0.7))
    found = logits_of(NativeExecutor(model), work_of(model, [mix, mix[::-1]], [6, 6]))
    again = logits_of(NativeExecutor(model), work_of(model, [mix[::-1], mix], [6, 6]))
    assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])


def test_values_that_16_bits_hold_are_kept_in_them_and_others_are_not() -> None:
    exact = torch.randn(20, 20).bfloat16().float()
    for values in (exact, exact * 2**40, torch.randn(20, 20).half().float()):
        narrow = changes._narrow(values)
        assert narrow.dtype in SIXTEEN_BITS and torch.equal(narrow.float(), values)
    assert changes._narrow(torch.randn(20, 20)).dtype == torch.float32


def test_what_the_kernels_do_not_know_is_refused_before_they_see_it() -> None:
    model = narrow_model("llama", None)
    with pytest.raises(InvariantError):
        NativeExecutor(model).run(replace(_asking_beyond(model)))


def _asking_beyond(model: Model) -> Work:
    """A work with an adapter of a class that the kernels do not know."""
    whole = Adapter({"layers.0.out": (Replacement(torch.eye(32)),)})
    work = work_of(model, [()], [3])
    return replace(work, extras={0: Extra(adapters=(("t", 1.0),), resolved=(whole,))})


NATIVE = {"LORA", "ADALORA", "VERA", "LOHA", "LOKR", "SHIRA", "OFT", "IA3"}


@pytest.mark.parametrize("name", MADE)
def test_kinds_that_run_natively_are_those_of_the_guide(name: str) -> None:
    """Adapters that PEFT has saved, of every kind and with every setting that is read."""
    folder, expected = trained("llama", name)
    subject = LanguageModel(ours(base("llama")))
    subject.to(torch.float32)
    adapter = read_adapter(folder, subject.core).now()
    config = json.loads((folder / "adapter_config.json").read_text())
    native = config["peft_type"] in NATIVE
    executor = subject.executor(adapter.needs)
    assert isinstance(executor, NativeExecutor) == native
    ids = READ[0].tolist()
    work = one_feed(ids, verbs=(Verb("allocate", 0),))
    work = replace(work, extras={0: Extra(adapters=(("a", 1.0),), resolved=(adapter,))})
    found = executor.run(work).logits
    assert (found - expected[0]).abs().max() <= 1e-4 * expected.abs().max()


# --- steps that are begun before they are asked for -----------------------------------------------


def greedy_work(model: Model, mixes: Sequence[Mixed], tokens: Sequence[int], start: int) -> Work:
    work = work_of(model, mixes, [1] * len(mixes), start)
    best = np.ones(len(mixes), np.int64)
    return replace(work, tokens=np.array(tokens), best=best, logits=best)


@pytest.mark.parametrize("rounding", [None, "int4"])
def test_what_is_begun_ahead_is_taken_only_for_the_same_adapters(rounding: Rounding | None) -> None:
    model = narrow_model("llama", rounding)
    with members(3):
        ahead = NativeExecutor(model)
    with members(1):
        judge = NativeExecutor(model, ahead=False)
    rng, tokens = np.random.default_rng(1), [5, 9, 11, 30]
    mixes = [MIXES[i] for i in (1, 0, 4, 10)]
    for step in range(24):
        work = greedy_work(model, mixes, tokens, step)
        found, wanted = ahead.run(work), judge.run(work)
        assert found.best is not None and wanted.best is not None
        assert torch.equal(found.best.values, wanted.best.values)
        tokens = wanted.best.tokens[:, 0].tolist()  # type: ignore[index]
        if step % 3 == 2:  # the same tokens, and another mix or weight of a row
            mixes[int(rng.integers(4))] = MIXES[int(rng.integers(16))]
        if step % 5 == 4:
            gc.collect()
    made, true = ahead.guesses()
    assert 0 < true < made


# --- requests of every kind -----------------------------------------------------------------------

WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (Greedy(), {}),
    "sampled": (Sample(2), {}),
    "beams": (Beam(3, returns=2, max_new=7), {}),
    "copied drafts": (Greedy(), {"drafter": PromptLookup(4, 2)}),
}


def requests_of(model: Model, way: str) -> tuple[Request, ...]:
    """Sixteen with the same three prompts, each with a mix of its own."""
    strategy, more = WAYS[way]
    found = []
    for row, mix in enumerate(MIXES):
        ids = np.tile(np.random.default_rng(row % 3).integers(3, 40, 4), 3)
        extra = extra_of(model, mix)
        one = Request(
            str(row),
            Prompt(ids),
            strategy,
            SeededDraws(row),
            stops=(MaxLength(len(ids) + 7),),
            max_length=len(ids) + 7,
            adapters=extra.adapters,
            resolved=extra.resolved,
            **more,
        )
        found.append(one)
    return tuple(found)


@cache
def alone(rounding: Rounding | None, way: str) -> dict[str, list[Hypothesis]]:
    model = narrow_model("llama", rounding)
    results: dict[str, list[Hypothesis]] = {}
    for request in requests_of(model, way):
        with members(1):
            results |= run_together([request], NativeExecutor(model)).results
    return results


def runs(rounding: Rounding | None, way: str) -> Iterator[dict[str, list[Hypothesis]]]:
    """Side by side: in lockstep, in chunks, and as they come, share rows and lose them."""
    model = narrow_model("llama", rounding)
    asked = requests_of(model, way)
    yield run_together(asked, NativeExecutor(model)).results
    yield run_together(asked, NativeExecutor(model), chunk=2).results
    schedule = random_schedule(asked, Dice(np.random.default_rng(len(way))))
    reuse = prefixes.Reuse(kept=80, least=1)
    schedule = replace(schedule, cancels=(None,) * 16, preempt_rate=0.3, reuse=reuse)
    yield run_scheduled(asked, schedule, NativeExecutor(model)).results


def holds(rounding: Rounding | None, way: str) -> bool:
    return all(found == alone(rounding, way) for found in runs(rounding, way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rounding", FORMATS)
def test_sixteen_mixes_are_sixteen_requests_alone_to_the_bit(
    rounding: Rounding | None, way: str
) -> None:
    assert holds(rounding, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rounding", [None, "int4"])
def test_sixteen_saved_mixes_go_on_to_the_bit(rounding: Rounding | None, way: str) -> None:
    """All of them at once, after some steps, into another engine."""
    model = narrow_model("llama", rounding)
    asked = requests_of(model, way)
    run = Drive(Engine(NativeExecutor(model), Lockstep(None)))
    for request in asked:
        run.submit(request)
    for _ in range(3):
        run.step()
    data = [run.engine.dump(run.groups[request.request_id]) for request in asked]
    assert all(group.live for group in run.groups.values())
    again = Drive(Engine(NativeExecutor(model), Lockstep(None)))
    restored = [
        again.engine.restore(request, one) for request, one in zip(asked, data, strict=True)
    ]
    while again.engine.pending:
        again.step()
    for request, group in zip(asked, restored, strict=True):
        name = request.request_id
        assert result(group) == alone(rounding, way)[name], MIXES[int(name)]
        assert result(group) == run.finish().results[name]


@pytest.mark.parametrize(
    "names",
    [("lora", "oft", "loha"), ("oft", "lora", "loha"), ("loha", "lora", "oft", "lokr")],
    ids=" in ".join,
)
def test_mixes_of_several_kinds_are_pefts(names: tuple[str, ...]) -> None:
    """The first one innermost, as PEFT's own mixed model has them."""
    expected = mixture(names)[0]
    subject = LanguageModel(ours(base("llama")))
    subject.to(torch.float32)
    adapters = tuple(read_adapter(trained("llama", one)[0], subject.core).now() for one in names)
    executor = subject.executor(frozenset().union(*(one.needs for one in adapters)))
    assert isinstance(executor, NativeExecutor)
    mix = Extra(adapters=tuple((one, 1.0) for one in names), resolved=adapters)
    work = one_feed(READ[0].tolist(), verbs=(Verb("allocate", 0),))
    found = executor.run(replace(work, extras={0: mix})).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_each_mix_is_another_model() -> None:
    model = narrow_model("llama", "int4")
    work = work_of(model, MIXES, [6] * 16)
    work = replace(work, tokens=np.tile(work.tokens[:6], 16))
    found = logits_of(NativeExecutor(model), work)
    for one in range(16):
        for two in range(one):
            same = torch.equal(found[one], found[two])
            assert same == ({one, two} == {0, 13}), (MIXES[one], MIXES[two])


# --- models, which load and unload and teach ------------------------------------------------------

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.tensor([[5, 9, 30, 7, 5, 9], [11, 4, 8, 30, 2, 6], [3, 3, 39, 38, 3, 3]])


def loaded(folder: Path, rounding: Rounding | None = "int4") -> LanguageModel:
    """A model with two adapters of low rank."""
    model = LanguageModel(narrow_model("llama", rounding))
    weights = dict(named_weights(narrow_model("llama", None)))
    for seed, name in enumerate(("style", "other")):
        tensors = random_lora(weights, seed, PROJECTIONS)
        model.load_adapter(write_folder(folder / name, tensors), name)
    return model


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The executors that were opened, the native ones and those on torch operators."""
    found: list[object] = []
    for kind in (NativeExecutor, TorchExecutor):

        def noted(self: Any, *given: Any, begin: Any = kind.__init__, **more: Any) -> None:
            found.append(self)
            begin(self, *given, **more)

        monkeypatch.setattr(kind, "__init__", noted)
    return found


@pytest.mark.parametrize("rounding", FORMATS)
def test_plain_and_adapted_prompts_share_an_executor(
    rounding: Rounding | None, tmp_path: Path, opened: list[object]
) -> None:
    model = loaded(tmp_path, rounding)
    asked = [None, "style", {"style": 0.7, "other": 0.3}]
    options = [{"adapters": one} for one in asked]
    found = es.generate(model, None, IDS.tolist(), options=options, **OPTIONS)
    (executor,) = opened
    assert isinstance(executor, NativeExecutor)
    rows = model.generate(IDS, **OPTIONS, adapters=asked)
    assert found == rows[:, 6:].tolist()
    for row, one in enumerate(asked):
        own = model.generate(IDS[row : row + 1], **OPTIONS, adapters=[one])
        assert own[0].tolist() == rows[row].tolist()


@pytest.mark.parametrize("rounding", FORMATS)
def test_a_saved_run_goes_on_to_the_bit(rounding: Rounding | None, tmp_path: Path) -> None:
    model, mix = loaded(tmp_path, rounding), {"other": 0.5, "style": 0.5}
    options = {**OPTIONS, "adapters": mix, "do_sample": True, "seed": 4}
    whole = es.open(model, None, IDS[0].tolist(), **options).result()
    run = es.open(model, None, IDS[0].tolist(), **options)
    assert len([*islice(run, 3)]) == 3
    run.save(tmp_path / "a.run")
    again = es.resume(tmp_path / "a.run", model, None).result()
    assert again.tokens == whole.tokens and again.score == whole.score


def test_adapters_come_and_go_while_others_run(tmp_path: Path, opened: list[object]) -> None:
    model = loaded(tmp_path)
    wanted = {
        name: es.generate(model, None, [IDS[0].tolist()], adapters=name, **OPTIONS)
        for name in ("style", "other")
    }
    opened.clear()
    stream = es.stream(model, None, IDS[0].tolist(), adapters="style", **OPTIONS)
    tokens = [next(stream).token]
    model.delete_adapter("style")
    with pytest.raises(RequestError, match="model does not have"):
        es.generate(model, None, [IDS[0].tolist()], adapters="style", **OPTIONS)
    # Another adapter under the name, in the engine in which the first one still runs.
    model.load_adapter(tmp_path / "other", "style")
    between = es.generate(model, None, [IDS[0].tolist()], adapters="style", **OPTIONS)
    tokens += [event.token for event in stream if event.token is not None]
    assert [tokens] == wanted["style"] and between == wanted["other"]
    assert between != wanted["style"]
    assert len(opened) == 1


def test_a_packed_copy_ends_with_its_adapter(tmp_path: Path, monkeypatch: Any) -> None:
    made: list[weakref.ref[PackedAdapter]] = []
    begin = PackedAdapter.__init__

    def noted(self: PackedAdapter, *given: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *given)

    monkeypatch.setattr(PackedAdapter, "__init__", noted)
    model = loaded(tmp_path)
    for _ in range(3):
        model.generate(IDS, **OPTIONS, adapters="style")
    assert len(made) == 1 and made[0]() is not None
    model.delete_adapter("style")
    gc.collect()
    assert made[0]() is None


def teach(values: Iterable[Tensor], seed: int) -> None:
    """Write past the versions that torch counts, as some optimizers do."""
    generator = torch.Generator().manual_seed(seed)
    for one in values:
        one.data.add_(torch.randn(one.shape, generator=generator) * 0.3)


def fresh_after(model: LanguageModel, ids: Tensor) -> list[Any]:
    """What a model gives whose adapter begins with the values of now."""
    adapter = model._held._adapters["default"]  # type: ignore[attr-defined]
    other = LanguageModel(narrow_model("llama", "int4"))
    copy = other.add_adapter("default", es.LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for one, value in zip(copy.parameters(), adapter.parameters(), strict=True):
            one.copy_(value)
    found: list[Any] = other.generate(ids, **OPTIONS, adapters="default").tolist()
    return found


def follows_what_it_learns() -> bool:
    """Whether every call sees the values of its moment, and one that runs those of its own."""
    model = LanguageModel(narrow_model("llama", "int4"))
    adapter = model.add_adapter("default", es.LoraConfig(r=4, target_modules="all-linear"))
    before, right = None, True
    ids = IDS.repeat(1, 8)  # long enough to be shared
    shared = {**OPTIONS, "adapters": "default", "cache_salt": "one"}
    for seed in range(3):
        teach(adapter.parameters(), seed)
        found = model.generate(ids, **OPTIONS, adapters="default").tolist()
        right = right and found == fresh_after(model, ids) and found != before
        before = found
        stream = es.stream(model, None, ids[0].tolist(), **shared)
        tokens = [next(stream).token]
        teach(adapter.parameters(), 10 + seed)
        # In the same engine, beside a row of the same ids and the values of before.
        (beside,) = es.generate(model, None, [ids[0].tolist()], **shared)
        right = right and [*ids[0].tolist(), *beside] == fresh_after(model, ids)[0]
        tokens += [event.token for event in stream if event.token is not None]
        right = right and tokens == found[0][len(ids[0]) :]
    return right


def test_every_call_sees_what_was_learned_before_it(opened: list[object]) -> None:
    assert follows_what_it_learns()
    assert all(isinstance(one, NativeExecutor) for one in opened)


def test_prompts_of_a_call_share_an_executor_while_an_adapter_learns(opened: list[object]) -> None:
    model = LanguageModel(narrow_model("llama", "int4"))
    adapter = model.add_adapter("default", es.LoraConfig(r=4))
    teach(adapter.parameters(), 0)
    assert adapter.now() is adapter.now()
    es.generate(model, None, IDS.tolist(), adapters="default", **OPTIONS)
    assert len(opened) == 1


def test_what_follows_a_learned_prefix_is_refused_once_it_has_changed() -> None:
    model = LanguageModel(narrow_model("llama", "int4"))
    adapter = model.add_adapter("default", es.LoraConfig(r=4))
    teach(adapter.parameters(), 0)
    prefix = es.prefill(model, prompt=IDS[0, :3].tolist(), adapter_names="default")
    given: dict[str, Any] = {"prefix": prefix, "adapters": "default", **OPTIONS}
    assert es.generate(model, None, [IDS[0, 3:].tolist()], **given)
    teach(adapter.parameters(), 1)
    with pytest.raises(RequestError, match="fed with other adapters"):
        es.generate(model, None, [IDS[0, 3:].tolist()], **given)


# --- mutants --------------------------------------------------------------------------------------

_true_write = AdaptersOfStep.write


def _one_row_further(self: AdaptersOfStep, step: Any) -> None:
    self._begins[1:-1] = self._begins[2:].copy()
    _true_write(self, step)


def _weights_are_one(self: AdaptersOfStep, step: Any) -> None:
    self._weights[:] = 1
    _true_write(self, step)


_true_key = prefixes.key_of


def _key_without_adapters(request: Request) -> prefixes.Key:
    return _true_key(request)._replace(adapters=(), resolved=())


_packed: dict[tuple[str, ...], PackedAdapter] = {}


def _by_targets(self: PackedAdapters, adapter: Adapter) -> PackedAdapter:
    """A copy is that of whoever changes the same projections."""
    key = tuple(sorted(adapter.targets))
    return _packed.setdefault(key, PackedAdapter(adapter, *self._own))


def _kept_once(self: Any) -> Adapter:
    """What an adapter learns is not looked at any more."""
    if self._kept is None:
        held = {name: one.detach().clone() for name, one in self._tensors.items()}
        self._kept = self._plan.made(held), held
    kept: Adapter = self._kept[0]
    return kept


def _numberless(request: Request) -> prefixes.Key:
    return _true_key(request)._replace(resolved=())


PeftAdapter = es.PeftAdapter
MUTANTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], bool]]] = {
    "adapter of a neighbour": (
        partial(replaced, _one_row_further, (AdaptersOfStep, "write")),
        partial(holds, "int4", "greedy"),
    ),
    "weight forgotten": (
        partial(replaced, _weights_are_one, (AdaptersOfStep, "write")),
        partial(holds, "int4", "greedy"),
    ),
    "prefix of another mix": (
        partial(replaced, _key_without_adapters, (prefixes, "key_of")),
        partial(holds, "int4", "greedy"),
    ),
    "stale packed copy": (
        partial(replaced, _by_targets, (PackedAdapters, "of")),
        follows_what_it_learns,
    ),
    "values looked at once": (
        partial(replaced, _kept_once, (PeftAdapter, "now")),
        follows_what_it_learns,
    ),
    "prefix of what was learned before": (
        partial(replaced, _numberless, (prefixes, "key_of")),
        follows_what_it_learns,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str) -> None:
    mutant, check = MUTANTS[name]
    assert check()
    _packed.clear()
    alone("int4", "greedy")
    with mutant():
        assert not check()
