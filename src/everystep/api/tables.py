"""What objects show of themselves: one line for a prompt, a small table for a notebook."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from everystep.models import Model
from everystep.models.load import named_shapes

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel

_ROWS = 100
"""Rows of a table at most."""
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "k"), (1, ""))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """An HTML table of the texts of these values, escaped; at most 100 rows of it."""
    coming = iter(rows)
    lines = [_row("td", cells) for cells in islice(coming, _ROWS)]
    if more := sum(1 for _ in coming):
        lines.append(f'<tr><td colspan="{len(head)}">{more} more</td></tr>')
    above = f"<caption>{_text(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead>{_row('th', head)}</thead><tbody>{''.join(lines)}</tbody></table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    style = ' style="text-align: left; white-space: pre-wrap"'
    return "<tr>" + "".join(f"<{tag}{style}>{_text(one)}</{tag}>" for one in cells) + "</tr>"


def _text(value: object) -> str:
    """What a cell says: numbers in five digits, nothing for None, texts cut after a page."""
    if value is None:
        return ""
    return html.escape(cut(f"{value:.5g}" if isinstance(value, float) else str(value), 4000))


def cut(text: str, most: int = 80) -> str:
    """The text, or its beginning and how much there is of it."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def counted(number: int, unit: str = "") -> str:
    """A large number in three digits: 135M."""
    size, letter = next((one for one in _UNITS if number >= one[0]), (1, ""))
    return f"{number / size:.3g}{letter}{unit}" if size > 1 else f"{number}{unit}"


def model_line(model: LanguageModel) -> str:
    """Family, parameters, bytes by format, executor, cache and context of a model."""
    core = model.core
    if isinstance(core, Model):
        shapes = (shape for _, shape in named_shapes(core))
    else:
        shapes = (tuple(one.shape) for _, one in model.named_parameters())
    number = sum(math.prod(shape) for shape in shapes)
    weights = [f"{counted(size, 'B')} {name}" for name, size in model.weight_bytes.items()]
    parts: list[Any] = [
        getattr(model.config, "model_type", "unknown family"),
        f"{counted(number)} parameters",
        " + ".join(weights),
        f"runs on {cut(model.runs_on)}",
        f"cache {model.cache_dtype}",
        f"context {model.context}" if model.context else "any context",
    ]
    name = f"{cut(model.name_or_path)!r}, " if model.name_or_path else ""
    return f"{type(model).__name__}({name}{', '.join(map(str, parts))})"
