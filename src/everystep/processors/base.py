"""What a processor is: a frozen value, called with rows or plain ids and their scores.

The familiar classes derive from `LogitsProcessor`, which turns a rectangle of ids into rows, so
that one function serves a call by hand and the engine. A class says in one of three forms what it
does: `process` returns new scores, that of an `Overwriting` processor writes into them, that of an
`Editing` one names the few that change. The engine calls `overwrite` where the scores are its own,
so that no memory is taken for new ones. State between steps lives in `sequence.memo` under the
processor's own key.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.processors.best import is_wide, without
from everystep.processors.edits import Edit
from everystep.processors.stacking import Argument, Numbers, admit, require_rows
from everystep.types import Prompt, Rows, Scores, Sequence, TokenTable, nobodys
from everystep.types.given_tensors import misfit_of, require_tensor


class LogitsProcessor:
    """Base of the processors with familiar names, and of a caller's own.

    A caller's class overrides `__call__(input_ids, scores)`, ours override `process`. `per_row`:
    fields that hold a number, or a tuple of one number per row; `checked`: fields of other kinds.
    Tensors are made where the scores are, so that a `device` argument, kept for ported calls,
    changes nothing.
    """

    per_row: ClassVar[tuple[Argument, ...]] = ()
    checked: ClassVar[tuple[Argument, ...]] = ()
    reads_ids: ClassVar[bool] = True
    """Whether it looks at ids at all; a call by hand need not give any where it does not."""

    def __post_init__(self, device: object = None) -> None:
        admit(self)

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        """(R, V) scores of prefixes, (R, T) ids or `Rows` -> (R, V) scores; nothing is changed."""
        if not isinstance(input_ids, Rows):
            form = "(rows, vocabulary) floats"
            require_tensor(scores, "scores", form, dims=(2,), holds="floats")
            if not scores.shape[1]:
                raise RequestError("scores are empty", wanted=form, got=tuple(scores.shape))
            input_ids = self._checked_ids(input_ids, scores)
            require_rows(self, len(input_ids))
            input_ids = bare_rows(input_ids)
        return self.process(input_ids, scores)

    def _checked_ids(self, ids: object, scores: Tensor) -> Tensor:
        """Return the (R, T) ids; none for R rows of scores where none are needed."""
        if ids is None and not self.reads_ids:
            return torch.empty(scores.shape[0], 0, dtype=torch.int64)
        wanted = "a (rows, length) tensor of ids"
        if ids is None:
            what, do = (
                f"{type(self).__name__} is called without ids",
                "Pass those before the scores",
            )
            raise RequestError(what, wanted=wanted, got="None", do=do)
        return require_tensor(ids, "input_ids", wanted, dims=(2,), holds="integers")

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """Return the given (R, V) scores as they are, or new ones."""
        raise UnsupportedError(
            f"{type(self).__name__} does not say what it does with scores",
            wanted="a method __call__(input_ids, scores)",
            do="Define it in the class",
        )

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        """Return what `process` does, and may write to the contiguous (R, V) scores."""
        return self.process(rows, scores)


class Overwriting(LogitsProcessor, ABC):
    """Base of the processors that write into the scores what they change of them."""

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return self.overwrite(rows, scores.clone(memory_format=torch.contiguous_format))

    @abstractmethod
    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor: ...


class Editing(LogitsProcessor, ABC):
    """Base of the processors that name the few scores that change."""

    @abstractmethod
    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """Return new values of some of the contiguous (R, V) scores; None where none change."""

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        dense = scores.contiguous()
        edit = self.edit(rows, dense)
        return scores if edit is None else edit.written(dense.clone())

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        edit = self.edit(rows, scores)
        return scores if edit is None else edit.written(scores)


class Narrowing(LogitsProcessor, ABC):
    """Base of the processors that can leave lists of few tokens in place of whole rows."""

    @property
    @abstractmethod
    def keeps_lists(self) -> bool:
        """True if it leaves a list of every list, so that the best of a row can stand for it."""

    @abstractmethod
    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """Return lists of the scores that it leaves; None where these are not known to be few.

        Whole rows are to be divided by a temperature first.
        """


def processed_lists(processor: LogitsProcessor, rows: Rows, scores: Scores) -> Scores | None:
    """Return lists that were processed as if they were rows; None where the scores are rows."""
    if not scores.listed:
        return None
    return replace(scores, values=processor.process(rows, scores.values), totals=None)


class Permitting(LogitsProcessor, ABC):
    """Base of the processors that know what may follow, whatever the scores are."""

    @abstractmethod
    def may_follow(self, rows: Rows, vocabulary: int) -> Tensor:
        """Return (R, V) bool of the tokens that may follow each row."""


class Filter(Narrowing):
    """Base of the processors that put `filter_value` where `removed` says so.

    They look at scores and not at ids, so that a list is a row like any other to them.
    """

    reads_ids = False
    filter_value: float

    @property
    def keeps_lists(self) -> bool:
        """True if what it removes leaves the list."""
        return self.filter_value == -math.inf

    @abstractmethod
    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) scores -> (R, V) bool."""

    def removed_of_many(self, scores: Tensor) -> Tensor:
        """As `removed`, in a wide row or a list of one: both must give the same."""
        return self.removed(scores)

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        found = self.few(rows, Scores.of(scores))
        return self.overwrite(rows, scores.clone()) if found is None else found.whole().values

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        removed = self.removed_of_many if is_wide(scores) else self.removed
        return scores.masked_fill_(removed(scores), self.filter_value)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """Return what is not removed; in wide rows that is searched for where it is little."""
        if not self.keeps_lists:
            return None
        if scores.tokens is None:
            return self.searched(scores, temperature) if is_wide(scores.values) else None
        if scores.rest is not None:  # it has to see all tokens
            return None
        return without(scores, self.removed_of_many(scores.values))

    def searched(self, scores: Scores, temperature: Numbers) -> Scores | None:
        """As `few`, of wide rows."""
        return None


