"""A model that runs natively holds its weights once, and gives them back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor

from everystep.api.load import from_weights
from everystep.executors.native import NativeExecutor
from everystep.executors.native.program import program_of
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, convert_model, named_weights, stored_weights
from everystep.nn.rounding import Rounding
from everystep.types import Verb
from tests.executors.models import narrow_model
from tests.executors.works import one_feed

ROUNDINGS: tuple[Rounding | None, ...] = (None, "int8", "int4")
each_model = pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])
each_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


def tensors_in(held: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object leads to."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, Tensor):
        yield held
    elif is_dataclass(held):
        for field in fields(held):
            yield from tensors_in(getattr(held, field.name), seen)
    elif isinstance(held, Mapping):
        for value in held.values():
            yield from tensors_in(value, seen)
    elif isinstance(held, (list, tuple)):
        for value in held:
            yield from tensors_in(value, seen)
    elif hasattr(held, "__dict__"):
        yield from tensors_in(vars(held), seen)


def matrix_bytes(*holders: object) -> int:
    """Bytes of all matrices that the holders lead to, each place in memory once."""
    found = [one for one in tensors_in(list(holders), set()) if one.dim() == 2]
    total, end = sum(one.nbytes for one in found if one.is_mkldnn), 0
    places = ((one.data_ptr(), one.nbytes) for one in found if not one.is_mkldnn)
    for start, size in sorted(places):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


def stored_bytes(model: Model) -> int:
    weights = (weight for _, weight in stored_weights(model) if len(weight.shape) == 2)
    return sum(w.nbytes if isinstance(w, Tensor) else w.bytes for w in weights)


@each_model
@each_rounding
def test_the_weights_are_held_once(name: str, rounding: Rounding | None) -> None:
    model = narrow_model(name, rounding, panels=True)
    NativeExecutor(model)
    program = program_of(model)
    assert program.arena.bytes == 0
    # The vocabulary of 40 rows takes whole panels, 48 rows.
    assert 0.9 * stored_bytes(model) <= matrix_bytes(model, program) <= 1.1 * stored_bytes(model)


@each_model
@each_rounding
def test_a_model_without_panels_holds_them_beside(name: str, rounding: Rounding | None) -> None:
    model = narrow_model(name, rounding)
    NativeExecutor(model)
    program = program_of(model)
    assert program.arena.bytes >= 0.9 * stored_bytes(model)
    assert matrix_bytes(model, program) >= 1.8 * stored_bytes(model)


@pytest.mark.parametrize("rounding", [None, "int8"])
def test_parts_that_are_no_whole_panels_are_packed_apart(rounding: Rounding | None) -> None:
    model = narrow_model("llama", rounding, panels=True, inner=40)
    arena = program_of(model).arena
    gates = 2 * model.spec.mlp.size * model.spec.width * len(model.spec.layers)
    assert 0 < arena.bytes < 2 * gates * (4 if rounding is None else 1)
    work = one_feed([3, 9, 30], verbs=(Verb("allocate", 0),))
    plain = narrow_model("llama", rounding, inner=40)
    assert torch.equal(*(NativeExecutor(one).run(work).logits for one in (model, plain)))


@each_model
@each_rounding
def test_panels_change_no_bit(name: str, rounding: Rounding | None) -> None:
    held, plain = (narrow_model(name, rounding, panels=panels) for panels in (True, False))
    work = one_feed([3, 9, 30, 4], verbs=(Verb("allocate", 0),))
    native = [NativeExecutor(model).run(work).logits for model in (held, plain)]
    assert torch.equal(*native)
    judged = [TorchExecutor(model).run(work).logits for model in (held, plain)]
    assert torch.allclose(*judged, atol=1e-4)


@each_model
@each_rounding
def test_weights_come_out_as_they_went_in(name: str, rounding: Rounding | None) -> None:
    held, plain = (narrow_model(name, rounding, panels=panels) for panels in (True, False))
    pairs = list(zip(named_weights(held), named_weights(plain), strict=True))
    assert pairs and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    wide = convert_model(held, dtype=torch.float64)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(wide.forward(ids), convert_model(plain, dtype=torch.float64).forward(ids))


def test_what_is_loaded_for_torch_has_no_panels() -> None:
    weights = dict(named_weights(narrow_model("llama", None)))
    config = narrow_model("llama", None, panels=True).config.to_dict()
    model = from_weights(config, weights)
    NativeExecutor(model.core)
    assert program_of(model.core).arena.bytes == 0
    # float64 has no kernels: torch operators read rows.
    wide = from_weights(config, weights, dtype=torch.float64)
    assert all(one.dtype != torch.uint8 for one in tensors_in(wide.core, set()))


def test_a_model_that_moves_nowhere_is_not_copied() -> None:
    weights = dict(named_weights(narrow_model("llama", None)))
    config = narrow_model("llama", None, panels=True).config.to_dict()
    model = from_weights(config, weights)
    before = model.core
    assert model.to("cpu").core is before
    model.to(torch.float64).to(torch.float32)
    NativeExecutor(model.core)
    assert model.core is not before and program_of(model.core).arena.bytes == 0
