"""Sizes, frames and times are those of transformers' processors, as worked examples say."""

from __future__ import annotations

import pytest

from everystep.errors import RequestError
from everystep.images.sizes import image_size, sampled_frames, times_of, video_size

IMAGES = [
    ((480, 640), (480, 640)),
    ((224, 224), (256, 256)),
    ((100, 100), (256, 256)),
    ((33, 1000), (64, 1440)),
    ((1080, 1920), (1088, 1920)),
    ((5000, 7000), (3456, 4832)),
    ((48, 80), (224, 352)),
    ((16, 2000), (32, 2880)),
]
VIDEOS = [
    ((8, 360, 640), (224, 416)),
    ((64, 720, 1280), (64, 128)),
    ((4, 64, 64), (192, 192)),
]


@pytest.mark.parametrize(("given", "expected"), IMAGES)
def test_images(given: tuple[int, int], expected: tuple[int, int]) -> None:
    assert image_size(*given, 32, 65536, 16777216) == expected


@pytest.mark.parametrize(("given", "expected"), VIDEOS)
def test_videos(given: tuple[int, int, int], expected: tuple[int, int]) -> None:
    assert video_size(*given, 2, 32, 131072, 786432) == expected


def test_frames_and_their_times() -> None:
    assert sampled_frames(100, 25, 2) == [0, 14, 28, 42, 57, 71, 85, 99]
    assert sampled_frames(10, 30, 2) == [0, 3, 6, 9]
    assert sampled_frames(3, 30, 2) == [0, 1, 2]
    told = [f"{at:.1f}" for at in times_of([0, 12, 24, 36, 48], 24, 2)]
    assert told == ["0.2", "1.2", "2.0"]


@pytest.mark.parametrize("size", [(10, 2001), (0, 5), (5, 0)])
def test_impossible_forms(size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="impossible form"):
        image_size(*size, 32, 65536, 16777216)
    with pytest.raises(RequestError, match="too few frames"):
        video_size(1, *size, 2, 32, 131072, 786432)
