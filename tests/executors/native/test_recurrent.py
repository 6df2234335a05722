"""Recurrent layers give natively what torch operators give, and the same bits however fed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everystep.errors import InvariantError, UnsupportedError
from everystep.executors.choice import open_executor
from everystep.executors.native import NativeExecutor, obstacles
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, build_model, named_weights
from everystep.models.loader import HeldWeights
from everystep.nn.rounding import Rounding
from everystep.types import Verb, Work
from tests.executors.members import members
from tests.executors.models import CONFIG, family_model
from tests.executors.works import Wanderer, asking, ints, one_feed, only_verbs

pytestmark = pytest.mark.native
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"state_size": 4, "time_step_rank": 32},
    "odd sizes": {"state_size": 3, "conv_kernel": 2, "intermediate_size": 41, "time_step_rank": 5},
    "biases": {"use_bias": True, "use_conv_bias": False, "state_size": 16},
    "untied": {"tie_word_embeddings": False, "hidden_act": "gelu", "conv_kernel": 6},
}
FORMATS: tuple[Rounding | None, ...] = (None, "int8", "int4")
OPEN = Verb("allocate", 0)


@cache
def model_of(name: str, rounding: Rounding | None = None) -> Model:
    """A tiny model whose weights are small enough for errors not to grow from token to token."""
    config = {**CONFIG, "intermediate_size": 64, **KINDS[name]}
    drawn = dict(named_weights(family_model("mamba", **config)))
    weights = HeldWeights({key: 0.5 * one for key, one in drawn.items()})
    read = {"model_type": "mamba", **config}
    return build_model(read, weights, dtype=torch.float32, quantize=rounding)


def assert_near(found: Tensor, wanted: Tensor, share: float = 1e-5) -> None:
    """Within a share of the largest number."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if wanted.numel():
        assert (found - wanted).abs().max() <= share * wanted.abs().max()


@pytest.mark.parametrize("most", [1, 7, 30])
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_any_history(name: str, most: int) -> None:
    model = model_of(name)
    assert not obstacles(model)
    wanderer = Wanderer(model, np.random.default_rng(most), False, 4 * most + 20, most, False)
    native, judge = NativeExecutor(model), TorchExecutor(model)
    for _ in range(12):
        work = wanderer.work()
        assert_near(native.run(work).logits, judge.run(work).logits)
        assert native.audit() == judge.audit()
    native.run(only_verbs(*(Verb("free", row) for row in wanderer.histories)))
    assert native.audit() == {} and native.rows.pool.in_use == 0


@pytest.mark.parametrize("name", KINDS)
def test_what_layers_show(name: str) -> None:
    model = model_of(name)
    wanderer = Wanderer(model, np.random.default_rng(3), False, 60, 20, False)
    native, judge = NativeExecutor(model), TorchExecutor(model)
    for _ in range(5):
        asked = asking(wanderer.work(), hidden=True, layers=True, early=(0, 1))
        answers = native.run(asked).answers
        for feed, wanted in judge.run(asked).answers.items():
            found = answers[feed]
            assert found.layers is not None and wanted.layers is not None
            pairs = [(found.hidden, wanted.hidden), (found.early, wanted.early)]
            for a, b in (*pairs, *zip(found.layers, wanted.layers, strict=True)):
                assert a is not None and b is not None
                assert_near(a, b)


def alone(model: Model, tokens: list[int], sizes: list[int]) -> Tensor:
    """(T, V) logits of a row that is fed in pieces of the given sizes."""
    executor, start, logits = NativeExecutor(model), 0, []
    for size in sizes:
        verbs = (OPEN,) if start == 0 else ()
        piece = tokens[start : start + size]
        logits.append(executor.run(one_feed(piece, start=start, verbs=verbs)).logits)
        start += size
    return torch.cat(logits)


@pytest.mark.parametrize("name", ["plain", "odd sizes"])
@pytest.mark.parametrize("rounding", FORMATS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_no_bit_depends_on_how_many_tokens_are_fed_at_once(
    rounding: Rounding | None, name: str, seed: int
) -> None:
    if name == "odd sizes" and rounding == "int4":
        return  # its blocks are whole
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 40, 45).tolist()
    cuts = np.sort(rng.choice(np.arange(1, 45), rng.integers(0, 12), replace=False))
    sizes = np.diff([0, *cuts, 45]).tolist()
    model = model_of(name, rounding)
    assert torch.equal(alone(model, tokens, sizes), alone(model, tokens, [45]))


@pytest.mark.parametrize("sizes", [[700], [255, 2, 443], [300, *[1] * 9, 391]])
def test_a_feed_longer_than_the_buffers_goes_on_where_it_was(sizes: list[int]) -> None:
    """Parts of 256 tokens, the last of which may be shorter than what the convolution reads."""
    model = model_of("untied")
    tokens = np.random.default_rng(0).integers(0, 40, 700).tolist()
    found = alone(model, tokens, sizes)
    assert torch.equal(found, alone(model, tokens, [256, 256, 188]))
    work = one_feed(tokens, verbs=(OPEN,))
    assert_near(found, TorchExecutor(model).run(work).logits)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rounding", FORMATS)