def reads_rows(processor: object) -> bool:
    """Return True if it may be called with `Rows`, as ours are, and not only with plain ids."""
    return isinstance(processor, LogitsProcessor) and (
        type(processor).__call__ is LogitsProcessor.__call__
    )


class LogitsProcessorList(list[Any]):
    """Processors that run one after another on (input_ids, scores)."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """(R, T) ids, (R, V) scores -> (R, V) scores.

        A processor with further parameters gets all keywords; RequestError if one of them is
        missing.
        """
        for processor in self:
            if reads_rows(processor):
                scores = processor(input_ids, scores)
                continue
            further = list(inspect.signature(processor.__call__).parameters)[2:]
            missing = [name for name in further if name not in kwargs]
            if missing:
                raise RequestError(
                    f"{type(processor).__name__} needs more than ids and scores",
                    wanted=", ".join(further),
                    got=", ".join(kwargs) or "neither of them",
                    do=f"Pass {', '.join(missing)} as keywords",
                )
            scores = processor(input_ids, scores, **(kwargs if further else {}))
        return scores


_BARE = nobodys(Prompt(ids=np.empty(0, dtype=np.int64)))


def bare_rows(input_ids: Tensor) -> Rows:
    """Return (R, T) ids as rows of no request: nothing is padding, prompt or remembered."""
    count, width = input_ids.shape
    table = TokenTable(0, 0)
    table.data = input_ids.detach().to("cpu", torch.int64).numpy()
    sequences = [Sequence(_BARE, line, width, index=line) for line in range(count)]
    return Rows(table, sequences, np.full(count, width, dtype=np.int64))


def remembers(rows: Rows) -> bool:
    """Return True if the rows belong to sequences that go on, so that remembering pays."""
    return len(rows) > 0 and rows.sequences[0].request is not _BARE


@dataclass(frozen=True, eq=False)
class UserProcessor:
    """Calls a function of (input_ids, scores), or of (rows, scores) with `takes_rows`.

    Rows of equal length are given as one rectangle, others one by one without padding. Two are
    equal if they call the same object. RequestError if it returns another shape.
    """

    call: Callable[..., Tensor]
    takes_rows: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserProcessor) and self.call is other.call

    def __hash__(self) -> int:
        return id(self.call)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        # What is called may change its argument in place; ours stays as it is.
        if self.takes_rows:
            return self._checked(self.call(rows, scores.clone()), scores)
        ids, lengths = on_device(scores.device, rows.ids()), rows.lengths
        if len(rows) and np.all(lengths == lengths[0]):
            return self._checked(self.call(ids.clone(), scores.clone()), scores)
        parts = [
            self._checked(self.call(ids[r : r + 1, :n].clone(), one.clone()), one)
            for r, (n, one) in enumerate(zip(lengths, scores[:, None], strict=True))
        ]
        return torch.cat(parts) if parts else scores

    def _checked(self, result: object, scores: Tensor) -> Tensor:
        misfit = misfit_of(result, tuple(scores.shape), device=scores.device)
        if misfit is not None:
            what = f"logits processor {shown(self.call)} returned something else than scores"
            do = "Let it return the scores, changed or not"
            raise RequestError(what, wanted=misfit[0], got=misfit[1], do=do)
        found = cast(Tensor, result).detach()
        # Wider than 16 bits is what the draws read; narrower floats keep their order in it.
        return found.to(scores.dtype) if found.dtype.itemsize < scores.dtype.itemsize else found
