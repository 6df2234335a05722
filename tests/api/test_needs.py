"""What cannot be held is refused before anything is computed, with both numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep import memory
from everystep.errors import CapacityError, RequestError
from everystep.memory import memory_left, require_memory
from everystep.models import build_model
from everystep.models.loader import HeldWeights
from everystep.testing.models import tiny_llama
from tests.executors.models import CONFIG

IDS = torch.arange(5, 13)[None]


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with half a gigabyte left."""
    monkeypatch.setattr(memory, "_of_system", lambda: 512 << 20)
    monkeypatch.setattr(memory, "_of_group", lambda: None)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 60_000},
        {"do_sample": True, "num_return_sequences": 60_000},
        {"num_beams": 60_000, "num_return_sequences": 60_000},
    ],
    ids=str,
)
@pytest.mark.usefixtures("little")
def test_rows_that_cannot_be_held_are_refused(options: dict[str, Any]) -> None:
    model = tiny_llama(dtype=torch.float32, num_hidden_layers=8)
    wanted = model.generate(IDS, max_new_tokens=3)
    match = "60000 rows after 8 positions needs more memory.*wanted at most 0.5 GB; got .* GB"
    for call in (
        lambda: model.generate(IDS, max_new_tokens=3, **options),
        lambda: es.generate(model, None, [IDS[0].tolist()], max_new_tokens=3, **options),
    ):
        with pytest.raises(CapacityError, match=match):
            call()
    assert torch.equal(model.generate(IDS, max_new_tokens=3), wanted)


@pytest.mark.usefixtures("little")
def test_what_fits_is_not_refused() -> None:
    model = tiny_llama(dtype=torch.float32)
    assert model.generate(IDS, max_new_tokens=3, num_beams=50).shape == (1, 11)


@pytest.mark.usefixtures("little")
def test_a_prompt_that_cannot_be_held_is_refused() -> None:
    model = tiny_llama(dtype=torch.float32, num_hidden_layers=100)
    with pytest.raises(CapacityError, match="1 row after 200000 positions"):
        model.generate(torch.full((1, 200_000), 5), max_new_tokens=3)


@pytest.mark.usefixtures("little")
def test_a_model_that_cannot_be_held_is_refused_before_a_weight_is_read() -> None:
    class Shapes(HeldWeights):
        """Names and shapes of a table of 60 GB, and no values."""

        def __init__(self) -> None:
            super().__init__({})

        def names(self) -> list[str]:
            return ["model.embed_tokens.weight", "model.norm.weight", *_LAYER]

        def shape(self, name: str) -> tuple[int, ...]:
            return _LAYER.get(name) or ((10**9, 32) if "embed" in name else (32,))

        def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            raise AssertionError("nothing is read")

    config = {
        **CONFIG,
        "model_type": "llama",
        "vocab_size": 10**9,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    }
    with pytest.raises(CapacityError, match=r"this model needs more memory.*got 128.0 GB"):
        build_model(config, Shapes(), dtype=torch.float32)


_LAYER = {
    f"model.layers.0.{name}.weight": shape
    for name, shape in {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }.items()
}


def test_the_system_and_the_control_group_are_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4000000 kB\n")
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    assert memory_left() == 4_000_000 << 10
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("2500000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\nfile 400000000\n")
    assert memory_left() == 900_000_000
    with pytest.raises(CapacityError, match=r"a thing needs.*at most 0.9 GB; got 1.0 GB at least"):
        require_memory(10**9, "a thing", "Ask for less")
    require_memory(8 * 10**8, "a thing", "Ask for less")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_left() == 4_000_000 << 10
    (tmp_path / "meminfo").unlink()
    assert memory_left() is None
    require_memory(10**30, "a thing", "Ask for less")


@pytest.mark.parametrize("penalty", [1e300, -33.0, float("inf"), float("nan")])
def test_an_exponent_beyond_numbers_is_refused(penalty: float) -> None:
    model = tiny_llama(dtype=torch.float32)
    with pytest.raises(RequestError, match="length_penalty"):
        model.generate(IDS, num_beams=2, length_penalty=penalty, max_new_tokens=3)
    for near in (32.0, -32.0):
        assert model.generate(IDS, num_beams=2, length_penalty=near, max_new_tokens=3).numel()
