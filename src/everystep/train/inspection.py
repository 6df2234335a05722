"""What is trained on, looked at before the first step: shown, and refused where it cannot be meant.

A row that teaches nothing, or that teaches the wrong thing, costs a run of hours; here it costs an
error that names the example.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from everystep.api.forward import forward
from everystep.api.model import LanguageModel
from everystep.config.kinds import is_integer, require
from everystep.errors import RequestError, UnknownArgumentError, nearest, shown
from everystep.nn.loss import NO_LABEL
from everystep.requests.pictures import prompt_names
from everystep.requests.prompts import TokenizerLike
from everystep.shown import cut, table
from everystep.train.data_files import Indexed
from everystep.train.forms import TrainingRows, end_ids
from everystep.train.row import length_of, naming, prompt_of, read_row

Collator = Callable[[list[Mapping[str, object]]], Mapping[str, object]]

_BEGIN, _END = "⟦", "⟧"
_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True)
class TrainedPiece:
    """A stretch of a row's text, all of which is learned or none."""

    text: str
    is_trained: bool


@dataclass(frozen=True)
class Inspection:
    """A report of what a run would learn from its rows.

    `rows`: how many there are, and how many of their `tokens` are `trained`. `longest`: the length
    of the longest row. `batch`: the pieces of the first rows. `warnings`: what may not be meant.
    Printed, it shows each row of the batch with what is learned between ⟦ and ⟧.
    """

    rows: int
    tokens: int
    trained: int
    longest: int
    batch: tuple[tuple[TrainedPiece, ...], ...]
    warnings: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        lines = [self._summary, *(f"warning: {one}" for one in self.warnings)]
        for number, row in enumerate(self.batch):
            marked = (f"{_BEGIN}{one.text}{_END}" if one.is_trained else one.text for one in row)
            lines.append(f"example {number}: {cut(''.join(marked), _SHOWN_CHARACTERS)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        pieces = [
            (number, "learned" if one.is_trained else "read", one.text)
            for number, row in enumerate(self.batch)
            for one in row
        ]
        return table(("example", "is", "text"), pieces, self._summary)

    @property
    def _summary(self) -> str:
        share = f"{100 * self.trained / self.tokens:.0f} %"
        return (
            f"{self.rows} rows with {self.tokens} tokens, of which {self.trained} ({share}) are "
            f"learned; the longest has {self.longest}"
        )


def inspect_rows(
    rows: TrainingRows | Indexed,
    model: LanguageModel | None = None,
    tokenizer: TokenizerLike | None = None,
    *,
    eval_rows: TrainingRows | Indexed | None = None,
    collator: Collator | None = None,
    batch_size: int = 2,
    most: int | None = None,
) -> Inspection:
    """Return what a run would learn from the rows; an error where that cannot be meant.

    Looks at each row, or at the first `most`: whether anything is learned and has the length of
    its ids, whether the model knows its ids and its keys and reaches that far, and whether an end
    is learned. `eval_rows` are judged too, and compared with the rows. `collator`: its first batch
    is judged as well. `batch_size`: rows that are shown. Errors name the example by its number;
    what may be meant is a warning. UnknownArgumentError for a key that the model does not take.

    Example:

        >>> rows = es.read_rows([{"prompt": "1, 2,", "completion": " 3"}], model, tokenizer)
        >>> print(es.inspect_rows(rows, model, tokenizer))
        1 rows with 8 tokens, of which 3 (38 %) are learned; the longest has 8
        example 0: 1, 2,⟦ 3<eos>⟧
    """
    require(is_integer(batch_size) and batch_size > 0, "batch_size", "1 or more", batch_size)
    require(most is None or (is_integer(most) and most > 0), "most", "1 or more, or None", most)
    judge = _Judge.of(model, tokenizer)
    found = judge.looked_at(rows, "example", most)
    notes = list(found.warnings)
    if eval_rows is not None:
        evaluated = judge.looked_at(eval_rows, "evaluation example", most)
        notes += [f"evaluation: {one}" for one in evaluated.warnings]
        notes += _shared(found.prompts, evaluated.prompts)
    first = [rows[place] for place in range(min(batch_size, len(rows)))]
    if collator is not None:
        judge.require_batch(collator(first))  # type: ignore[arg-type]
    for one in notes:
        warnings.warn(one, stacklevel=2)
    read = [judge.row(row, f"example {place}") for place, row in enumerate(first)]
    shown_rows = tuple(tuple(_pieces(row, tokenizer)) for row in read)
    counts = found.rows, found.tokens, found.trained, found.longest
    return Inspection(*counts, batch=shown_rows, warnings=tuple(notes))


