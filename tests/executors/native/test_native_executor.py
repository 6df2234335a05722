"""The native executor gives what torch operators give, and the same bits whatever stands beside."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everystep.cache.formats import CacheDtype
from everystep.cache.pasts import past_of
from everystep.errors import InvariantError, UnsupportedError
from everystep.executors.choice import open_executor
from everystep.executors.native import NativeExecutor, obstacles
from everystep.executors.native.program import Program, program_of
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, build_model, convert_model, named_weights
from everystep.models.decoder import Decoder
from everystep.models.loader import HeldWeights
from everystep.nn.rounding import Rounding
from everystep.types import Verb, Work
from tests.executors.layout import axes_model
from tests.executors.members import members
from tests.executors.models import CONFIG, SPECS, narrow_model, random_model
from tests.executors.works import (
    Wanderer,
    answer,
    asking,
    both_hold,
    forgets,
    one_feed,
    only_verbs,
)

pytestmark = pytest.mark.native
FORMATS: tuple[Rounding | None, ...] = (None, "int8", "int4")


@cache
def model_of(name: str) -> Model:
    return random_model(SPECS[name], dtype=torch.float32)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Within 1e-5 of the largest logit."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if wanted.numel():
        assert distances(found, wanted).max() <= 1e-5


def distances(found: Tensor, wanted: Tensor) -> Tensor:
    """(R,) as shares of the largest logit."""
    return (found - wanted).abs().amax(1) / wanted.abs().max()


def compare(model: Model, seed: int, most: int, steps: int = 8, *, positions: bool = False) -> None:
    """Works with rows of any history, on both executors."""
    wanderer = Wanderer(
        model, np.random.default_rng(seed), positions, 4 * most + 20, most, not forgets(model)
    )
    native, judge = NativeExecutor(model), TorchExecutor(model)
    for _ in range(steps):
        work = wanderer.work()
        assert_near(native.run(work).logits, judge.run(work).logits)
        assert native.audit() == judge.audit()
    native.run(only_verbs(*(Verb("free", row) for row in wanderer.histories)))
    assert native.audit() == {} and native.rows.pool.in_use == 0


@pytest.mark.parametrize("name", SPECS)
def test_every_specification_is_computed(name: str) -> None:
    compare(model_of(name), seed=3, most=7)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_every_family_is_computed(name: str) -> None:
    compare(narrow_model(name, None), seed=4, most=20)


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_every_format_is_computed(name: str, rounding: Rounding) -> None:
    # An activation between two codes may go either way when sums differ in their last bit, and
    # all that follows it differs then: rare, and small.
    model, far = narrow_model(name, rounding), []
    for seed in range(60):
        tokens = np.random.default_rng(seed).integers(0, 40, 5).tolist()
        work = one_feed(tokens, verbs=(Verb("allocate", 0),))
        found, wanted = (
            NativeExecutor(model).run(work).logits,
            TorchExecutor(model).run(work).logits,
        )
        far += (distances(found, wanted) > 1e-5).tolist()
        assert distances(found, wanted).max() < 0.05
    assert sum(far) < 0.06 * len(far)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 13])
@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_the_largest_codes_do_not_overflow(rounding: Rounding, rows: int) -> None:
    """Inputs and weights that are all extremes of their codes, of one sign and of both."""
    shapes = {name: one.shape for name, one in named_weights(narrow_model("llama", None))}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"].fill_(1.0)
    tensors["model.norm.weight"].fill_(1.0)
    head = tensors["lm_head.weight"]
    head.copy_(torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], head.shape)))
    head[0], head[1] = 1.0, -1.0
    config = {**CONFIG, "model_type": "llama", "intermediate_size": 64}
    model = build_model(config, HeldWeights(tensors), dtype=torch.float32, quantize=rounding)
    work = one_feed([3] * rows, verbs=(Verb("allocate", 0),))
    wanted = dict(named_weights(model))["lm_head.weight"].sum(1).expand(rows, -1)
    found = NativeExecutor(model).run(work).logits
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_rounded_activations_move_logits_by_little(name: str, rounding: Rounding) -> None:
    model = narrow_model(name, rounding)
    exact = convert_model(model, exact_activations=True)
    tokens = np.random.default_rng(1).integers(0, 40, 60).tolist()
    work = one_feed(tokens, verbs=(Verb("allocate", 0),))
    found, wanted = NativeExecutor(model).run(work).logits, TorchExecutor(exact).run(work).logits
    off = float((found - wanted).square().mean().sqrt() / wanted.abs().max())
    assert 0 < off <= 2e-2


@pytest.mark.parametrize("most", [1, 7, 40])
@given(seed=st.integers(0, 2**32 - 1), positions=st.booleans())
@settings(max_examples=12)
def test_rows_hold_what_they_have_read(most: int, seed: int, positions: bool) -> None:
    compare(model_of("window"), seed, most, positions=positions)


def test_a_feed_longer_than_the_buffers_is_computed_in_parts() -> None:
    model = convert_model(random_model(SPECS["plain"]), dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, 40, 700).tolist()
    work = one_feed(tokens, verbs=(Verb("allocate", 0),))
    assert_near(NativeExecutor(model).run(work).logits, TorchExecutor(model).run(work).logits)


# --- the same bits ----------------------------------------------------------------------------


def alone(model: Model, tokens: list[int], sizes: list[int]) -> Tensor:
    """(T, V) logits of a row that is fed in pieces of the given sizes."""
    executor, start, logits = NativeExecutor(model), 0, []
    for size in sizes:
        verbs = (Verb("allocate", 0),) if start == 0 else ()
        piece = tokens[start : start + size]
        logits.append(executor.run(one_feed(piece, start=start, verbs=verbs)).logits)
        start += size
    return torch.cat(logits)


@pytest.mark.parametrize("rounding", FORMATS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_no_bit_depends_on_how_many_tokens_are_fed_at_once(
    rounding: Rounding | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 40, 45).tolist()
    cuts = np.sort(rng.choice(np.arange(1, 45), rng.integers(0, 12), replace=False))
    sizes = np.diff([0, *cuts, 45]).tolist()
    model = narrow_model("llama", rounding)
    assert torch.equal(alone(model, tokens, sizes), alone(model, tokens, [45]))


@pytest.mark.parametrize("rounding", FORMATS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_no_bit_depends_on_rows_beside_or_on_shared_pages(
    rounding: Rounding | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model, rows = narrow_model("qwen2", rounding), int(rng.integers(2, 14))
    shared = rng.integers(0, 40, int(rng.integers(1, 40)))
    own = [rng.integers(0, 40, int(rng.integers(1, 25))) for _ in range(rows)]
    executor = NativeExecutor(model)
    executor.run(one_feed(shared.tolist(), verbs=(Verb("allocate", 0),)))
    forks = tuple(Verb("fork", row, 0) for row in range(1, rows))
    counts = np.array([len(x) for x in own])
    work = Work(
        forks, np.arange(rows), np.full(rows, len(shared)), counts, counts, np.concatenate(own)
    )
    found = executor.run(work).logits.split(counts.tolist())
    for tokens, logits in zip(own, found, strict=True):
        whole = [*shared.tolist(), *tokens.tolist()]
        assert torch.equal(logits, alone(model, whole, [len(whole)])[len(shared) :])


@pytest.mark.parametrize("threads", [1, 3])
def test_no_bit_depends_on_the_number_of_threads(threads: int) -> None:
    model, tokens = narrow_model("llama", "int8"), list(range(30))
    wanted = alone(model, tokens, [30])
    with members(threads):
        assert torch.equal(alone(model, tokens, [20, 10]), wanted)


@pytest.mark.parametrize("name", ["plain", "window", "capped scores"])
@pytest.mark.parametrize("threads", [1, 3])
def test_no_bit_depends_on_who_attends_to_which_span(name: str, threads: int) -> None:
    model, tokens = model_of(name), np.random.default_rng(1).integers(0, 40, 205).tolist()
    with members(threads):
        # Single tokens share the spans of their row among threads; a prompt's queries do not.
        found = alone(model, tokens, [60, *[1] * 10, 115, *[1] * 20])
    assert torch.equal(found, alone(model, tokens, [205]))


# --- pages ------------------------------------------------------------------------------------


def test_a_prompt_is_stored_once_whoever_continues_it() -> None:
    executor = NativeExecutor(model_of("plain"))
    executor.run(one_feed(list(range(40)), verbs=(Verb("allocate", 0),)))
    forks = tuple(Verb("fork", row, 0) for row in range(1, 8))
    rows = np.arange(8)
    ones = np.ones(8, dtype=np.int64)
    executor.run(Work(forks, rows, 40 * ones, ones, ones, rows))
    # Two whole pages of 16 are shared; the third, half full, is each row's own but for one.
    assert executor.rows.pool.in_use == 2 + 8 and executor.rows.pool.counts.copies == 7


def test_forks_write_nothing_into_each_other() -> None:
    model = model_of("plain")
    executor = NativeExecutor(model)
    executor.run(one_feed([3, 9, 30], verbs=(Verb("allocate", 0),)))
    executor.run(one_feed([5], row=1, start=3, verbs=(Verb("fork", 1, 0),)))
    found = executor.run(one_feed([7], row=0, start=3)).logits
    assert torch.equal(found[0], alone(model, [3, 9, 30, 7], [4])[-1])


# --- what it cannot do --------------------------------------------------------------------------


def test_what_it_cannot_do_goes_to_torch() -> None:
    assert isinstance(open_executor(model_of("plain")), NativeExecutor)
    assert isinstance(open_executor(model_of("plain"), "torch"), TorchExecutor)
    assert isinstance(open_executor(model_of("plain"), "auto", {"mask"}), TorchExecutor)
    wide = convert_model(model_of("plain"), dtype=torch.float64)
    assert isinstance(open_executor(wide), TorchExecutor)


@pytest.mark.parametrize("needs", [{"mask"}, {"encoder"}])
def test_asking_for_more_than_it_can_is_an_error(needs: set[str]) -> None:
    with pytest.raises(UnsupportedError, match=f"it has no {next(iter(needs))}"):
        open_executor(model_of("plain"), "native", needs)


def test_a_type_without_kernels_is_an_obstacle() -> None:
    wide = convert_model(model_of("plain"), dtype=torch.float64)
    assert "float64" in obstacles(wide)[0]
    with pytest.raises(UnsupportedError, match="float64"):
        NativeExecutor(wide)


def test_hidden_states_are_the_last_ones_normalised() -> None:
    model = model_of("plain")
    work = one_feed([3, 9, 30], verbs=(Verb("allocate", 0),))
    follow = one_feed([4, 5], row=1, start=3, verbs=(Verb("fork", 1, 0),))
    native, judge = NativeExecutor(model), TorchExecutor(model)
    for one in (asking(work, hidden=True), asking(follow, hidden=True)):
        assert_near(answer(native.run(one)).hidden, answer(judge.run(one)).hidden)


@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_of_three_axes(interleaved: bool) -> None:
    model = axes_model(interleaved, torch.float32)
    places = torch.tensor([[0, 1, 1, 1, 4], [0, 1, 1, 2, 4], [0, 1, 2, 1, 4]])
    first = asking(one_feed([3, 9, 30, 7, 8], verbs=(Verb("allocate", 0),)), positions=places)
    more = asking(one_feed([4, 5], start=5), positions=torch.tensor([[5, 6]]).expand(3, -1))
    native, judge = NativeExecutor(model), TorchExecutor(model)
    for work in (first, more, one_feed([6], start=7)):
        assert_near(native.run(work).logits, judge.run(work).logits)


def test_a_row_begins_with_what_another_held() -> None:
    model, tokens = (
        model_of("window"),
        [3, 9, 30, 4, 4, 17, 25, 6, 1, 39, 12, 8, 22, 5, 2, 3, 11, 20],
    )
    native, judge = NativeExecutor(model), TorchExecutor(model)
    for one in (native, judge):
        one.run(one_feed(tokens, verbs=(Verb("allocate", 0),)))
    past = judge.export(0)
    assert both_hold(native.export(0), past, atol=1e-5)
    follow = replace(
        one_feed([7, 8], row=1, start=len(tokens), verbs=(Verb("allocate", 1),)), pasts={1: past}
    )
    wanted = judge.run(one_feed([7, 8], row=0, start=len(tokens))).logits
    assert_near(NativeExecutor(model).run(follow).logits, wanted)


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
def test_what_an_executor_leaves_in_memory_reaches_no_other(cache_dtype: CacheDtype) -> None:
    """Memory of pages is used again."""
    model, tokens = random_model(SPECS["plain"], dtype=torch.float32), [5, 6, 7, 8, 9]
    first = (Verb("allocate", 0),)
    wanted = NativeExecutor(model, cache_dtype).run(one_feed(tokens, verbs=first)).logits
    shape = program_of(model).structure
    for poison in (torch.nan, torch.inf):
        past = past_of(torch.full((shape.layers, 2, shape.kv_heads, 600, shape.head_dim), poison))
        one = NativeExecutor(model, cache_dtype)
        one.run(replace(one_feed([3], start=600, verbs=first), pasts={0: past}))
        del one
        other = NativeExecutor(model, cache_dtype)
        assert torch.equal(other.run(one_feed(tokens, verbs=first)).logits, wanted)
        for at in range(40):
            found = other.run(one_feed([7], start=len(tokens) + at)).logits
            assert bool(found.isfinite().all())


def test_ids_beyond_the_table_are_never_looked_up() -> None:
    with pytest.raises(Exception, match="beyond the vocabulary"):
        NativeExecutor(model_of("plain")).run(one_feed([40], verbs=(Verb("allocate", 0),)))


def test_a_row_is_fed_from_where_it_ends() -> None:
    executor = NativeExecutor(model_of("plain"))
    with pytest.raises(Exception, match="row 0 is fed at 3"):
        executor.run(one_feed([1], start=3, verbs=(Verb("allocate", 0),)))


def test_matrices_that_begin_within_a_panel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = narrow_model("llama", None)
    program = Program(cast(Decoder, model.network))
    up = program.structure.layer[1].dense.up
    up.count, up.parts[1] = 2, up.parts[0]
    up.parts[0].rows, up.parts[1].rows = 24, 40
    place = "everystep.executors.native.executor.program_of"
    monkeypatch.setattr(place, lambda model: program)
    with pytest.raises(InvariantError, match="not whole panels"):
        NativeExecutor(model)
    up.parts[0].rows, up.parts[1].rows = 32, 32
    NativeExecutor(model)
