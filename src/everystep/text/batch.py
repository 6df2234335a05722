"""What a tokenizer call returns, and the shaping of its rows: truncation, padding, tensors.

Rows are plain lists until the very end, so nothing is shared with the tokenizer and a call is
safe in any thread.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from everystep.errors import RequestError, UnsupportedError, shown
from everystep.memory import require_memory

Side = Literal["left", "right"]
Columns = dict[str, list[list[Any]]]

# What a padded position holds, column by column; input_ids take the pad token instead.
FILL: dict[str, Any] = {
    "attention_mask": 0,
    "token_type_ids": 0,
    "special_tokens_mask": 1,
    "assistant_masks": 0,
    "offset_mapping": (0, 0),
    "labels": -100,
}


class BatchEncoding(UserDict[str, Any]):
    """The columns of an encoded batch: a mapping that also answers to attributes and `**`.

    `tensor_type`: "pt" or "np" makes tensors or arrays of what is none yet, with one dimension more
    in front if `prepend_batch_axis`. `n_sequences`: how many texts a row was made of, if known.
    `encoding` is refused: which token came from which word is given by `return_offsets_mapping`.
    Source: `BatchEncoding`.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | None = None,
        encoding: None = None,
        tensor_type: str | None = None,
        prepend_batch_axis: bool = False,
        n_sequences: int | None = None,
    ) -> None:
        if encoding is not None:
            raise UnsupportedError(
                "encoding is of the tokenizers library, whose maps are not kept here",
                got=type(encoding).__name__,
                do="Leave it out, and call the tokenizer with return_offsets_mapping=True",
            )
        given: object = data
        if given is not None and not isinstance(given, Mapping):
            wanted = "a mapping of names to columns"
            raise RequestError("this is no encoding", wanted=wanted, got=shown(given))
        super().__init__(data)
        self.n_sequences = n_sequences
        if tensor_type is not None:
            for name, value in self.data.items():
                given = [value] if prepend_batch_axis else value
                self.data[name] = _as_tensor(name, given, tensor_type)

    def __getattr__(self, name: str) -> Any:
        # Pickle and copy ask for attributes before `data` exists.
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(f"The encoding has no {name}; it has {', '.join(data) or 'nothing'}.")

    def __repr__(self) -> str:
        return f"BatchEncoding({self.data!r})"

    def to(self, device: str | torch.device | int, *, non_blocking: bool = False) -> BatchEncoding:
        """Moves every tensor to `device` and returns the encoding itself."""
        try:
            torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            wanted = "'cpu', 'cuda', 'cuda:1' or a torch.device"
            raise RequestError("device is no device", wanted=wanted, got=shown(device)) from error
        for name, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[name] = value.to(device, non_blocking=non_blocking)
        return self


@dataclass(frozen=True)
class Padding:
    """A rule that makes rows equally long: up to `length`, or to the longest if it is None."""

    pad_id: int
    side: Side
    length: int | None = None
    multiple: int = 1

    def __call__(self, columns: Columns) -> Columns:
        """Pad every row of the columns."""
        length = max([self.length or 0, *map(len, columns["input_ids"])])
        length += -length % self.multiple
        # A list has 8 bytes per entry.
        needed = 8 * length * len(columns) * len(columns["input_ids"])
        require_memory(needed, "padding", "Pad to fewer tokens, or fewer texts at once")
        fill = {**FILL, "input_ids": self.pad_id}
        return {
            name: [self._padded(row, length, fill.get(name, 0)) for row in rows]
            for name, rows in columns.items()
        }

    def _padded(self, row: list[Any], length: int, fill: Any) -> list[Any]:
        filling = [fill] * (length - len(row))
        return filling + row if self.side == "left" else row + filling


@dataclass(frozen=True)
class Truncation:
    """A rule that cuts rows to `length`, with the text that gives tokens up and the side."""

    length: int
    side: Side
    strategy: Literal["longest_first", "only_first", "only_second"] = "longest_first"

    def kept(self, sequence_ids: Sequence[int | None]) -> list[int]:
        """Return the positions of a row too long that stay; those of special tokens (None) always
        do."""
        excess = len(sequence_ids) - self.length
        members = [[i for i, s in enumerate(sequence_ids) if s == which] for which in (0, 1)]
        dropped: set[int] = set()
        for positions, count in zip(members, self._shares(excess, *map(len, members)), strict=True):
            dropped.update(positions[:count] if self.side == "left" else positions[::-1][:count])
        return [i for i in range(len(sequence_ids)) if i not in dropped]

    def _shares(self, excess: int, first: int, second: int) -> tuple[int, int]:
        """Return the number of tokens that each of the two texts gives up."""
        if self.strategy == "longest_first":
            return _shorten_longest(excess, first, second)
        length = first if self.strategy == "only_first" else second
        if excess > length:
            raise RequestError(
                f"{self.strategy} truncation cannot reach max_length={self.length}",
                wanted=f"at least {excess} tokens to drop from that text",
                got=length,
                do="Raise max_length or use truncation='longest_first'",
            )
        return (excess, 0) if self.strategy == "only_first" else (0, excess)


def _shorten_longest(excess: int, first: int, second: int) -> tuple[int, int]:
    """Shares for two texts: the longer shrinks to the other's length, then both alike.

    Of an odd rest the longer text keeps one token more, the second if both are equally long, as
    in the `tokenizers` library.
    """
    total = first + second - excess
    if total < 0:
        raise RequestError(
            "max_length leaves no room for the special tokens",
            wanted=f"at least {-total} more",
            do="Raise max_length or pass add_special_tokens=False",
        )
    shorter = min(first, second, total // 2)
    longer = total - shorter
    kept = (shorter, longer) if first <= second else (longer, shorter)
    return first - kept[0], second - kept[1]


def _require_kind(argument: str, kind: str) -> None:
    if not isinstance(kind, str) or kind not in ("pt", "np"):
        raise RequestError(f"{argument} is unknown", wanted="'pt' or 'np'", got=shown(kind))


def _as_tensor(name: str, value: Any, kind: str) -> Any:
    """Return the column as a tensor ("pt") or array ("np") of the type that its numbers have."""
    _require_kind("tensor_type", kind)
    if isinstance(value, torch.Tensor if kind == "pt" else np.ndarray):
        return value
    try:
        empty = np.size(value) == 0
        if kind == "np":
            return np.array(value, dtype=np.int64 if empty else None)
        return torch.tensor(value, dtype=torch.int64 if empty else None)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise RequestError(
            f"{name} does not fit into one tensor",
            wanted="rows of equal lengths",
            do="Call the tokenizer with padding=True",
        ) from error


def shaped(columns: Columns, single: bool, return_tensors: str | None) -> BatchEncoding:
    """Return the encoding that a call returns: int64 tensors or arrays, lists, or the only row's
    lists."""
    if return_tensors is None:
        return BatchEncoding({name: rows[0] if single else rows for name, rows in columns.items()})
    _require_kind("return_tensors", return_tensors)
    lengths = {len(row) for row in columns["input_ids"]}
    if len(lengths) > 1:
        raise RequestError(
            "Rows of different lengths do not fit into one tensor",
            wanted="equal lengths",
            got=f"{min(lengths)} to {max(lengths)} tokens",
            do="Pass padding=True",
        )
    return BatchEncoding(columns, tensor_type=return_tensors)
