"""From images and frames to the patches that a tower reads, and a tokenizer that takes them."""

from __future__ import annotations

from everystep.images.picture_settings import PictureSettings, read_picture_settings
from everystep.images.tokenizer import PictureTokenizer, ScaledImage

__all__ = ["PictureSettings", "PictureTokenizer", "ScaledImage", "read_picture_settings"]
