"""An example page, drawn: a small invoice, with the lines that a reader of it would recognise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, MARGIN = 400, 560, 24
TEXTS = ("ACME Paper Ltd", "Invoice 0042", "Pens 3 4.50", "Paper 2 9.00", "Total 13.50")


def drawn_page() -> tuple[Image.Image, list[dict[str, Any]]]:
    """The picture, and its lines with boxes in pixels."""
    page = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw, font, lines = ImageDraw.Draw(page), ImageFont.load_default(), []
    for number, text in enumerate(TEXTS):
        place = (MARGIN + 40 * (number % 3), MARGIN + 90 * number)
        draw.text(place, text, fill="black", font=font)
        lines.append(
            {"text": text, "box": [int(edge) for edge in draw.textbbox(place, text, font)]}
        )
    return page, lines


def write_page(folder: Path, **beside: Any) -> tuple[Path, Path]:
    """The paths of the picture and of its lines."""
    page, lines = drawn_page()
    picture, listed = folder / "page.png", folder / "lines.json"
    page.save(picture)
    listed.write_text(json.dumps({"lines": lines, **beside}))
    return picture, listed
