"""Which part of each parameter a process has, where several compute a decoder together.

Maps whose outputs are heads, or the inside of an MLP, lie in parts by rows, and those that read
them by columns; the table and the head by rows, which are the vocabulary. Norms are whole on each.
The plan follows from the specification and from how the parameters lie; a model without one is
refused before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from everystep.errors import UnsupportedError, shown
from everystep.models.loader import TensorSource, WeightLoader, load_rows
from everystep.models.parameters import Parameter, ParameterPart
from everystep.models.spec import DecoderSpec
from everystep.nn.split import Split

_BY_ROWS = re.compile(r"layers\.\d+\.(qkv|up)\.(weight|bias)|embed|head\.(weight|bias)")
_BY_COLUMNS = re.compile(r"layers\.\d+\.(out|down)\.weight")
_ONCE = re.compile(r"layers\.\d+\.(out|down)\.bias")
_VOCABULARY = ("embed", "head.weight", "head.bias")

Range = tuple[int, int]
"""The first of some rows or columns, and the one after the last."""


@dataclass(frozen=True)
class Cut:
    """The parts of a tensor that a process has: `ranges` of its rows, or of its columns."""

    by_rows: bool
    ranges: tuple[Range, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what is left of this one."""
        size = sum(end - first for first, end in self.ranges)
        return (size, *whole[1:]) if self.by_rows else (*whole[:-1], size)


@dataclass(frozen=True)
class SplitSource:
    """A source of which a process reads its parts alone; `cuts`: by name, the others whole."""

    source: TensorSource
    cuts: Mapping[str, Cut]

    def names(self) -> Iterable[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        whole = self.source.shape(name)
        return self.cuts[name].shape(whole) if name in self.cuts else whole

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        cut = self.cuts.get(name)
        if cut is None:
            return self.source.load(name, dtype)
        if cut.by_rows:
            parts = [load_rows(self.source, name, *one, dtype) for one in cut.ranges]
        else:
            whole = self.source.load(name, dtype)
            parts = [whole[..., first:end] for first, end in cut.ranges]
        return torch.cat(parts) if cut.by_rows else torch.cat(parts, dim=-1)


def refuse_split(
    model_type: str, spec: Any, parameters: Iterable[Parameter], count: int, *, beside: bool
) -> None:
    """Raise UnsupportedError unless so many processes can compute a model together.

    `beside`: whether encoders belong to it.
    """
    why = _obstacle(spec, parameters, count, beside=beside)
    if why is not None:
        raise UnsupportedError(
            f"a model of type {model_type} does not lie in parts on {count} processes: {why}",
            wanted="a decoder of the Llama shape, whose key heads are shared out evenly",
            got=f"parallel={count}",
            do="Load it without parallel",
        )


def _obstacle(
    spec: Any, parameters: Iterable[Parameter], count: int, *, beside: bool
) -> str | None:
    if not isinstance(spec, DecoderSpec):
        return "it is no plain decoder"
    if beside or spec.vision is not None or spec.deepstack:
        return "it has encoders beside the decoder"
    if any(layer.experts is not None for layer in spec.layers):
        return "its layers have experts"
    attention = spec.attention
    if attention.qk_norm == "whole":
        return "queries are normalised as a whole, which no process has"
    if attention.kv_heads % count:
        return f"its {attention.kv_heads} key heads cannot be shared out"
    if min(spec.mlp.size, spec.vocab_size) < count:
        return "it is too small"
    for one in parameters:
        shared = _BY_ROWS.fullmatch(one.key) or _BY_COLUMNS.fullmatch(one.key)
        if shared and any(part.transposed or part.interleaved for part in one.parts):
            return f"its checkpoints hold {shown(one.parts[0].name)} transposed or interleaved"
    return None


def split_loader(loader: WeightLoader, spec: DecoderSpec, split: Split) -> WeightLoader:
    """Return the loader of a process's part."""
    found: dict[str, Parameter] = {}
    cuts: dict[str, Cut] = {}
    for key, one in loader.parameters.items():
        if _ONCE.fullmatch(key):  # what is added once is added by the first
            if split.is_first:
                found[key] = one
        elif _BY_ROWS.fullmatch(key):
            found[key] = _by_rows(one, own_rows(key, spec, split), cuts)
        elif _BY_COLUMNS.fullmatch(key):
            first, end = own_columns(key, spec, split)
            found[key] = replace(one, shape=(one.shape[0], end - first))
            cuts |= {part.name: Cut(False, ((first, end),)) for part in one.parts}
        else:
            found[key] = one
    source = SplitSource(loader.source, cuts)
    return replace(loader, parameters=found, source=source, split=split)


def own_rows(key: str, spec: DecoderSpec, split: Split) -> list[Range]:
    """Return the rows of a map by rows that a process has, in the network's order."""
    if key in _VOCABULARY:
        return [split.own(spec.vocab_size)]
    if ".qkv." in key:
        attention, size = spec.attention, spec.attention.head_dim
        kinds = [attention.heads, attention.kv_heads, attention.kv_heads]
    else:
        kinds, size = [spec.mlp.size] * (1 + spec.mlp.gated), 1
    found, before = [], 0
    for kind in kinds:
        first, end = split.own(kind)
        found.append((before + first * size, before + end * size))
        before += kind * size
    return found


def own_columns(key: str, spec: DecoderSpec, split: Split) -> Range:
    """Return the columns of a map by columns that a process has."""
    if ".out." in key:
        first, end = split.own(spec.attention.heads)
        return first * spec.attention.head_dim, end * spec.attention.head_dim
    return split.own(spec.mlp.size)


def within(ranges: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """Return what ranges have of the rows from `start` to `stop`, counted from `start`."""
    found = ((max(first, start), min(end, stop)) for first, end in ranges)
    return tuple((first - start, end - start) for first, end in found if first < end)


def _by_rows(one: Parameter, ranges: Sequence[Range], cuts: dict[str, Cut]) -> Parameter:
    parts: list[ParameterPart] = []
    size = 0
    for part in one.parts:
        own = within(ranges, part.start, part.stop)
        count = sum(end - first for first, end in own)
        parts.append(replace(part, start=size, stop=size + count))
        cuts[part.name] = Cut(True, own)
        size += count
    return replace(one, shape=(size, *one.shape[1:]), parts=tuple(parts))
