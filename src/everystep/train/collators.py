"""Collators: a list of rows becomes a batch, under the names and arguments of transformers.

Padding is told by the attention mask and not by an id, so a pad token that is also the end token is
learned where it ends a text. Labels are padded with -100. Whatever a row brings beside its ids goes
into the batch, or is an error. A row's first label is not learned behind padding, from which
nothing could predict it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everystep.api.forward import labels_after_start
from everystep.api.model import LanguageModel
from everystep.config.kinds import is_integer, is_number, require
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.nn.loss import NO_LABEL
from everystep.requests.arrays import require as require_methods
from everystep.requests.prompts import TokenizerLike
from everystep.text.batch import FILL
from everystep.train.row import length_of, numbers_of, read_row

Values = dict[str, Tensor]

_FILLS = {name: one for name, one in FILL.items() if isinstance(one, int)}
_PATCHES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
"""Keys whose rows follow one another in a batch: patches of pictures, and how many there are."""
_NO_BOX = -100
_LONGEST = 1 << 30
_OF_MASKS = (
    "whole_word_mask",
    "mlm_probability",
    "mask_replace_prob",
    "random_replace_prob",
    "seed",
)
_NO_MASKS = "Models that guess masked words are not here; pass mlm=False"


@dataclass(frozen=True)
class DataCollatorWithPadding:
    """The collator that pads rows to one length, and labels with -100 beside them.

    `padding`: True or "longest" for the longest row of the batch, "max_length" for `max_length`,
    False for rows that are equally long. The side is the tokenizer's `padding_side`.
    """

    tokenizer: TokenizerLike
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        _require_padding(self)

    def __call__(self, features: Sequence[Mapping[str, object]]) -> dict[str, Tensor]:
        rows = [read_row(_labelled(one), name) for name, one in _named(features)]
        return _batch(rows, self, self.padding, self.max_length)


@dataclass(frozen=True)
class DataCollatorForLanguageModeling:
    """The collator that learns the ids themselves, but for padding.

    Needs `mlm=False`: models that guess masked words are not here, so what says how words are
    masked has to be as it is. Rows are mappings or lists of ids. Labels that a row brings are kept,
    which in transformers are lost.
    """

    tokenizer: TokenizerLike
    mlm: bool = True
    whole_word_mask: bool = False
    mlm_probability: float | None = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.mlm is not False:
            got = shown(self.mlm)
            raise UnsupportedError("words are not masked here", wanted=False, got=got, do=_NO_MASKS)
        for one in fields(self):
            if one.name in _OF_MASKS and getattr(self, one.name) != one.default:
                got, what = shown(getattr(self, one.name)), f"{one.name} says how words are masked"
                raise RequestError(what, got=got, do="Leave it out")
        _require_padding(self)

    def __call__(
        self, features: Sequence[Mapping[str, object] | Sequence[int] | Tensor]
    ) -> dict[str, Tensor]:
        named = _named(features)
        whole = [one if isinstance(one, Mapping) else {"input_ids": one} for _, one in named]
        rows = [read_row(_labelled(one), name) for name, one in _named(whole)]
        for row in rows:
            if "labels" not in row and "input_ids" in row:
                row["labels"] = row["input_ids"]
                if "attention_mask" in row:
                    hidden = row["attention_mask"] == 0
                    row["labels"] = row["labels"].masked_fill(hidden, NO_LABEL)
        return _batch(rows, self, True, None)


@dataclass(frozen=True)
class DataCollatorForSeq2Seq:
    """The collator whose labels have a length of their own, as those of models with an encoder.

    `model`: one with an encoder gets `decoder_input_ids`, the labels after its start token.
    """

    tokenizer: TokenizerLike
    model: LanguageModel | None = None
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = NO_LABEL
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        _require_padding(self)
        _require_ignored("label_pad_token_id", self.label_pad_token_id)

    def __call__(self, features: Sequence[Mapping[str, object]]) -> dict[str, Tensor]:
        rows = [read_row(_labelled(one), name, aligned=False) for name, one in _named(features)]
        labels = [row.pop("labels") for row in rows if "labels" in row]
        batch = _batch(rows, self, self.padding, self.max_length)
        if not labels:
            return batch
        if len(labels) < len(rows):
            raise RequestError("some rows have labels", wanted=len(rows), got=len(labels))
        most = self.max_length if self.padding == "max_length" else None
        length = _target([len(one) for one in labels], self.padding, most, self.pad_to_multiple_of)
        side = self.tokenizer.padding_side
        batch["labels"] = torch.stack([_line(one, length, NO_LABEL, side) for one in labels])
        if self.model is not None and self.model.is_encoder_decoder:
            batch["decoder_input_ids"] = labels_after_start(batch["labels"], self.model)
        elif self.model is not None:
            batch["labels"] = _predictable(batch["labels"], batch["attention_mask"])
        return batch


@dataclass(frozen=True)
class DataCollatorWithFlattening:
    """The collator that puts all rows into one, (1, N), in which nothing is padding.

    `position_ids` begin anew with each row, by which the forward keeps rows apart. What would take
    them away, or tell other kernels where rows begin, is refused.
    """

    return_tensors: str = "pt"
    _: KW_ONLY
    return_position_ids: bool = True
    separator_id: int = NO_LABEL
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    position_ids_start: int = 0

    def __post_init__(self) -> None:
        _require_tensors(self.return_tensors)
        _require_ignored("separator_id", self.separator_id)
        if self.return_position_ids is not True:
            do = "Leave return_position_ids out"
            raise UnsupportedError("without position ids a row would see the one before", do=do)
        for name in ("return_flash_attn_kwargs", "return_seq_idx"):
            if getattr(self, name) is not False:
                do = f"Leave {name} out: position ids say where rows begin"
                raise UnsupportedError(f"no model here reads what {name} adds", do=do)
        start = self.position_ids_start
        require(is_integer(start) and start >= 0, "position_ids_start", "0 or more", start)

    def __call__(self, features: Sequence[Mapping[str, object]]) -> dict[str, Tensor]:
        rows = [(name, read_row(_labelled(one), name)) for name, one in _named(features)]
        for name, row in rows:
            _require_flat(name, row)
        ids = [row["input_ids"] for _, row in rows]
        labels = [row.get("labels", row["input_ids"]).clone() for _, row in rows]
        for one in labels:
            one[0] = NO_LABEL  # predicted from the last token of another row
        begin = self.position_ids_start
        places = [torch.arange(begin, begin + len(one)) for one in ids]
        columns = {"input_ids": ids, "labels": labels, "position_ids": places}
        return {name: torch.cat(each)[None] for name, each in columns.items()}


def default_data_collator(
    features: Sequence[Mapping[str, object]], return_tensors: str = "pt"
) -> dict[str, Tensor]:
    """Return a batch of rows whose values have equal shapes, stacked key by key.

    `label` or `label_ids` become `labels`. RequestError for a text and for shapes that differ,
    which need a collator with padding.

    Example:

        >>> rows = [{"input_ids": [1, 2], "label": 0}, {"input_ids": [3, 4], "label": 1}]
        >>> es.default_data_collator(rows)["labels"]
        tensor([0, 1])
    """
    _require_tensors(return_tensors)
    rows = [numbers_of(_labelled(one), name) for name, one in _named(features)]
    _require_equal_keys(rows)
    return {key: _stacked(key, [row[key] for row in rows]) for key in rows[0]}


# --- what is asked for ----------------------------------------------------------------------------


def _require_padding(asked: Any) -> None:
    """Refuse arguments of a collator with padding that make no sense, alone or together."""
    if asked.tokenizer is None:
        do = "Pass the tokenizer that es.load returned"
        raise RequestError("a collator with padding needs a tokenizer", got="None", do=do)
    require_methods("tokenizer", asked.tokenizer, "encode", "decode")
    _require_tensors(asked.return_tensors)
    multiple = asked.pad_to_multiple_of
    fits = multiple is None or (is_integer(multiple) and multiple > 0)
    require(fits, "pad_to_multiple_of", "a positive integer or None", multiple)
    if not hasattr(asked, "padding"):
        return
    ways = (True, False, "longest", "max_length", "do_not_pad")
    named = isinstance(asked.padding, bool | str) and asked.padding in ways
    require(named, "padding", "True, False, 'longest', 'max_length' or 'do_not_pad'", asked.padding)
    most = asked.max_length
    fits = most is None or (is_integer(most) and most > 0)
    require(fits, "max_length", "a positive integer or None", most)
    if most is not None and asked.padding != "max_length":
        do = "Pass padding='max_length' too; rows are shortened by es.DataForm(max_length=...)"
        raise RequestError("max_length alone pads nothing", got=f"padding={asked.padding!r}", do=do)
    if multiple is not None and asked.padding in (False, "do_not_pad"):
        do = "Leave one of them out"
        raise RequestError("pad_to_multiple_of without padding", got="padding=False", do=do)


def _require_tensors(kind: object) -> None:
    if kind != "pt":
        do = "Leave return_tensors out: models here read tensors of torch"
        raise UnsupportedError("other arrays are not made here", wanted="'pt'", got=kind, do=do)


def _require_ignored(name: str, value: object) -> None:
    if value != NO_LABEL:
        do = f"Leave {name} out"
        raise UnsupportedError(f"{name} is no other label", wanted=NO_LABEL, got=value, do=do)


# --- rows as they come ----------------------------------------------------------------------------


def _named(features: object) -> list[tuple[str, Any]]:
    """Return the rows of a batch, each with its name; RequestError for no rows."""
    if isinstance(features, Mapping | str) or not isinstance(features, Sequence):
        got, do = type(features).__name__, "Pass [row] for a single one"
        raise RequestError("a batch is made of a list of rows", got=got, do=do)
    if not features:
        raise RequestError("a batch has no rows", wanted="at least one", do="Pass a list of rows")
    return [(f"row {place} of the batch", one) for place, one in enumerate(features)]


def _labelled(given: object) -> object:
    """Return a row whose labels are called `labels`."""
    if not isinstance(given, Mapping):
        return given
    row = dict(given)
    for other in ("label", "label_ids"):
        if row.get(other) is not None and row.get("labels") is not None:
            do = f"Leave {other} out"
            raise RequestError(f"a row has labels and {other}", wanted="one of them", do=do)
        if row.get(other) is not None:
            row["labels"] = row.pop(other)
    return row


def _require_equal_keys(rows: Sequence[Values]) -> None:
    for place, row in enumerate(rows):
        if lacking := rows[0].keys() ^ row.keys():
            key = min(lacking)
            holder, other = (0, place) if key in rows[0] else (place, 0)
            what = f"row {holder} of the batch has {key}, and row {other} has not"
            raise RequestError(what, do=f"Give each row {key}, or none")


def _require_flat(name: str, row: Values) -> None:
    """Refuse what cannot follow the row before in one long row."""
    length = length_of(row, name)
    for key, value in row.items():
        if key in ("input_ids", "labels"):
            continue
        if key == "attention_mask" and bool((value != 0).all()):
            continue
        if key == "position_ids" and value.tolist() == list(range(length)):
            continue
        do = "Use DataCollatorWithPadding"
        if key in ("attention_mask", "position_ids"):
            do = "Leave padding out of the rows" if key == "attention_mask" else f"Leave {key} out"
        raise UnsupportedError(f"{name}: {key} cannot be flattened", do=do)
    if "input_ids" not in row:
        do = "Use DataCollatorWithPadding"
        raise UnsupportedError(f"{name}: embeddings cannot be flattened", do=do)


# --- batches --------------------------------------------------------------------------------------


def _batch(
    rows: Sequence[Values], asked: Any, padding: bool | str, most: int | None
) -> dict[str, Tensor]:
    """Return the batch of rows, padded at the tokenizer's side."""
    _require_equal_keys([{**row, "attention_mask": _seen(row)} for row in rows])
    lengths = [length_of(row, "a row") for row in rows]
    if padding == "max_length" and most is None:
        known: Any = getattr(asked.tokenizer, "model_max_length", None)
        if not is_number(known) or known > _LONGEST:
            do = "Pass max_length"
            raise RequestError("padding='max_length' without a length", got=shown(known), do=do)
        most = int(known)
    target = _target(lengths, padding, most, asked.pad_to_multiple_of)
    seen = [{**row, "attention_mask": _seen(row)} for row in rows]
    pad, side = _pad_id(asked.tokenizer), getattr(asked.tokenizer, "padding_side", "right")
    batch = {
        key: _column(key, [row[key] for row in seen], lengths, target, pad, side) for key in seen[0]
    }
    if "labels" in batch:
        batch["labels"] = _predictable(batch["labels"], batch["attention_mask"])
    return batch


