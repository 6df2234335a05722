"""No bit of an output depends on preemption, chunks, batch or order of arrival, natively.

A thousand random mixes for the default model's first layers, in float32, in its file's codes and in
int8, and for a tiny Llama; two hundred for a tiny model of every other family, which share its
code. Every law is asked of each mix, and the logits of its prompts are compared bit for bit, alone
and whole against together and in pieces. A hundred more for each, with keys and values in float16
and in int8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.cache.formats import CacheDtype
from everystep.executors.native import NativeExecutor, read_rows
from everystep.files.gguf import read_gguf
from everystep.files.sources import DEFAULT_MODEL, resolve_source
from everystep.models import Model, build_gguf_model, build_model, stored_weights
from everystep.models.families import MODULES
from everystep.nn.linear import Rows
from everystep.nn.quantized import QuantizedWeight
from everystep.nn.rounding import Rounding
from everystep.types import Verb, Work
from tests.executors.members import members
from tests.executors.models import narrow_model
from tests.judges.laws import Laws
from tests.judges.mixes import random_mix
from tests.laws.test_executors import for_decoder, without_positions

pytestmark = pytest.mark.native

MIXES, FEWER, NARROW, BLOCK = 1_000, 200, 100, 50
LAYERS, VOCABULARY = 4, 40
# What the native executor runs; the text of those that read pictures is another's.
DECODERS = sorted(
    kind for kind, file in MODULES.items() if file.startswith("decoders.") and "_vl" not in kind
)
FAMILIES = [*DECODERS, "mamba"]
# Between them they have windows, caps, learned positions, norms of all kinds and experts.
DIFFERENT = ("gemma2", "gpt2", "olmo2", "qwen3_moe")
BLOCKS = [
    (kind, first)
    for kind in ("default", *FAMILIES)
    for first in range(0, MIXES if kind in ("default", "llama") else FEWER, BLOCK)
]

Fed = dict[int, list[int]]
"""Row -> tokens."""


class _Cut:
    """The first layers of a model, and as much of its table as mixes have tokens."""

    def __init__(self, model: Model) -> None:
        self._weights = {
            name: _first_rows(weight) if "embed_tokens" in name else weight
            for name, weight in stored_weights(model)
            if ".layers." not in name or int(name.split(".")[2]) < LAYERS
        }

    def names(self) -> list[str]:
        return list(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._weights[name].shape)

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        weight = self._weights[name]
        return (weight.dequantize() if isinstance(weight, QuantizedWeight) else weight).to(dtype)

    def quantised(self, name: str) -> QuantizedWeight | None:
        weight = self._weights[name]
        return weight if isinstance(weight, QuantizedWeight) else None


def _first_rows(weight: Rows) -> Rows:
    return weight[:VOCABULARY] if isinstance(weight, Tensor) else weight.slice(0, VOCABULARY)


@cache
def default_model(kind: str) -> Model:
    """Its first layers: "float32", in "codes" of the file, or "int8"."""
    whole = build_gguf_model(read_gguf(resolve_source(DEFAULT_MODEL, offline=True)))
    source, sizes = _Cut(whole), {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    rounding: Rounding | None = "int8" if kind == "int8" else None
    return build_model(
        {**whole.config.to_dict(), **sizes},
        source,
        quantize=rounding,
        kept=source.quantised if kind == "codes" else None,
        in_panels=lambda spec: read_rows,
    )


def models_of(subject: str) -> list[Model]:
    """What a subject's mixes run on in turn."""
    if subject == "default":
        return [default_model(kind) for kind in ("codes", "float32", "int8")]
    roundings: tuple[Rounding | None, ...] = (None, "int8", "int4")
    rounded = [narrow_model(subject, rounding, panels=True) for rounding in roundings]
    return [*rounded, narrow_model(subject, None, panels=True, floats=torch.bfloat16)]


Opens = Callable[[], NativeExecutor]
"""A fresh executor on one model."""


def feed(executor: NativeExecutor, verbs: tuple[Verb, ...], fed: Fed) -> Tensor:
    """Logits of tokens that are fed to rows, (N, V)."""
    held = executor.audit()
    counts = np.array([len(ids) for ids in fed.values()])
    starts = np.array([held.get(row, 0) for row in fed])
    tokens = np.array([token for ids in fed.values() for token in ids])
    return executor.run(Work(verbs, np.array([*fed]), starts, counts, counts, tokens)).logits


