"""Blocks of files with codes of 4, 5 and 6 bits are multiplied as they lie, exactly."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.executors.native import NativeExecutor, read_rows
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, build_model, stored_weights
from everystep.models.loader import HeldWeights
from everystep.nn.linear import Rows
from everystep.nn.quantized import BLOCK, SUPER_BLOCK, Format, QuantizedWeight, packed_codes
from everystep.types import Verb
from tests.executors.models import CONFIG, family_model
from tests.executors.native.test_experts import fed
from tests.executors.works import one_feed

pytestmark = pytest.mark.native
BITS: dict[Format, int] = {"q5_0": 5, "q4_k": 4, "q5_k": 5, "q6_k": 6}
each_format = pytest.mark.parametrize("format", BITS)
SIZES = {
    **CONFIG,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "head_dim": 32,
}


def blocks(format: Format, codes: Tensor, small: int | None = None) -> QuantizedWeight:
    """A weight with these codes whose values are some hundredths around zero.

    `small`: the scales within all super-blocks, random ones without it.
    """
    rows, columns = codes.shape
    made, bits = torch.Generator().manual_seed(rows), BITS[format]
    packed = packed_codes(codes, bits - 4)
    step = 0.2 / (1 << bits)
    if format == "q5_0":
        scales = step * (0.5 + torch.rand(rows, columns // BLOCK, generator=made))
        return QuantizedWeight(format, packed, scales.half())
    supers = (rows, columns // SUPER_BLOCK)
    if format == "q6_k":
        scales = torch.randint(-128, 128, (rows, columns // 16), generator=made).to(torch.int8)
        wide = torch.full(supers, step / 64).half()
        scales = scales if small is None else torch.full_like(scales, small)
        return QuantizedWeight(format, packed, scales, super_scales=wide)
    scales = torch.randint(0, 64, (rows, columns // BLOCK), generator=made).to(torch.uint8)
    scales = scales if small is None else torch.full_like(scales, small)
    middle = ((1 << bits) - 1) / 2
    wide = torch.cat([torch.full(supers, step / 32), torch.full(supers, middle * step / 32)], 1)
    return QuantizedWeight(format, packed, scales, scales.clone(), wide.half())


@cache
def model_of(format: Format) -> Model:
    """A tiny model all of whose matrices are such blocks."""
    dice = torch.Generator().manual_seed(BITS[format])
    plain = family_model("llama", **SIZES)
    weights: dict[str, Rows] = {}
    for name, one in stored_weights(plain):
        weights[name] = one
        if len(one.shape) == 2:
            codes = torch.randint(0, 1 << BITS[format], one.shape, generator=dice)
            weights[name] = blocks(format, codes.to(torch.uint8))
    held = HeldWeights(weights)
    return build_model(
        {"model_type": "llama", **SIZES},
        held,
        kept=held.quantised,
        in_panels=lambda spec: read_rows,
    )


@each_format
def test_they_are_multiplied_as_they_are_defined(format: Format) -> None:
    model, rng = model_of(format), np.random.default_rng(1)
    native, judge, far = NativeExecutor(model), TorchExecutor(model), []
    for row in range(12):
        ids = rng.integers(0, 40, int(rng.integers(1, 12))).tolist()
        work = one_feed(ids, row=row, verbs=(Verb("allocate", row),))
        found, wanted = native.run(work).logits, judge.run(work).logits
        far += [float((found - wanted).abs().max() / wanted.abs().max())]
    # An activation at a rounding boundary may go either way where sums differ in their last bit.
    assert np.median(far) < 2e-5 and max(far) < 0.05


@each_format
@pytest.mark.parametrize("sizes", [[33], [1] * 33, [6, 2, 13, 12], [4, 29]], ids=str)
def test_no_bit_depends_on_how_many_rows_are_read_together(
    format: Format, sizes: list[int]
) -> None:
    model, ids = model_of(format), np.random.default_rng(2).integers(0, 40, 33).tolist()
    whole = fed(NativeExecutor(model), ids, [33])
    assert torch.equal(fed(NativeExecutor(model), ids, sizes), whole[: sum(sizes)])


@each_format
@pytest.mark.parametrize(
    "rows", [1, 13, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 4, 6, 8, 12))]
)
def test_the_largest_codes_do_not_overflow(format: Format, rows: int) -> None:
    most = (1 << BITS[format]) - 1
    weights: dict[str, Rows] = {
        name: torch.zeros(one.shape) for name, one in stored_weights(family_model("llama", **SIZES))
    }
    weights["model.embed_tokens.weight"] = torch.ones(40, 256)
    weights["model.norm.weight"] = torch.ones(256)
    dice = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 2, (40, 256), generator=dice).to(torch.uint8) * most
    codes[0], codes[1] = most, 0
    head = blocks(format, codes, small=-128 if format == "q6_k" else 63)
    weights["lm_head.weight"] = head
    held = HeldWeights(weights)
    model = build_model(
        {"model_type": "llama", **SIZES},
        held,
        kept=held.quantised,
        in_panels=lambda spec: read_rows,
    )
    work = one_feed([3] * rows, verbs=(Verb("allocate", 0),))
    wanted = head.dequantize().sum(1).expand(rows, -1)
    found = NativeExecutor(model).run(work).logits
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-4)
