"""Weights of 16 bits are held and read as they are, and computed with in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.load import from_weights
from everystep.executors.choice import encoder_of
from everystep.executors.native import NativeExecutor, obstacles, read_rows
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, build_model, named_weights
from everystep.models.load import learning_weights
from everystep.models.loader import HeldWeights
from everystep.types import Verb
from tests.executors.models import narrow_model
from tests.executors.native.test_encoder_decoders import model_of as encoder_decoder
from tests.executors.works import one_feed
from tests.files.gguf_writer import write_gguf
from tests.laws.test_native_mixes import FAMILIES
from tests.models.test_gguf import converted, metadata
from tests.models.tiny import reference_decoder

pytestmark = pytest.mark.native

TYPES = [torch.bfloat16, torch.float16]
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
ENCODER_DECODERS = ["t5", "bart", "whisper"]
IDS = [3, 9, 30, 4, 4, 17, 25, 38, 0, 11, 2, 9, 6, 21, 33, 5, 5, 7]


in_float32 = partial(narrow_model, rounding=None, panels=True)


def held_in(dtype: torch.dtype, name: str) -> tuple[Model, Model]:
    """A tiny model in panels of this type, and one of the same numbers in float32."""
    known = encoder_decoder(name) if name in ENCODER_DECODERS else in_float32(name)
    source, config = HeldWeights(dict(named_weights(known))), known.config.to_dict()
    narrow = build_model(config, source, dtype=dtype, in_panels=lambda spec: read_rows)
    matrices = {name for name, one in named_weights(narrow) if one.dtype == dtype}
    assert matrices
    values = {
        name: one.to(dtype).float() if name in matrices else one
        for name, one in source.weights.items()
    }
    return narrow, build_model(config, HeldWeights(values), in_panels=lambda spec: read_rows)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if dtype is own else pytest.mark.slow)
        for number, name in enumerate(FAMILIES)
        for own in [TYPES[number % 2]]
        for dtype in TYPES
    ],
    ids=str,
)
def test_the_kernels_read_the_numbers_themselves(name: str, dtype: torch.dtype) -> None:
    narrow, wide = held_in(dtype, name)
    assert not obstacles(narrow)
    assert (narrow.float_type, narrow.dtype, wide.float_type) == (dtype, *2 * [torch.float32])
    work = one_feed(IDS, verbs=(Verb("allocate", 0),))
    found, wanted = (NativeExecutor(one).run(work).logits for one in (narrow, wide))
    assert torch.equal(found, wanted)
    judged = TorchExecutor(narrow).run(work).logits
    assert torch.allclose(found, judged, atol=1e-4 * float(judged.abs().max()))


@each_type
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoders_and_what_looks_at_them_read_them_too(name: str, dtype: torch.dtype) -> None:
    narrow, wide = held_in(dtype, name)
    made = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 20, narrow.spec.width, generator=made)
    states = [encoder_of(one)(hidden, None) for one in (narrow, wide)]  # type: ignore[misc]
    assert torch.equal(*states)
    work = replace(one_feed(IDS, verbs=(Verb("allocate", 0),)), encoders={0: states[0][0]})
    assert torch.equal(*(NativeExecutor(one).run(work).logits for one in (narrow, wide)))


@each_type
@pytest.mark.parametrize("rows", [1, 5, 12, 33])
def test_no_bit_depends_on_how_many_rows_are_read_together(dtype: torch.dtype, rows: int) -> None:
    narrow, rng = held_in(dtype, "qwen2")[0], np.random.default_rng(rows)
    ids = rng.integers(0, 40, rows).tolist()
    whole = NativeExecutor(narrow).run(one_feed(ids, verbs=(Verb("allocate", 0),))).logits
    executor = NativeExecutor(narrow)
    for start, token in enumerate(ids):
        verbs = () if start else (Verb("allocate", 0),)
        logits = executor.run(one_feed([token], start=start, verbs=verbs)).logits
        assert torch.equal(logits[0], whole[start])


@each_type
def test_a_folder_is_held_saved_and_learns_in_its_type(dtype: torch.dtype, tmp_path: Path) -> None:
    given = dict(named_weights(in_float32("llama")))
    config = {**in_float32("llama").config, "dtype": str(dtype).removeprefix("torch.")}
    from_weights(config, given).save_pretrained(tmp_path / "one")
    model = es.load_model(tmp_path / "one")
    assert model.runs_on.startswith("native") and model.dtype == dtype
    assert model.weight_bytes.keys() == {str(dtype).removeprefix("torch."), "float32"}
    model.save_pretrained(tmp_path / "two")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]
    ids = torch.tensor([IDS])
    before = model.generate(ids, max_new_tokens=8)
    wide = es.load_model(tmp_path / "one").to(torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.generate(ids, max_new_tokens=8), before)
    # On torch operators they are computed with in their own type, as in transformers.
    judge = es.load_model(tmp_path / "one", executor="torch")
    assert judge.core.dtype == judge.dtype == dtype and judge.runs_on.startswith("torch")
    model.requires_grad_()
    plain = [one for _, one in learning_weights(model.core)]
    assert {one.dtype for one in plain} == {dtype} and all(one.requires_grad for one in plain)


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_a_gguf_file_keeps_its_type(kind: str, tmp_path: Path) -> None:
    reference = reference_decoder("llama", torch.float32)
    tensors = {
        name: (kind if values.dim() == 2 else "F32", values)
        for name, (_, values) in converted(reference, "llama").items()
    }
    file = write_gguf(tmp_path / "model.gguf", metadata("llama"), tensors)
    model, wide = es.load_model(file), es.load_model(file, dtype=torch.float32)
    assert model.dtype == {"BF16": torch.bfloat16, "F16": torch.float16}[kind]
    assert model.runs_on.startswith("native") and wide.dtype == torch.float32
    ids = torch.tensor([IDS])
    assert torch.equal(*(one.generate(ids, max_new_tokens=8) for one in (model, wide)))
    assert torch.equal(wide(ids).logits, model(ids).logits)
    assert es.load_model(file, quantize=None).dtype == torch.float32


def test_codes_stay_beside_floats_of_16_bits() -> None:
    given = held_in(torch.bfloat16, "llama")[0]
    source = HeldWeights(dict(named_weights(given)))
    rounded = build_model(given.config, source, quantize="int8", in_panels=lambda spec: read_rows)
    assert rounded.float_type == rounded.dtype == torch.float32
