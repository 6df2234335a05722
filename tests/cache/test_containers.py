"""Cache objects do what transformers' do, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config
from transformers import cache_utils as theirs

import everystep as es
from everystep.cache import layers
from everystep.errors import RequestError, UnsupportedError

LLAMA = LlamaConfig(num_hidden_layers=2)
SLIDING = Qwen2Config(
    num_hidden_layers=3, use_sliding_window=True, sliding_window=4, max_window_layers=1
)

WINDOWS = MistralConfig(num_hidden_layers=3, sliding_window=4)  # names no kinds of layers


def states(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, count, 4, generator=generator) for _ in range(2))


def feed(cache: Any, counts: tuple[int, ...], number: int) -> list[tuple[Tensor, Tensor]]:
    """Updates every layer with so many positions at a time; what the updates returned."""
    out = []
    for step, count in enumerate(counts):
        for layer in range(number):
            keys, values = cache.update(*states(count, 10 * step + layer), layer)
            out.append((keys.clone(), values.clone()))
    return out


def same(ours: Any, reference: Any, number: int) -> None:
    assert len(ours) == len(reference) == number
    for layer in range(number):
        assert ours.get_seq_length(layer) == int(reference.get_seq_length(layer))
        assert ours.get_max_length(layer) == reference.get_max_length(layer)
        for mine, other in zip(list(ours)[layer], _layer(reference, layer), strict=True):
            assert (mine is None and other is None) or torch.equal(mine, other)


def _layer(cache: Any, layer: int) -> tuple[Any, ...]:
    if isinstance(cache, theirs.DynamicCache):
        return list(cache)[layer]
    return cache.layers[layer].keys, cache.layers[layer].values, None


MAKERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "lazy": (lambda lib: lib.DynamicCache(), 2),
    "dynamic": (lambda lib: lib.DynamicCache(config=LLAMA), 2),
    "sliding": (lambda lib: lib.DynamicCache(config=SLIDING), 3),
    "all sliding": (lambda lib: lib.DynamicCache(config=WINDOWS), 3),
    "static": (lambda lib: lib.StaticCache(LLAMA, max_cache_len=12), 2),
    "static sliding": (lambda lib: lib.StaticCache(SLIDING, max_cache_len=12), 3),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("counts", [(3,), (2, 1, 1, 1, 1), (6, 1, 1), (1, 5, 2)], ids=str)
def test_updates_return_and_hold_what_the_reference_does(kind: str, counts: Any) -> None:
    make, number = MAKERS[kind]
    ours, reference = make(es), make(theirs)
    got, wanted = feed(ours, counts, number), feed(reference, counts, number)
    for mine, other in zip(got, wanted, strict=True):
        assert torch.equal(mine[0], other[0]) and torch.equal(mine[1], other[1])
    same(ours, reference, number)
    assert ours.is_sliding == reference.is_sliding
    assert ours.is_compileable == reference.is_compileable
    assert ours.is_croppable == reference.is_croppable
    assert (ours.batch_size, ours.is_initialized) == (2, True)


@pytest.mark.parametrize("kind", ["lazy", "dynamic", "sliding"])
def test_rows_and_positions_move_as_in_the_reference(kind: str) -> None:
    make, number = MAKERS[kind]
    ours, reference = make(es), make(theirs)
    for cache in (ours, reference):
        cache.activate_past_recording()
        feed(cache, (3, 4), number)
        cache.crop(-2)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 1]))
        cache.batch_select_indices(torch.tensor([0, 3, 2]))
    same(ours, reference, number)
    ours.reset()
    assert ours.get_seq_length() == 0 and not ours.is_initialized


def test_static_rows_move_and_are_emptied_in_place() -> None:
    ours, reference = (MAKERS["static"][0](lib) for lib in (es, theirs))
    for cache in (ours, reference):
        feed(cache, (3,), 2)
        cache.reorder_cache(torch.tensor([1, 0]))
    same(ours, reference, 2)
    room = ours.layers[0].keys
    ours.reset()
    assert ours.layers[0].keys is room and not room.any()


def test_an_encoder_decoder_cache_is_two_caches() -> None:
    made = []
    for lib in (es, theirs):
        own, across = lib.DynamicCache(), lib.DynamicCache()
        feed(own, (3,), 2)
        feed(across, (5,), 2)
        cache = lib.EncoderDecoderCache(own, across)
        cache.crop(-1)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([2, 1, 0, 0]))
        made.append(cache)
    for mine, other in zip(*made, strict=True):
        tensors = zip(mine, other, strict=True)
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in tensors)
    assert made[0].is_updated == made[1].is_updated == {0: True, 1: True}
    assert (len(made[0]), made[0].get_seq_length()) == (2, 2)


def test_legacy_tuples_convert_both_ways() -> None:
    cache = es.DynamicCache()
    feed(cache, (3,), 2)
    legacy = cache.to_legacy_cache()
    again = es.DynamicCache.from_legacy_cache(legacy)
    assert all(map(torch.equal, again[1], legacy[1]))
    pair = es.EncoderDecoderCache.from_legacy_cache([(*one, *one) for one in legacy])
    assert [len(one) for one in pair.to_legacy_cache()] == [4, 4]
    assert torch.equal(pair.to_legacy_cache()[0][2], legacy[0][0])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_cache_is_near_and_small(bits: int) -> None:
    cache = es.QuantizedCache("everystep", LLAMA, nbits=bits, q_group_size=32, residual_length=16)
    keys = torch.randn(1, 2, 400, 64) * torch.linspace(0.1, 10, 64)
    values = torch.randn(1, 2, 400, 64)
    for start in range(0, 400, 25):
        cache.update(keys[..., start : start + 25, :], values[..., start : start + 25, :], 0)
    layer = cache.layers[0]
    assert isinstance(layer, layers.QuantizedLayer)
    assert cache.get_seq_length() == 400
    assert 16 <= layer.keys.shape[-2] < 16 + 32
    stored = layer.whole()
    assert torch.equal(stored[0][..., -16:, :], keys[..., -16:, :])
    half_step = (keys.amax(-2) - keys.amin(-2)) / (2**bits - 1) / 2
    assert ((stored[0] - keys).abs() <= half_step[..., None, :] * 1.001).all()
    per_position = layer.stored_bytes / 400
    full = 2 * 2 * 64 * 4
    assert per_position < full * {4: 0.27, 8: 0.39}[bits]


def test_quantised_rows_move_and_positions_go_back() -> None:
    cache = es.QuantizedCache("everystep", LLAMA, nbits=8, q_group_size=4, residual_length=2)
    cache.update(*states(13), 0)
    before = cache.layers[0].whole()
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-6)
    after = cache.layers[0].whole()
    assert cache.get_seq_length() == after[0].shape[-2] == 7
    assert torch.equal(after[0], before[0].flip(0)[..., :7, :])
    assert torch.equal(after[1], before[1].flip(0)[..., :7, :])
    cache.update(*states(6, 1), 0)
    assert cache.layers[0].whole()[0].shape[-2] == 13


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "offloading": (lambda: es.DynamicCache(offloading=True), UnsupportedError, "offloaded"),
    "offloaded": (lambda: es.OffloadedCache(), UnsupportedError, "offloaded"),
    "2 bits": (lambda: es.QuantizedCache("everystep", LLAMA, nbits=2), RequestError, "8 or 4"),
    "backend": (lambda: es.QuantizedCache("hqq", LLAMA), RequestError, "backend"),
    "axis": (lambda: es.QuantizedCache("everystep", LLAMA, axis_key=0), RequestError, "axis_key"),
    "windows": (lambda: es.QuantizedCache("everystep", SLIDING), UnsupportedError, "windows"),
    "no room": (lambda: es.StaticCache(LLAMA, max_cache_len=0), RequestError, "max_cache_len"),
    "too long": (lambda: feed(es.StaticCache(LLAMA, 4), (5,), 1), RequestError, "too small"),
    "static crop": (lambda: es.StaticCache(LLAMA, 4).crop(-1), UnsupportedError, "cropped"),
    "old crop": (lambda: es.DynamicCache([states(4)]).crop(3), RequestError, "negative"),
    "no layers": (lambda: es.Cache(), RequestError, "neither"),
    "three halves": (lambda: es.EncoderDecoderCache(1, 2, 3), RequestError, "two halves"),
}


@pytest.mark.parametrize("name", WRONG)
def test_impossible_calls_are_errors_that_say_why(name: str) -> None:
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("count", [4, 6])
def test_a_window_that_was_left_cannot_be_entered_again(count: int) -> None:
    cache = es.DynamicCache(config=SLIDING)
    feed(cache, (count,), 3)
    with pytest.raises(UnsupportedError, match="left behind"):
        cache.crop(-1)


def test_a_window_that_is_not_full_goes_back() -> None:
    ours, reference = (MAKERS["sliding"][0](lib) for lib in (es, theirs))
    for cache in (ours, reference):
        feed(cache, (3,), 3)
        cache.crop(-1)
    same(ours, reference, 3)


def test_a_cache_without_layers_has_no_limit() -> None:
    assert es.DynamicCache().get_max_length() == es.DynamicCache().get_max_length(0) == -1
    assert es.StaticCache(LLAMA, 12).get_max_length() == 12


@pytest.mark.parametrize("rows", [(0, 2), [0, 2], torch.tensor([0, 2]), [True, False, True]])
def test_rows_are_chosen_by_any_list_of_them(rows: Any) -> None:
    keys = torch.randn(3, 2, 5, 4)
    cache = es.DynamicCache([(keys, -keys)])
    cache.batch_select_indices(rows)
    kept = cache.layers[0].keys
    assert kept is not None and torch.equal(kept, keys[[0, 2]])
    assert cache.batch_size == 2


@pytest.mark.parametrize("rows", [(0, 3), (-4,), "02", [[0]], [0.5], [True], None])
def test_rows_that_are_not_there_are_refused(rows: Any) -> None:
    cache = es.DynamicCache([(torch.zeros(3, 2, 5, 4), torch.zeros(3, 2, 5, 4))])
    for change in (cache.batch_select_indices, cache.reorder_cache):
        with pytest.raises(RequestError, match="no rows of the cache"):
            change(rows)


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention", "hybrid", "conv"])
def test_layers_of_other_kinds_are_refused(kind: str) -> None:
    config = SimpleNamespace(
        num_hidden_layers=2, layer_types=["full_attention", kind], sliding_window=8
    )
    for made in (lambda: es.StaticCache(config, 16), lambda: es.DynamicCache(config=config)):
        with pytest.raises(UnsupportedError, match=kind):
            made()
    with pytest.raises(UnsupportedError, match="attention_chunk_size"):
        es.StaticCache(SimpleNamespace(num_hidden_layers=2, attention_chunk_size=4), 16)