def in_pieces(
    ids: dict[int, list[int]], rng: np.random.Generator
) -> Iterator[dict[int, list[int]]]:
    """What is fed step by step: pieces of any length of some rows, in any order."""
    left = {row: list(tokens) for row, tokens in ids.items()}
    while left:
        chosen = rng.permutation(sorted(left))[: rng.integers(1, len(left) + 1)].tolist()
        piece = {row: left[row][: rng.integers(1, 25)] for row in chosen}
        yield piece
        for row, tokens in piece.items():
            left[row] = left[row][len(tokens) :]
        left = {row: tokens for row, tokens in left.items() if tokens}


def check_bits(opened: Opens, seed: int) -> int:
    """The logits of some rows, together in pieces and alone at once, are the same bits.

    Returns how many logits were compared.
    """
    rng = np.random.default_rng([seed, 7])
    rows = range(int(rng.integers(2, 9)))
    ids = {row: rng.integers(0, VOCABULARY, rng.integers(1, 70)).tolist() for row in rows}
    together, found = opened(), {row: [] for row in rows}
    verbs = tuple(Verb("allocate", row) for row in rows)
    for piece in in_pieces(ids, rng):
        logits = feed(together, verbs, piece).split([len(tokens) for tokens in piece.values()])
        verbs = ()
        for row, part in zip(piece, logits, strict=True):
            found[row].append(part)
    for row in rows:
        alone = feed(opened(), (Verb("allocate", 0),), {0: ids[row]})
        assert torch.equal(torch.cat(found[row]), alone), (seed, row)
    return sum(map(len, ids.values())) * VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first"),
    [pytest.param(*one, marks=pytest.mark.model if one[0] == "default" else ()) for one in BLOCKS],
)
def test_every_model_keeps_every_bit(
    kind: str, first: int, record_property: Callable[[str, object], None]
) -> None:
    check(kind, range(first, first + BLOCK), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
@pytest.mark.parametrize("first", range(0, NARROW, BLOCK))
@pytest.mark.parametrize("subject", [pytest.param("default", marks=pytest.mark.model), *DECODERS])
def test_narrow_rows_keep_every_bit(
    subject: str,
    first: int,
    cache_dtype: CacheDtype,
    record_property: Callable[[str, object], None],
) -> None:
    check(subject, range(first, first + BLOCK), record_property, cache_dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_some_mixes_keep_every_bit(
    family: str, record_property: Callable[[str, object], None]
) -> None:
    check(family, range(5), record_property)


@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
@pytest.mark.parametrize("family", DIFFERENT)
def test_some_mixes_keep_every_bit_of_narrow_rows(
    family: str, cache_dtype: CacheDtype, record_property: Callable[[str, object], None]
) -> None:
    check(family, range(3), record_property, cache_dtype)


def open_executor(model: Model, cache_dtype: CacheDtype | None, threads: int) -> NativeExecutor:
    with members(threads):
        return NativeExecutor(model, cache_dtype)


def check(
    subject: str,
    seeds: range,
    record_property: Callable[[str, object], None],
    cache_dtype: CacheDtype | None = None,
) -> None:
    """The laws and the bits of these mixes, on the subject's models in turn."""
    models, compared, total = models_of(subject), 0, Counter()
    for seed in seeds:
        model = models[seed % len(models)]
        # With another thread the executor runs ahead.
        opened = partial(open_executor, model, cache_dtype, 2 if seed % 5 == 4 else 1)
        laws = Laws(lambda mix, max_rows, opened=opened: opened())
        mix = for_decoder(random_mix(seed), model.spec.width)
        laws.check(mix if model.has_positions else without_positions(mix))
        total.update(laws.coverage)
        compared += check_bits(opened, seed)
    record_property("coverage", {**total, "logits compared": compared})
    print(f"{subject}: {dict(total)}, {compared} logits compared")
    assert total["mixes"] == len(seeds)
    assert min(total["forwards"], total["chunk_feeds"], compared) > 0
