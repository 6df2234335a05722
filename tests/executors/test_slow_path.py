"""A model that gets torch operators though nobody asked for them says so, with what helps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.load import from_weights
from everystep.executors.native import library
from everystep.models import named_weights
from tests.executors.models import narrow_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = narrow_model("llama", None, panels=True)
    from_weights(model.config, dict(named_weights(model))).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def warned(folder: Path, **choices: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        es.load_model(folder, **choices)
    assert all(one.filename == __file__ for one in found)
    return [str(one.message) for one in found]


@pytest.mark.native
def test_a_model_with_kernels_says_nothing(folder: Path) -> None:
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
        assert warned(folder, dtype=dtype) == []
    assert warned(folder, quantize="int8") == []


def test_what_was_asked_for_is_no_news(folder: Path) -> None:
    assert warned(folder, dtype=torch.float64) == warned(folder, executor="torch") == []


def test_without_kernels_it_says_how_to_get_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "library_path", lambda name: Path("nowhere"))
    library.status.cache_clear()
    try:
        (text,) = warned(folder)
        assert warned(folder, executor="torch") == []
    finally:
        library.status.cache_clear()
    assert text.startswith("tiny runs on torch operators, several times slower")
    assert "python -m everystep.executors.native" in text


@pytest.mark.native
def test_a_type_from_the_configuration_without_kernels(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"float64"'))
    (text,) = warned(folder)
    assert "float64" in text and text.endswith("Load it with dtype=torch.float32")
