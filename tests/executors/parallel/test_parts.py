"""A model in parts computes what the whole computes, whichever family it is of."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.cache.formats import Quantization
from everystep.errors import UnsupportedError
from everystep.executors.shortlists import best_of
from everystep.executors.torch_executor import TorchExecutor
from everystep.files.safetensors import open_weights
from everystep.models import Model
from everystep.models.load import build_model, own_tensors, require_split, weight_bytes
from everystep.types import Extra, Past, Scores, Verb, Work
from tests.executors.parallel.threads import Threads, ThreadSplit
from tests.executors.works import Wanderer, asking, ints, one_feed, only_verbs
from tests.parity.models import TINIES, subject

NEAR = 1e-10
SPLIT = (
    *("llama-plain", "llama-grouped-tied", "llama-biases", "llama-wide-heads", "llama-linear"),
    *("llama-yarn", "llama-llama3", "llama-longrope", "llama-dynamic"),
    *("qwen2-grouped", "qwen2-window", "mistral", "qwen3", "smollm3", "gemma2", "gemma3_text"),
    *("phi3", "starcoder2", "opt", "phi", "stablelm"),
)
WHOLE = {
    "llama-one-kv-head": "its 1 key heads cannot be shared out",
    "qwen2-tied": "its 1 key heads cannot be shared out",
    "falcon": "its 1 key heads cannot be shared out",
    "gpt_bigcode": "its 1 key heads cannot be shared out",
    "gpt_neox": "hold .*query_key_value.* transposed or interleaved",
    "gpt2": "hold .*attn.* transposed or interleaved",
    "mixtral": "its layers have experts",
    "qwen3_moe": "its layers have experts",
    "olmo2": "queries are normalised as a whole",
    **dict.fromkeys(("t5-plain", "t5-gated", "t5-one-layer"), "it is no plain decoder"),
    **dict.fromkeys(("bart", "marian", "mbart"), "it is no plain decoder"),
}


def core_of(name: str) -> Model:
    found: Model = subject(name).core
    return found


def near(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= NEAR)


def test_each_family_is_known_to_have_parts_or_none() -> None:
    assert {*SPLIT} | {*WHOLE} == {*TINIES} and not {*SPLIT} & {*WHOLE}


@pytest.mark.parametrize("name", SPLIT)
def test_logits_are_those_of_the_whole(name: str) -> None:
    """Whatever rows have gone through, with every kind of input, and what layers show of it."""
    model = core_of(name)
    threads, whole = Threads(model, 2), TorchExecutor(model)
    wanderer = Wanderer(model, np.random.default_rng(len(name)), positions=True, anywhere=False)
    seen = 0
    for _ in range(6):
        work = asking(wanderer.work(), hidden=True, layers=True, attentions=True, early=(1,))
        found, wanted = threads.run(work), whole.run(work)
        seen += len(wanted.logits)
        assert not len(wanted.logits) or near(found.logits, wanted.logits)
        for feed, own in wanted.answers.items():
            answer = found.answers[feed]
            for one, other in (
                (answer.hidden, own.hidden),
                (answer.early, own.early),
                *zip(answer.layers or (), own.layers or (), strict=True),
                *zip(answer.attentions or (), own.attentions or (), strict=True),
            ):
                assert one is not None and other is not None
                assert not other.numel() or near(one, other)
        assert threads.executors[0].audit() == whole.audit()
    assert seen > 5


@pytest.mark.parametrize("name", WHOLE)
def test_what_has_no_parts_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{WHOLE[name]}.*Load it without parallel"):
        require_split(core_of(name).config, 2)


def test_four_share_four_heads() -> None:
    model = core_of("llama-plain")
    threads, whole = Threads(model, 4), TorchExecutor(model)
    work = one_feed([3, 9, 30, 4, 4], verbs=(Verb("allocate", 0),))
    assert near(threads.run(work).logits, whole.run(work).logits)
    with pytest.raises(UnsupportedError, match=r"4 key heads cannot be shared out.*parallel=3"):
        require_split(model.config, 3)


@pytest.mark.parametrize("kept", ["int8", "float16", "codes"])
def test_rows_of_narrow_numbers_are_those_of_the_whole(kept: str) -> None:
    model = core_of("qwen3")
    how: Any = (Quantization(8, 4, 4), None) if kept == "codes" else (None, kept)
    threads, whole = Threads(model, 2, *how), TorchExecutor(model, *how)
    opened = (Verb("allocate", 0),)
    for start, ids in enumerate([[3], [9], [30], [4], [4], [17], [25], [6], [1], [11]]):
        work = one_feed(ids, start=start, verbs=opened if start == 0 else ())
        assert near(threads.run(work).logits, whole.run(work).logits)


def test_masks_of_heads_and_pasts_are_shared_out() -> None:
    model = core_of("llama-plain")
    threads, whole = Threads(model, 2), TorchExecutor(model)
    first = one_feed([3, 9, 30], verbs=(Verb("allocate", 0),))
    threads.run(first), whole.run(first)
    past = whole.export(0)
    own = threads.together(lambda number: threads.executors[number].export(0))
    each_layer = zip(*(one.layers for one in own), strict=True)
    for layer, parts in zip(past.layers, each_layer, strict=True):
        for held, each in zip(layer, zip(*parts, strict=True), strict=True):
            assert near(torch.cat(each), held)
    mask = torch.rand(4, 2, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[..., 0] = True
    again = one_feed([4, 5], row=1, start=3, verbs=(Verb("allocate", 1),))
    again = replace(again, pasts={1: past}, extras={0: Extra(mask=mask)})
    assert near(threads.run(again).logits, whole.run(again).logits)


def listed(row: Tensor, count: int) -> tuple[list[float], list[int]]:
    """The best of a row, of equals the lowest id first."""
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:count]
    return [float(row[i]) for i in order], order


def test_the_best_of_a_row_are_merged_exactly() -> None:
    """Values, ids and the logarithm of the sum, of lists of several lengths beside whole rows; and
    the whole row where it is read after all."""
    model = core_of("llama-wide-heads")  # 33 tokens: parts of unequal sizes
    threads, whole = Threads(model, 2), TorchExecutor(model)
    verbs = tuple(Verb("allocate", row) for row in range(4))
    work = Work(
        verbs,
        ints(0, 1, 2, 3),
        ints(0, 0, 0, 0),
        ints(2, 1, 1, 3),
        ints(2, 1, 1, 3),
        ints(*range(7)),
    )
    rows = whole.run(work).logits.float()
    best = replace(work, best=np.array([5, 0, 64, 1]), totals=True)
    found = threads.run(best)
    assert near(found.logits.float(), rows[2:3])
    lists = found.best
    assert isinstance(lists, Scores) and lists.tokens is not None and lists.rest is not None
    assert lists.totals is not None and lists.read is not None
    for place, (row, count) in enumerate([(0, 5), (1, 5), (3, 33), (4, 1), (5, 1), (6, 1)]):
        values, tokens = listed(rows[row], count)
        assert lists.tokens[place, :count].tolist() == tokens
        assert lists.values[place, :count].tolist() == pytest.approx(values, abs=1e-6)
        assert (lists.values[place, count:] == -math.inf).all()
        assert float(lists.rest[place, 0]) == pytest.approx(values[-1], abs=1e-6)
        wanted = float(torch.logsumexp(rows[row], 0))
        assert float(lists.totals[place]) == pytest.approx(wanted, abs=1e-5)
    read = lists.read(torch.tensor([4, 0]))
    assert near(read.float(), rows[[5, 0]])


def test_of_equals_the_lowest_id_comes_first() -> None:
    rows = torch.tensor([[1.0, 3, 3, 3, 0], [0, 0, 0, 0, 0], [2, math.nan, 1, 2, math.nan]])
    values, places = best_of(rows.clone(), 2)
    assert places.tolist() == [[1, 2], [0, 1], [1, 4]]
    assert values[0].tolist() == [3, 3]


def test_a_process_has_about_half_of_weights_and_rows() -> None:
    model = core_of("llama-llama3")
    threads, whole = Threads(model, 2), TorchExecutor(model)
    every = sum(weight_bytes(model).values())
    for part in threads.parts:
        held_here = {one.untyped_storage() for one in own_tensors(part)}
        assert sum(one.nbytes() for one in held_here) <= 0.6 * every
    work = one_feed(list(range(30)), verbs=(Verb("allocate", 0),))
    threads.run(work), whole.run(work)

    def held(past: Past) -> int:
        return sum(one.nbytes for layer in past.layers for one in layer)

    for one in threads.executors:
        assert held(one.export(0)) == held(whole.export(0)) // 2
        tails = [bank.tails.layer(0) for bank in one.cache.banks]
        every_tail = [bank.tails.layer(0) for bank in whole.cache.banks]
        assert sum(t.nbytes for t in tails) <= 0.6 * sum(t.nbytes for t in every_tail)
    threads.run(only_verbs(Verb("free", 0)))


@pytest.mark.parametrize("name", ["llama-plain", "gemma2", "opt"])
def test_a_step_has_two_sums_in_each_layer(name: str) -> None:
    """And one of what the tables give; parts of logits are put side by side once."""
    model = core_of(name)
    threads = Threads(model, 2)
    for width in (1, 5):  # whatever is fed
        threads.table.sums = threads.table.joins = 0
        threads.run(one_feed([3] * width, row=width, verbs=(Verb("allocate", width),)))
        layers = len(model.spec.layers)
        assert threads.table.sums == threads.count * (2 * layers + 1)
        assert threads.table.joins == threads.count


def test_a_part_reads_its_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = subject("llama-llama3")
    model.save_pretrained(tmp_path)
    source, read = open_weights(tmp_path), list[tuple[str, int]]()
    load, rows = source.load, source.load_rows
    monkeypatch.setattr(source, "load", lambda name, *a: read.append((name, 0)) or load(name, *a))
    monkeypatch.setattr(
        source, "load_rows", lambda name, *a: read.append((name, a[1] - a[0])) or rows(name, *a)
    )
    split = ThreadSplit(1, 2, None)  # type: ignore[arg-type]
    part = build_model(model.config, source, dtype=torch.float64, split=split)
    whole = {name for name, count in read if not count}
    assert {name for name in whole if "proj" in name} == {
        f"model.layers.{layer}.{one}.weight"
        for layer in range(len(part.spec.layers))
        for one in ("self_attn.o_proj", "mlp.down_proj")
    }
    assert not [name for name in whole if "embed" in name or "lm_head" in name]
    q = dict(read)["model.layers.0.self_attn.q_proj.weight"]
    assert q == source.shape("model.layers.0.self_attn.q_proj.weight")[0] // 2