def test_no_bit_depends_on_neighbours_or_threads(rounding: Rounding | None, threads: int) -> None:
    model, rng = model_of("plain", rounding), np.random.default_rng(2)
    shared = rng.integers(0, 40, 9).tolist()
    own = [rng.integers(0, 40, length) for length in (1, 260, 3, 2, 8, 1)]
    with members(threads):
        executor = NativeExecutor(model)
    executor.run(one_feed(shared, verbs=(OPEN,)))
    forks = tuple(Verb("fork", row, 0) for row in range(1, len(own)))
    counts = np.array([len(one) for one in own])
    rows, starts = np.arange(len(own)), np.full(len(own), 9)
    work = Work(forks, rows, starts, counts, counts, np.concatenate(own))
    found = executor.run(work).logits.split(counts.tolist())
    for tokens, logits in zip(own, found, strict=True):
        whole = [*shared, *tokens.tolist()]
        assert torch.equal(logits, alone(model, whole, [len(whole)])[9:])


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_rounded_weights_are_read(rounding: Rounding) -> None:
    """Activations are rounded there and here; sums differ in their last bit, and codes then may."""
    model = model_of("plain", rounding)
    work = one_feed([*range(3, 13)], verbs=(OPEN,))
    found, wanted = NativeExecutor(model).run(work).logits, TorchExecutor(model).run(work).logits
    assert_near(found, wanted, 0.05)
    off = ((found - wanted).abs().amax(1) > 1e-4 * wanted.abs().max()).float().mean()
    assert off <= 0.5


def test_forks_share_states_and_write_none_of_them() -> None:
    model = model_of("plain")
    executor = NativeExecutor(model)
    executor.run(one_feed([3, 9, 30], verbs=(OPEN,)))
    held = executor.rows.pool.in_use
    executor.run(one_feed([5], row=1, start=3, verbs=(Verb("fork", 1, 0),)))
    # The fork has states of its own now, room for its next ones, and those that it began with.
    assert executor.rows.pool.in_use == held + 2
    assert torch.equal(
        executor.run(one_feed([7], row=0, start=3)).logits[0], alone(model, [3, 9, 30, 7], [4])[-1]
    )


def test_rows_go_back_to_what_their_last_feed_wanted() -> None:
    model, ids = model_of("plain"), [3, 9, 30, 4, 17, 25]
    executor = NativeExecutor(model)
    executor.run(one_feed(ids[:2], verbs=(OPEN,)))
    executor.run(one_feed(ids[2:], start=2))
    for length in (5, 3, 2):
        executor.run(only_verbs(Verb("truncate", 0, length)))
        assert executor.audit() == {0: length}
        executor.run(replace(only_verbs(), verbs=(Verb("fork", 1, 0),)))
        found = executor.run(one_feed(ids[length:], row=1, start=length)).logits
        assert torch.equal(found, alone(model, ids, [6])[length:])
        executor.run(only_verbs(Verb("free", 1)))
    with pytest.raises(InvariantError, match="cannot be cut back"):
        executor.run(only_verbs(Verb("truncate", 0, 1)))


def test_what_a_row_holds_is_taken_over() -> None:
    model = model_of("odd sizes")
    native, judge = NativeExecutor(model), TorchExecutor(model)
    for executor in (native, judge):
        executor.run(one_feed([*range(3, 23)], verbs=(OPEN, Verb("allocate", 1))))
    found, wanted = native.export(0), judge.export(0)
    for layers in zip(found.layers, wanted.layers, strict=True):
        for one, other in zip(*layers, strict=True):
            assert_near(one, other)
    assert native.export(1).length == judge.export(1).length == 0
    follow = replace(
        one_feed([5, 6], row=2, start=20, verbs=(Verb("allocate", 2),)), pasts={2: found}
    )
    logits = native.run(one_feed([5, 6], start=20)).logits
    assert torch.equal(native.run(follow).logits, logits)
    other_way = NativeExecutor(model).run(replace(follow, pasts={2: wanted})).logits
    assert_near(other_way, logits)


def test_pages_are_checked_before_anything_is_written() -> None:
    executor = NativeExecutor(model_of("plain"))
    executor.run(one_feed([3, 4], verbs=(OPEN,)))
    rows = executor.rows
    assert not hasattr(rows, "table")
    rows._next[0] = 10**6
    with pytest.raises(InvariantError, match="does not exist"):
        executor.run(one_feed([5], start=2))


def test_after_an_interrupt_pages_are_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = NativeExecutor(model_of("plain"))
    executor.run(one_feed([3, 4, 5], verbs=(OPEN,)))

    def stop(pool: object, pages: np.ndarray) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(executor.rows.pool), "release", stop)
        with pytest.raises(KeyboardInterrupt):
            executor.run(one_feed([6], start=3))
    executor.run(only_verbs(Verb("free", 0)))
    assert executor.rows.pool.in_use == 0
    again = executor.run(one_feed([3, 4], row=1, verbs=(Verb("allocate", 1),))).logits
    assert torch.equal(again, alone(model_of("plain"), [3, 4], [2]))


@pytest.mark.parametrize("needs", [{"positions"}, {"mask"}, {"attentions"}, {"cut"}])
def test_what_states_cannot_do_is_no_ability(needs: set[str]) -> None:
    with pytest.raises(UnsupportedError, match=f"it has no {next(iter(needs))}"):
        open_executor(model_of("plain"), "native", needs)


def test_empty_rows_hold_nothing() -> None:
    executor = NativeExecutor(model_of("plain"))
    executor.run(only_verbs(OPEN, Verb("fork", 1, 0), Verb("truncate", 1, 0)))
    assert executor.audit() == {0: 0, 1: 0}
    work = Work((), ints(0, 1), ints(0, 0), ints(2, 1), ints(0, 0), ints(3, 4, 5))
    assert executor.run(work).logits.shape == (0, 40)
    assert executor.audit() == {0: 2, 1: 1}
