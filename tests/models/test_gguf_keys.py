"""Every key of a GGUF file is read, changes nothing, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from everystep.errors import EverystepError, FormatError, UnsupportedError
from everystep.files.gguf import GgufFile, read_gguf
from everystep.models.gguf import gguf_config
from everystep.models.gguf_architectures import ARCHITECTURES, IDLE
from tests.files.gguf_writer import write_gguf

# What a converter writes, with scaling whose keys all matter.
BASE: dict[str, object] = {
    "block_count": 4,
    "context_length": 64,
    "embedding_length": 48,
    "feed_forward_length": 80,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.sliding_window": 8,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
}
WINDOWED = ("gemma2", "gemma3", "phi3", "starcoder2")
OLD_NAMES = ("rope.scale_linear",)  # read by llama.cpp, written by nothing today


def declared(keys: type = gguf.Keys) -> Iterator[str]:
    """Yield what the keys of the `gguf` package are for an architecture, without its prefix."""
    for name, value in vars(keys).items():
        if isinstance(value, type):
            yield from declared(value)
        elif not name.startswith("_") and str(value).startswith("{arch}."):
            yield str(value).removeprefix("{arch}.").format(dense="dense_2", bid=0, id=0)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tensors = {"token_embd.weight": ("F32", torch.ones(12, 48))}
    return read_gguf(write_gguf(path, {"general.architecture": "llama"}, tensors))


def config(file: GgufFile, architecture: str, **keys: object) -> dict[str, Any]:
    values = {**BASE, **keys}
    if architecture not in WINDOWED:
        values = {**values, "attention.sliding_window": keys.get("attention.sliding_window", 0)}
    own = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    return gguf_config(replace(file, metadata={"general.architecture": architecture, **own}))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_declared_key_is_read_or_refused_or_changes_nothing(
    file: GgufFile, architecture: str
) -> None:
    plain = config(file, architecture)
    keys = [*declared(), *OLD_NAMES]
    assert len(keys) > 90
    for key in keys:
        telling = "linear" if key == "rope.scaling.type" else 3
        try:
            found = config(file, architecture, **{key: telling})
        except EverystepError as error:
            # A size that no longer fits its neighbour is an error that names the neighbour.
            assert f"{architecture}.{key}" in str(error), key
        else:
            assert (found == plain) == (key in IDLE), key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 1.0),
        ("attn_logit_softcapping", 1.0),
        ("attention.clamp_kqv", 1.0),
        ("expert_count", 1),
        ("attention.causal", False),
        ("rope.scaling.yarn_attn_factor", 1.5),
        ("rope.freq_base_swa", 500.0),
        ("attention.value_length", 16),
        ("sparkle_length", 0),
    ],
)
def test_what_changes_numbers_and_is_not_read_is_refused(
    file: GgufFile, key: str, value: object
) -> None:
    with pytest.raises(UnsupportedError, match=rf"llama\.{key}"):
        config(file, "llama", **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 0),
        ("expert_used_count", 0),
        ("attention.causal", True),
        ("logit_scale", 1.0),
        ("rope.scaling.yarn_ext_factor", 1.0),
        ("rope.freq_base_swa", 10000.0),
        ("attention.value_length", 8),
        ("attention.key_length_swa", 8),
    ],
)
def test_what_says_the_usual_changes_nothing(file: GgufFile, key: str, value: object) -> None:
    assert config(file, "llama", **{key: value}) == config(file, "llama")


def test_a_misspelled_key_is_answered_with_the_nearest(file: GgufFile) -> None:
    with pytest.raises(UnsupportedError, match=r"If rope\.freq_base was meant"):
        config(file, "qwen2", **{"rope.freq_bas": 500.0})


def test_two_names_of_a_factor_agree(file: GgufFile) -> None:
    same = config(file, "qwen2", **{"rope.scale_linear": 2.0})
    assert same == config(file, "qwen2")
    with pytest.raises(FormatError, match=r"qwen2\.rope\.scale_linear"):
        config(file, "qwen2", **{"rope.scale_linear": 4.0})


def test_scaling_of_type_none_scales_nothing(file: GgufFile) -> None:
    assert "rope_scaling" not in config(file, "qwen2", **{"rope.scaling.type": "none"})


@pytest.mark.parametrize("kind", ["none", "linear", "longrope"])
def test_what_a_scaling_cannot_say_is_refused(file: GgufFile, kind: str) -> None:
    keys = {"rope.scaling.type": kind, "rope.scaling.attn_factor": 1.5}
    with pytest.raises(UnsupportedError, match=r"attn_factor|longrope"):
        config(file, "qwen2", **keys)


@pytest.mark.parametrize(
    "key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"]
)
def test_an_array_of_equal_numbers_is_the_number(file: GgufFile, key: str) -> None:
    value: Any = BASE[key]
    assert config(file, "llama", **{key: [value] * 4}) == config(file, "llama")
    with pytest.raises(UnsupportedError, match=rf"equal numbers in llama\.{key}"):
        config(file, "llama", **{key: [value] * 3 + [value + 1]})
    with pytest.raises(FormatError, match=rf"llama\.{key}.*each of 4 layers"):
        config(file, "llama", **{key: [value] * 3})


@pytest.mark.parametrize(
    ("pattern", "full"),
    [(2, [1, 3]), (4, [3]), (0, []), (1, [0, 1, 2, 3]), ([True, False, False, True], [1, 2])],
)
def test_gemmas_pattern_of_windows(file: GgufFile, pattern: object, full: list[int]) -> None:
    found = config(file, "gemma3", **{"attention.sliding_window_pattern": pattern})
    kinds = found["layer_types"]
    assert [index for index, kind in enumerate(kinds) if kind == "full_attention"] == full
    with pytest.raises(FormatError, match="sliding_window_pattern"):
        config(file, "gemma3", **{"attention.sliding_window_pattern": [True]})


def test_the_file_is_named(file: GgufFile, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=str(file.path)):
        config(file, "llama", **{"attention.head_count": [6]})
