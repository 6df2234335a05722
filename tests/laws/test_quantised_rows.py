"""Rows of 8 and 4 bits: chunked equals unchunked equals batch; how small they are."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.cache.formats import Quantization
from everystep.cache.pool import Segment
from everystep.draws import seed_of
from everystep.errors import RequestError
from everystep.executors.torch_executor import TorchExecutor
from everystep.testing.models import tiny_llama
from everystep.types import Verb, Work
from tests.api.test_past import MODELS

MODEL = MODELS["llama"][1]
WAYS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "top_k": 20, "seed": 3},
    {"do_sample": True, "num_return_sequences": 3, "seed": 4},
    {"num_beams": 3},
]


def settings(bits: int, group: int, residual: int) -> dict[str, Any]:
    config = {"nbits": bits, "q_group_size": group, "residual_length": residual}
    return {"cache_implementation": "quantized", "cache_config": config}


def say(ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    given = {"pad_token_id": 0, "eos_token_id": 96, "max_new_tokens": 12, **options}
    given |= {"return_dict_in_generate": True, "output_logits": "num_beams" not in options}
    return MODEL.generate(ids, attention_mask=mask, **given)


@pytest.mark.parametrize(
    "seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 40))]
)
def test_chunks_and_batches_are_invisible(seed: int) -> None:
    chance = Random(seed)
    way = chance.choice(WAYS)
    chosen = settings(chance.choice([8, 4]), chance.choice([2, 3, 4, 8]), chance.choice([0, 1, 5]))
    rows, width = chance.randint(2, 4), chance.randint(8, 40)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (rows, width), generator=draw)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : chance.randint(0, width - 1)] = 0
    batch = say(ids, mask, **way, **chosen)
    for chunk in (1, chance.randint(2, 9)):
        chunked = say(ids, mask, prefill_chunk_size=chunk, **way, **chosen)
        assert torch.equal(chunked.sequences, batch.sequences)
        for one, other in zip(chunked.logits or (), batch.logits or (), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    each = way.get("num_return_sequences", 1)
    for row in range(rows):
        own = {**way, "seed": seed_of(way["seed"], row)} if "seed" in way else way
        alone = say(ids[row : row + 1], mask[row : row + 1], **own, **chosen).sequences
        found = batch.sequences[row * each : (row + 1) * each]
        width = min(alone.shape[1], found.shape[1])
        assert torch.equal(alone[:, :width], found[:, :width])


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_what_is_computed_with(bits: int) -> None:
    ids = torch.arange(3, 43)[None]
    full = torch.stack(say(ids, min_new_tokens=12).logits)
    rounded = torch.stack(say(ids, min_new_tokens=12, **settings(bits, 4, 8)).logits)
    gap = (full[0] - rounded[0]).abs().max()
    assert 0 < gap < full[0].abs().max() * {8: 0.02, 4: 0.3}[bits]
    everything = say(ids, min_new_tokens=12, **settings(bits, 4, 100)).logits
    torch.testing.assert_close(torch.stack(everything), full, rtol=0, atol=1e-9)


def test_the_scheduler_is_invisible() -> None:
    chosen = settings(4, 4, 2)
    prompts = [list(range(5, 5 + n)) for n in (30, 3, 17, 44)]
    options = {"max_new_tokens": 8, "eos_token_id": 96, **chosen}
    told = es.generate(MODEL, None, prompts, **options)
    for tokens, prompt in zip(told, prompts, strict=True):
        ids = torch.tensor([prompt])
        alone = say(ids, max_new_tokens=8, **chosen).sequences[0, len(prompt) :]
        assert tokens == alone[: len(tokens)].tolist()


def fed(
    executor: TorchExecutor, verbs: tuple[Verb, ...], start: int, ids: Tensor, logits: int = 1
) -> Tensor:
    def one(value: int) -> Any:
        return torch.tensor([value]).numpy()

    work = Work(verbs, one(0), one(start), one(len(ids)), one(logits), ids.numpy())
    return executor.run(work).logits


@pytest.mark.parametrize(("bits", "most"), [(8, 0.34), (4, 0.22)])
def test_bytes_per_position(bits: int, most: float) -> None:
    model = tiny_llama().core
    executor = TorchExecutor(model, Quantization(bits, group=32, residual=32))
    ids = torch.arange(1000) % 40
    fed(executor, (Verb("allocate", 0),), 0, ids)
    fed(executor, (), 1000, ids[:1])
    (store,) = model.network.stores[0]
    layers, head = len(model.network.stores), store.key_dim
    full = layers * 2 * store.heads * head * model.dtype.itemsize
    row = executor.cache[0]
    assert row.length == 1001
    (part,) = row.parts
    # Only what the last feed wants may be taken back, so that all but the residual are codes.
    assert part.tail <= 32 + 32 + 1
    packed = sum(stored_bytes(link.segment) for link in part.chain)
    # Codes, and a step and a least value for each 32 positions of a key channel, and each value.
    exact = layers * store.heads * (2 * head * bits / 8 + 8 * head / 32 + 8)
    assert packed / part.base == exact
    assert (packed + part.tail * full) / row.length < most * full
    fed(executor, (Verb("fork", 1, 0), Verb("free", 0), Verb("allocate", 0)), 0, ids[:9])
    (other,) = executor.cache[1].parts
    assert other.chain[0].segment is part.chain[0].segment
    assert executor.audit() == {1: 1001, 0: 9}


def stored_bytes(segment: Segment) -> int:
    parts = [x for pair in segment.codes or () for one in pair for x in one]
    return sum(x.numel() * x.element_size() for x in parts)


@pytest.mark.parametrize("bits", [8, 4])
def test_drafts_are_taken_back_from_codes(bits: int) -> None:
    model, ids = tiny_llama().core, (torch.arange(60) * 7) % 40
    once = TorchExecutor(model, Quantization(bits, group=4, residual=2))
    twice = TorchExecutor(model, Quantization(bits, group=4, residual=2))
    fed(once, (Verb("allocate", 0),), 0, ids[:40])
    fed(once, (), 40, ids[40:41])
    wanted = fed(once, (), 41, ids[41:42])
    fed(twice, (Verb("allocate", 0),), 0, ids[:40])
    fed(twice, (), 40, torch.cat([ids[40:41], ids[50:57]]), logits=8)
    found = fed(twice, (Verb("truncate", 0, 41),), 41, ids[41:42])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_what_a_quantised_row_cannot_do_is_refused() -> None:
    ids = torch.arange(3, 20)[None]
    chosen = settings(4, 4, 2)
    with pytest.raises(RequestError, match="cache_implementation='quantized' cannot be truncated"):
        say(ids, prompt_lookup_num_tokens=3, **chosen)


def test_weights_of_quantised_rows_have_one_entry_per_position() -> None:
    ids = torch.arange(3, 20)[None]
    out = say(ids, output_attentions=True, min_new_tokens=6, **settings(4, 4, 2))
    for step, layers in enumerate(out.attentions[1:]):
        for weights in layers:
            assert weights.shape[-1] == 17 + step + 1
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
