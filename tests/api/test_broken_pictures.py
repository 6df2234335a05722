"""Pictures, grids and placeholders that do not fit together are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import Engine
from everystep.errors import EverystepError, RequestError, UnknownArgumentError
from everystep.models.vision.tower import VisionTower
from everystep.testing.models import tiny_llama
from tests.models.pictures import GREEDY, SMALL, model_of, prompt_of, reference_of


def changed(given: dict[str, Any], **values: Any) -> dict[str, Any]:
    """The inputs with other values, without those that are None."""
    return {n: v for n, v in {**given, **values}.items() if v is not None}


NAN = torch.full((SMALL.size, 96), float("nan"))
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no grids": ({"image_grid_thw": None}, "without image_grid_thw"),
    "no pixels": ({"pixel_values": None}, "differ in patches"),
    "neither": ({"pixel_values": None, "image_grid_thw": None}, "do not fit its images"),
    "a grid of zeros": ({"image_grid_thw": torch.tensor([[0, 4, 6]])}, "that no picture has"),
    "a negative grid": ({"image_grid_thw": torch.tensor([[1, -4, -6]])}, "that no picture has"),
    "an odd grid": ({"image_grid_thw": torch.tensor([[1, 3, 8]])}, "multiples of 2"),
    "a huge grid": ({"image_grid_thw": torch.tensor([[1, 1 << 40, 1 << 40]])}, "do not fit"),
    "a grid of two numbers": ({"image_grid_thw": torch.tensor([[4, 6]])}, "wrong form"),
    "a grid of fractions": ({"image_grid_thw": torch.tensor([[1.0, 4.0, 6.0]])}, "wrong form"),
    "too many grids": (
        {"image_grid_thw": torch.tensor([[1, 4, 6]] * 2)},
        "placeholders for 2 grids; got those of 1",
    ),
    "a smaller grid": ({"image_grid_thw": torch.tensor([[1, 4, 4]])}, "4 placeholders in row 0"),
    "a larger grid": ({"image_grid_thw": torch.tensor([[1, 4, 8]])}, "8 placeholders in row 0"),
    "too few patches": ({"pixel_values": torch.zeros(20, 96)}, "wanted 24 rows; got 20"),
    "patches of another size": ({"pixel_values": torch.zeros(24, 95)}, "wrong shape"),
    "a picture that is not cut": ({"pixel_values": torch.zeros(1, 3, 32, 32)}, "wrong shape"),
    "bytes": ({"pixel_values": torch.zeros(24, 96, dtype=torch.uint8)}, "wrong type"),
    "no numbers": ({"pixel_values": NAN}, "not finite"),
    "infinity": ({"pixel_values": -NAN.nan_to_num(torch.inf)}, "not finite"),
    "words": ({"pixel_values": "a cat"}, "is not a tensor"),
    "types of text": ({"mm_token_type_ids": torch.zeros(1, 11).int()}, "contradicts the ids"),
    "types of video": ({"mm_token_type_ids": torch.full((1, 11), 2)}, "contradicts the ids"),
    "types of another shape": ({"mm_token_type_ids": torch.zeros(2, 11).int()}, "wrong shape"),
    "a video's values": (
        {"pixel_values": None, "pixel_values_videos": torch.zeros(24, 96)},
        "without video_grid_thw",
    ),
    "a video nowhere": (
        {"pixel_values_videos": torch.zeros(32, 96), "video_grid_thw": torch.tensor([[2, 4, 4]])},
        "do not fit its videos",
    ),
    "seconds": ({"second_per_grid_ts": torch.tensor([1.0])}, "no effect on this model"),
    "embeddings alone": (
        {"input_ids": None, "inputs_embeds": torch.zeros(1, 11, 64)},
        "where they stand",
    ),
    "a misspelt name": ({"pixel_value": torch.zeros(24, 96)}, "pixel_values"),
    "features twice": (
        {"deepstack": torch.zeros(1, 11, 3, 64)},
        "deepstack",
    ),
}


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    return model_of(reference_of("qwen3_vl", torch.float32))


@pytest.mark.parametrize("wrong", WRONG)
def test_pictures_that_do_not_fit_are_refused_before_compute(
    tiny: LanguageModel, wrong: str, monkeypatch: Any
) -> None:
    values, text = WRONG[wrong]
    given = prompt_of([[5, SMALL, 8, 9]], dtype=torch.float32)

    def never(*_: Any) -> Any:
        raise AssertionError("something was computed")

    monkeypatch.setattr(VisionTower, "encode", never)
    monkeypatch.setattr(Engine, "step", never)
    with pytest.raises(EverystepError, match=text):
        tiny.generate(**changed(given, **values), **GREEDY)


def test_a_model_of_text_takes_no_pictures(tiny: LanguageModel) -> None:
    with pytest.raises(UnknownArgumentError):
        tiny_llama().generate(torch.tensor([[5, 6]]), image_grid_thw=torch.tensor([[1, 4, 6]]))
    with pytest.raises(RequestError, match="is taken"):
        tiny.prompt_inputs = [es.PromptInput("pixel_values", lambda x: x, (3, 8, 8), token=5)]
    with pytest.raises(UnknownArgumentError, match="knows no 'pixel_value'"):
        tiny(torch.tensor([[5, 6]]), pixel_value=torch.zeros(4, 96))