@dataclass
class _Found:
    """Counts of what was seen in rows so far."""

    rows: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    ending: int = 0
    prompts: dict[tuple[int, ...], int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Judge:
    """A measure of rows. `known`: keys that the model takes, None for any; `ends`: the ids
    that end an answer; `pad`: an id that stands for nothing, if it has no other meaning."""

    model: LanguageModel | None
    known: frozenset[str] | None
    ends: frozenset[int]
    pad: int | None

    @classmethod
    def of(cls, model: LanguageModel | None, tokenizer: TokenizerLike | None) -> _Judge:
        """Return the judge of rows for this model and tokenizer, as far as there are any."""
        ends = frozenset(end_ids(model, tokenizer))
        pad = getattr(tokenizer, "pad_token_id", None)
        meant = {*ends, getattr(tokenizer, "unk_token_id", None)}
        return cls(
            model,
            None if model is None else _keys_of(model),
            ends,
            pad if pad not in meant else None,
        )

    def looked_at(self, rows: TrainingRows | Indexed, name: str, most: int | None) -> _Found:
        """Return what the rows are; an error that names the first that cannot be trained on."""
        if not len(rows):
            raise RequestError("there are no rows", wanted="at least one", do="Pass examples")
        found, per_example = _Found(), getattr(rows, "per_example", 1)
        for place in range(len(rows) if most is None else min(most, len(rows))):
            where = f"{name} {place // per_example}"
            row = self.row(rows[place], where)
            labels = row["labels"]
            found.rows += 1
            found.tokens += len(labels)
            found.trained += int((labels != NO_LABEL).sum())
            found.longest = max(found.longest, length_of(row, where))
            found.ending += bool(self.ends & {*labels.tolist()})
            if "input_ids" in row:
                found.prompts.setdefault(prompt_of(row), place)
        self._judge_ends(found, getattr(rows, "kind", "ids"), name)
        if count := len(getattr(rows, "cut", ())):
            what = f"{count} of {found.rows} rows were longer than max_length and were cut"
            found.warnings.append(f"{what}; DataForm(max_length=None) keeps them whole")
        return found

    def row(self, given: object, name: str) -> dict[str, Tensor]:
        """Return a row whose values fit one another and the model; errors call it `name`."""
        encodes = self.model is not None and self.model.is_encoder_decoder
        row = read_row(given, name, aligned=not encodes)
        if "labels" not in row:
            do = "Give labels, or make rows with es.read_rows"
            raise RequestError(f"{name} has no labels", got=", ".join(row), do=do)
        self._require_taken(row, name)
        self._require_ids(row, name)
        self._require_learned(row, name, encodes)
        for key, value in row.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                got = "nan" if bool(value.isnan().any()) else "inf"
                do = "Look at what made it: one such number makes the loss nan"
                raise RequestError(f"{name}: {key} is not finite", got=got, do=do)
        return row

    def _require_taken(self, row: Mapping[str, Tensor], name: str) -> None:
        """Refuse a key that the model's forward does not take."""
        for key in row:
            if self.known is not None and key not in self.known:
                near = nearest(key, self.known)
                do = f"Perhaps you meant {near}; or take it out of the rows"
                what = f"{name}: a forward of this model takes no {key!r}"
                raise UnknownArgumentError(what, do=do if near else "Take it out of the rows")

    def _require_ids(self, row: Mapping[str, Tensor], name: str) -> None:
        """Refuse ids and labels that the model has no embedding for, and rows that it cannot
        reach."""
        if self.model is None:
            return
        size, reach = self.model.vocab_size, self.model.reach
        special = {one.token for one in self.model.prompt_inputs}
        for key in ("input_ids", "labels"):
            values = row.get(key, torch.empty(0, dtype=torch.int64))
            for one in values[(values >= size) | (values < 0)].tolist():
                if one not in special | ({NO_LABEL} if key == "labels" else set()):
                    do = "Check that tokenizer and model belong together"
                    what = f"{name}: {key} holds an id outside the vocabulary"
                    wanted = f"0 to {size - 1}" + (" or -100" if key == "labels" else "")
                    raise RequestError(what, wanted=wanted, got=one, do=do)
        length = length_of(row, name)
        if reach is not None and length > reach:
            do = "Pass DataForm(max_length=...)"
            raise RequestError(
                f"{name} is longer than the model reaches", wanted=f"{reach} ids", got=length, do=do
            )

    def _require_learned(self, row: Mapping[str, Tensor], name: str, encodes: bool) -> None:
        """Refuse a row of which nothing is learned, or padding."""
        labels = row["labels"]
        # The first label of a decoder has nothing before it that could predict it.
        if not bool((labels[0 if encodes else 1 :] != NO_LABEL).any()):
            raise RequestError(
                f"nothing is learned from {name}: all of its labels are -100",
                wanted="at least one label behind the first position",
                got=f"{len(labels)} of -100",
                do="Look at the prompt's length, at max_length and at roles, or leave the row out",
            )
        hidden = None if encodes else row.get("attention_mask")
        padding = labels == (NO_LABEL if self.pad is None else self.pad)
        if hidden is not None:
            padding = padding | (hidden == 0)
        if bool((padding & (labels != NO_LABEL)).any()):
            place = int((padding & (labels != NO_LABEL)).nonzero()[0])
            do = "Set labels to -100 there; collators do so for what they pad"
            raise RequestError(f"{name} learns padding", got=f"a label at place {place}", do=do)

    def _judge_ends(self, found: _Found, kind: str, name: str) -> None:
        """Refuse answers of which none teaches to end; warn where some do not."""
        if not self.ends or found.ending == found.rows:
            return
        ends = ", ".join(map(str, sorted(self.ends)))
        if not found.ending and kind in ("prompt_completion", "messages", "preference"):
            raise RequestError(
                f"no {name} teaches the end token, so the model would not stop",
                wanted=f"a label that is one of {ends}",
                got=f"{found.rows} rows without",
                do="Look at max_length, at eos_token, and at the end tokens of "
                "model.generation_config beside those of the chat template",
            )
        what = f"{found.rows - found.ending} of {found.rows} rows teach no end token ({ends})"
        found.warnings.append(what)

    def require_batch(self, batch: object) -> None:
        """Refuse a batch whose labels do not stand over its ids, or with keys nobody reads."""
        if not isinstance(batch, Mapping):
            got = type(batch).__name__
            raise RequestError("a collator returns no batch", wanted="a mapping", got=got)
        with naming("the first batch"):
            for key, value in batch.items():
                if not isinstance(value, Tensor):
                    got = shown(value)[:80]
                    raise RequestError(f"{key} is no tensor", wanted="a tensor", got=got)
                self._require_taken({key: value}, "the batch")
            inputs, labels = (batch.get(key) for key in ("input_ids", "labels"))
            if labels is None:
                raise RequestError("it has no labels", do="Let the collator return them")
            encodes = self.model is not None and self.model.is_encoder_decoder
            if inputs is not None and not encodes and inputs.shape != labels.shape:
                turned = inputs.shape == labels.shape[::-1]
                what = "labels stand on the wrong axis" if turned else "labels do not fit the ids"
                do, shapes = "Give each id one, (B, T)", (tuple(inputs.shape), tuple(labels.shape))
                raise RequestError(what, wanted=shapes[0], got=shapes[1], do=do)
            if bool((labels == NO_LABEL).all()):
                raise RequestError("nothing is learned: all labels are -100", do="See es.read_rows")


def _keys_of(model: LanguageModel) -> frozenset[str]:
    """Return the keys of a row that the model's forward takes."""
    module: Any = model.module
    base = getattr(module, "get_base_model", None)  # of PEFT, whose own forward names few keys
    called = forward if module is None else (base() if callable(base) else module).forward
    named = inspect.signature(called).parameters.values()
    plain = {one.name for one in named if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return frozenset({*plain, *model.inputs, *prompt_names(model)} - {"model"})


def _shared(
    train: Mapping[tuple[int, ...], int], other: Mapping[tuple[int, ...], int]
) -> list[str]:
    """Return a warning where rows of the evaluation have prompts that are trained on."""
    both = [prompt for prompt in other if prompt in train]
    if not both:
        return []
    first = f"row {other[both[0]]} has that of row {train[both[0]]}"
    what = f"{len(both)} of {len(other)} prompts of the evaluation are trained on"
    return [f"{what}: {first}"]


def _pieces(row: Mapping[str, Tensor], tokenizer: TokenizerLike | None) -> Iterator[TrainedPiece]:
    """Yield a row's stretches that are learned, and those between; ids where nothing decodes."""
    labels = row["labels"]
    ids = row.get("input_ids", labels)
    if len(ids) != len(labels):  # an encoder reads the ids, and the decoder learns the labels
        yield TrainedPiece(_said(ids.tolist(), tokenizer), False)
        ids = labels
    places: Sequence[int] = range(len(ids))
    for is_trained, run in groupby(places, key=lambda place: int(labels[place]) != NO_LABEL):
        yield TrainedPiece(_said([int(ids[place]) for place in run], tokenizer), is_trained)


def _said(ids: list[int], tokenizer: TokenizerLike | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids))
    return str(tokenizer.decode([one for one in ids if one >= 0]))
