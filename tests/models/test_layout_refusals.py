"""Document models, pages and boxes that cannot be are refused before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.load import from_weights
from everystep.errors import FormatError, RequestError
from everystep.models import build_model
from everystep.models.families import find_family
from everystep.models.load import complete_config
from tests.api.document import BOX, LAYOUT, PATCH, Document, boxes, images
from tests.models.tiny import SIZES, Tensors

PIXELS = images(1)
PROMPT = torch.tensor([[5, *[PATCH] * 4, 11, BOX, 12, BOX, 13]])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "other sizes": ({"coordinate_size": 6}, "hidden_size is impossible; wanted .* = 36; got 32"),
    "half a patch": ({"input_size": 40}, "input_size is impossible; wanted a multiple of .* 16"),
    "no patch": ({"patch_size": 0}, "patch_size is impossible; wanted a whole number"),
    "two sides": ({"patch_size": [16, 16]}, "patch_size is impossible; wanted a whole number"),
    "small tables": (
        {"max_2d_position_embeddings": 1000},
        "max_2d_position_embeddings is impossible; wanted more than 1000",
    ),
    "no patches": ({"visual_embed": False}, "visual_embed is impossible"),
    "one placeholder": ({"img_patch_id": 150000}, "img_patch_id is impossible; wanted an id other"),
    "a negative placeholder": (
        {"spatial_position_id": -1},
        "spatial_position_id is impossible; wanted a whole number of at least 0",
    ),
    "no object": ({"layout_config": [1]}, "layout_config is impossible; wanted an object"),
}
BESIDE = ("img_patch_id", "spatial_position_id", "layout_config")


@pytest.mark.parametrize("name", WRONG)
def test_a_configuration_that_cannot_be_is_refused(name: str) -> None:
    values, said = WRONG[name]
    own = {key: value for key, value in values.items() if key not in BESIDE}
    beside = {key: value for key, value in values.items() if key in BESIDE}
    config = {**SIZES, "model_type": "doclayllm", "layout_config": {**LAYOUT, **own}, **beside}
    with pytest.raises(FormatError, match=said):
        build_model(config, Tensors({}))


CHANGED: dict[str, tuple[str, Any, str]] = {
    "no projector": ("layout_projector.bias", None, "missing: layout_projector.bias"),
    "a smaller table": (
        "layout_embedder.x_position_embeddings.weight",
        lambda old: old[:1001],
        r"x_position_embeddings.* wanted \(1024, 5\); got \(1001, 5\)",
    ),
    "more patches": (
        "visual_embedder.pos_embed",
        lambda old: old.repeat(1, 2, 1),
        r"pos_embed.* wanted \(1, 5, 32\); got \(1, 10, 32\)",
    ),
    "a stranger": ("layout_embedder.z", lambda _: torch.ones(3), "no place for: layout_embedder.z"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_weights_that_do_not_fit_are_refused(name: str) -> None:
    key, change, said = CHANGED[name]
    document = Document(dtype=torch.float32)
    weights = document.weights()
    old = weights.pop(key, None)
    if change is not None:
        weights[key] = change(old)
    config = {**SIZES, "model_type": "doclayllm", "layout_config": LAYOUT}
    with pytest.raises(FormatError, match=said):
        from_weights(config, weights)


def pixels(place: tuple[int, ...], value: float) -> Tensor:
    changed = PIXELS.clone()
    changed[(0, *place)] = value
    return changed


def box(*edges: float) -> Tensor:
    return torch.tensor([[[1, 2, 3, 4], list(edges)]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> es.LanguageModel:
    return Document(tmp_path_factory.mktemp("document"), torch.float32).model


INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "beyond the page": (
        {"bbox": box(0, 0, 1001, 5)},
        r"bbox, row 0: box 1 leaves the page; wanted numbers from 0 to 1000.*\[0, 0, 1001, 5\]",
    ),
    "before the page": ({"bbox": box(-1, 0, 5, 5)}, "row 0: box 1 leaves the page"),
    "half padding": ({"bbox": box(-100, -100, -100, 3)}, "row 0: box 1 leaves the page"),
    "from right to left": (
        {"bbox": box(9, 0, 3, 5)},
        "row 0: box 1 is turned around; wanted .*left <= right",
    ),
    "from below": ({"bbox": box(0, 9, 3, 5)}, "row 0: box 1 is turned around"),
    "fractions": ({"bbox": box(0.1, 0.2, 0.3, 0.4)}, "not made of whole numbers; .*float32"),
    "of five numbers": ({"bbox": torch.ones(1, 2, 5, dtype=torch.long)}, "bbox .* shape in row 0"),
    "too few": (
        {"bbox": box(0, 0, 3, 5)[:, :1]},
        "row 0 .*bbox differ in number; wanted 2 .*got 1",
    ),
    "none": ({"bbox": None}, "row 0 .*bbox differ in number; wanted 2 .*got 0"),
    "only padding": ({"bbox": torch.full((1, 2, 4), -100)}, "row 0 .*wanted 2 .*got 0"),
    "no picture": ({"pixel_values": None}, "row 0 .*pixel_values differ in number; wanted 4"),
    "not a number": (
        {"pixel_values": pixels((1, 3, 5), float("nan"))},
        r"pixel_values, row 0: a pixel is not a finite number; .*nan at \(1, 3, 5\)",
    ),
    "endless": ({"pixel_values": pixels((0, 0, 0), float("-inf"))}, "got -inf at"),
    "bytes": (
        {"pixel_values": torch.zeros(1, 3, 32, 32, dtype=torch.uint8)},
        "a picture is not normalised; .*uint8",
    ),
    "another size": (
        {"pixel_values": torch.zeros(1, 3, 64, 64)},
        r"pixel_values has the wrong shape in row 0; wanted \(3, 32, 32\); got \(3, 64, 64\)",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_cannot_be_is_refused_before_compute(
    model: es.LanguageModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, said = INPUTS[name]

    def computes(*_: object, **__: object) -> None:
        raise AssertionError("the call reached the model")

    monkeypatch.setattr(es.LanguageModel, "executor", computes)
    with pytest.raises(RequestError, match=said):
        model.generate(PROMPT, **{"pixel_values": PIXELS, "bbox": boxes([2]), **given})


def test_a_forward_by_hand_names_ids_that_it_cannot_embed(model: es.LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"outside the vocabulary; wanted 0 to 96; got 15000"):
        model(PROMPT)


def test_the_text_model_has_the_defaults_of_llama() -> None:
    values = {"model_type": "doclayllm", "num_hidden_layers": 3}
    llama, family = find_family("llama"), find_family("doclayllm")
    config = complete_config(values)
    assert family.read_spec(config) == llama.read_spec(
        complete_config({**values, "model_type": "llama"})
    )
    shapes = {
        part.name: one.shape
        for plan in family.plan_encoders(config)
        for one in plan.parameters
        for part in one.parts
    }
    assert shapes["visual_embedder.pos_embed"] == (1, 197, 1024)
    assert shapes["visual_embedder.patch_embed.proj.weight"] == (1024, 3, 16, 16)
    assert shapes["layout_embedder.x_position_embeddings.weight"] == (1024, 171)
    assert shapes["layout_embedder.h_position_embeddings.weight"] == (1024, 170)
    assert shapes["visual_projector.weight"] == (4096, 1024)
