"""Blocks of files in the form that a model holds them in: exact, or as near as is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.errors import UnsupportedError
from everystep.executors.native import NativeExecutor, read_rows
from everystep.executors.torch_executor import TorchExecutor
from everystep.files.gguf import GgufFile, read_gguf
from everystep.files.gguf_blocks import BLOCK_TYPES, decode_blocks
from everystep.models import build_gguf_model, stored_weights
from everystep.models.gguf_weights import FLOATS, weight_of_blocks
from everystep.nn.quantized import QuantizedWeight
from everystep.types import Verb
from tests.executors.works import one_feed
from tests.files.gguf_writer import write_gguf
from tests.files.test_gguf_blocks import SCALES
from tests.models.test_gguf import converted, metadata
from tests.models.tiny import farthest, ids, reference_decoder

BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}
QUANTISED = [kind.name for kind in BY_NAME.values() if kind.decode and kind.name not in FLOATS]
HELD = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K")
EXACT = (*HELD, "IQ4_NL")
ROWS, COLUMNS = 37, 768


def random_blocks(kind: str) -> Tensor:
    """(ROWS, bytes of a row) of blocks with scales as weights have them."""
    block, rng = BY_NAME[kind], np.random.default_rng(len(kind))
    count = ROWS * COLUMNS // block.elements
    raw = rng.integers(0, 256, (count, block.nbytes), np.uint8)
    for at in SCALES.get(kind, ()):
        scales = (rng.standard_normal((count, 1)) * 0.01).astype("<f2")
        raw[:, at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(100, 130, count)
    return torch.from_numpy(raw).view(ROWS, -1)


def both(kind: str) -> tuple[QuantizedWeight, Tensor]:
    """Random blocks as a model holds them, and their exact values."""
    raw = random_blocks(kind)
    weight = weight_of_blocks(BY_NAME[kind], raw)
    assert weight is not None and weight.shape == (ROWS, COLUMNS)
    return weight, decode_blocks(BY_NAME[kind], raw.reshape(-1), torch.float32).view(ROWS, COLUMNS)


@pytest.mark.parametrize("kind", EXACT)
def test_what_fits_is_held_exactly(kind: str) -> None:
    weight, values = both(kind)
    assert weight.format == (kind.lower() if kind in HELD else "q8_0")
    assert torch.equal(weight.dequantize(), values)


@pytest.mark.parametrize("kind", sorted(set(QUANTISED) - set(EXACT)))
def test_what_does_not_fit_is_rounded_to_the_nearest_of_eight_bits(kind: str) -> None:
    weight, values = both(kind)
    assert weight.format == "q8_0"
    blocks = values.view(ROWS, -1, 32)
    # Half a step, and what the scale lost by being a float16.
    most = blocks.abs().amax(2, keepdim=True) / 127 * 0.5 * 1.01 + 127 * 2.0**-25
    assert bool(((weight.dequantize().view_as(blocks) - blocks).abs() <= most).all())


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_1"])
def test_a_scale_that_is_no_number_is_an_error(kind: str) -> None:
    raw = random_blocks(kind)
    block, at = BY_NAME[kind].nbytes, SCALES[kind][0]
    raw[3, 2 * block + at : 2 * block + at + 2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="or no number"):
        weight_of_blocks(BY_NAME[kind], raw)


# --- models ---------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "initializer_range": 0.04,
}
KEYS = {"embedding_length": 768, "feed_forward_length": 512, "rope.dimension_count": 128}


def written(path: Path) -> GgufFile:
    """As files that call themselves Q4_K_M are: a few matrices in Q6_K, norms as floats."""
    reference = reference_decoder("llama", torch.float32, **SIZES)
    finer = ("attn_v", "ffn_down", "output.", "token_embd")
    tensors = {
        name: (
            ("Q6_K" if any(part in name for part in finer) else "Q4_K")
            if values.dim() == 2
            else "F32",
            values,
        )
        for name, (_, values) in converted(reference, "llama").items()
    }
    return read_gguf(write_gguf(path / "model.gguf", metadata("llama", **KEYS), tensors))


def test_a_file_of_q4_k_m_runs_on_codes(tmp_path: Path) -> None:
    file = written(tmp_path)
    held, exact = build_gguf_model(file), build_gguf_model(file, dtype=torch.float32)
    weights = [one for _, one in stored_weights(held) if isinstance(one, QuantizedWeight)]
    assert {one.format for one in weights} == {"q4_k", "q6_k"}
    read = ids(1, 20)
    expected = exact.forward(read)
    # Activations of 8 bits cost more than what the weights lost.
    assert farthest(held.forward(read), expected) < 0.05


@pytest.mark.native
def test_it_runs_natively(tmp_path: Path) -> None:
    file = written(tmp_path)
    model = build_gguf_model(file, in_panels=lambda spec: read_rows)
    work = one_feed(ids(1, 20)[0].tolist(), verbs=(Verb("allocate", 0),))
    found = NativeExecutor(model).run(work).logits
    assert farthest(found, TorchExecutor(model).run(work).logits) < 0.02