def _predictable(labels: Tensor, mask: Tensor) -> Tensor:
    """Return (B, T) labels without those behind padding: nothing there could predict them."""
    before = F.pad(mask[:, :-1], (1, 0), value=1)
    return labels.masked_fill((before == 0) & (mask != 0), NO_LABEL)


def _seen(row: Values) -> Tensor:
    """Return the row's attention mask, ones where it brings none."""
    return row.get("attention_mask", torch.ones(length_of(row, "a row"), dtype=torch.int64))


def _target(
    lengths: Sequence[int], padding: bool | str, most: int | None, multiple: int | None
) -> int:
    """Return the length of a batch with rows of these lengths."""
    longest = max(lengths)
    if padding in (False, "do_not_pad") and min(lengths) < longest:
        got = f"{min(lengths)} to {longest}"
        do = "Pass padding=True"
        raise RequestError("rows of one batch differ in length", got=got, do=do)
    if padding == "max_length" and most is not None:
        if longest > most:
            do = "Shorten rows first: es.DataForm(max_length=...)"
            raise RequestError(
                "a row is longer than max_length", wanted=f"at most {int(most)}", got=longest, do=do
            )
        longest = int(most)
    return longest if multiple is None else -(-longest // multiple) * multiple


def _pad_id(tokenizer: TokenizerLike) -> int:
    """Return what stands where the mask says that nothing does: any id would do."""
    for name in ("pad_token_id", "eos_token_id"):
        found: Any = getattr(tokenizer, name, None)
        if is_integer(found):
            return int(found)
    return 0


def _column(
    key: str, values: list[Tensor], lengths: Sequence[int], target: int, pad: int, side: str
) -> Tensor:
    """Return what a batch holds under a key."""
    if key == "input_ids" or (key in _FILLS and all(one.dim() == 1 for one in values)):
        fill = pad if key == "input_ids" else _FILLS[key]
        return torch.stack([_line(one, target, fill, side) for one in values])
    if key == "position_ids":  # (length,), or (axes, length)
        return torch.stack([_line(one, target, 0, side) for one in values], dim=-2)
    if key == "inputs_embeds":
        padded = [_line(one.transpose(0, 1), target, 0, side) for one in values]
        return torch.stack(padded).transpose(1, 2)
    if key == "bbox" and all(one.dim() == 2 and one.shape[1] == 4 for one in values):
        most = max(map(len, values))
        boxes = [F.pad(one, (0, 0, 0, most - len(one)), value=_NO_BOX) for one in values]
        return torch.stack(boxes)
    if key in _PATCHES and all(one.dim() == 2 for one in values):
        return torch.cat(values)
    return _stacked(key, values)


def _line(value: Tensor, length: int, fill: int, side: str) -> Tensor:
    """Return (..., length) values with padding at a side."""
    missing = length - value.shape[-1]
    return F.pad(value, (0, missing) if side == "right" else (missing, 0), value=fill)


def _stacked(key: str, values: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(one.shape) for one in values}
    if len(shapes) > 1:
        raise RequestError(
            f"the rows of a batch differ in the shape of {key}",
            wanted="one shape, or a key that collators know how to pad",
            got=", ".join(map(str, sorted(shapes))),
            do="Make them equal, or write a collator: any callable from rows to a batch",
        )
    return torch.stack(list(values))
