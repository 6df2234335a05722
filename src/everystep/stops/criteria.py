"""Stopping criteria under transformers' names: called by hand, or passed to `generate()`.

Each of them keeps its arguments and makes the `stop()` it stands for, which takes the place of the
one that the configuration of a call would have made. This file knows no engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import COUNT, NUMBER, ONE_OR_MORE_IDS, plain, require
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.stops.ends import EosToken, MaxLength, MaxTime, UserStop
from everystep.stops.strings import StopStrings
from everystep.text import Spelling
from everystep.types.given_tensors import require_tensor
from everystep.types.request import Candidates, Stop


class StoppingCriteria:
    """A base of the caller's own criteria.

    Called with ids (R, T) and the scores of all steps so far (None unless they are kept), it
    returns (R,) bool, or one bool for all: which rows end. Source: StoppingCriteria.
    """

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "this criterion does not say when to stop",
            wanted="a subclass with __call__(input_ids, scores, **kwargs)",
            got=type(self).__name__,
            do="Define __call__",
        )


class MaxLengthCriteria(StoppingCriteria):
    """Rows end with `max_length` ids, prompt and padding included.

    It warns beyond `max_position_embeddings`, if given. Source: MaxLengthCriteria.
    """

    def __init__(self, max_length: int, max_position_embeddings: int | None = None) -> None:
        self.max_length = COUNT.checked(max_length, "max_length")
        self.max_position_embeddings = max_position_embeddings

    def stop(self) -> Stop:
        return MaxLength(self.max_length)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        length, context = _ids(input_ids).shape[1], self.max_position_embeddings
        if context is not None and context < length < self.max_length:
            warnings.warn(
                f"{length} ids are more than the {context} that the model was made for. Lower "
                "max_length, or expect its output to get worse.",
                stacklevel=2,
            )
        return _all_or_none(length >= self.max_length, input_ids)


class MaxTimeCriteria(StoppingCriteria):
    """Rows end `max_time` seconds after `initial_timestamp`, a `time.time()`; by default now.

    Source: MaxTimeCriteria.
    """

    def __init__(self, max_time: float, initial_timestamp: float | None = None) -> None:
        self.max_time = NUMBER.checked(max_time, "max_time")
        self.initial_timestamp = MaxTime.now() if initial_timestamp is None else initial_timestamp

    def stop(self) -> Stop:
        return MaxTime.after(self.initial_timestamp + self.max_time - MaxTime.now())

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return _all_or_none(MaxTime.now() - self.initial_timestamp > self.max_time, input_ids)


class EosTokenCriteria(StoppingCriteria):
    """Rows end with one of the ids, or with one among their last `new_token_length` ids.

    Source: EosTokenCriteria.
    """

    def __init__(self, eos_token_id: int | list[int] | Tensor) -> None:
        ids = ONE_OR_MORE_IDS.checked(plain(eos_token_id), "eos_token_id")
        self.eos_token_id = torch.tensor(ids, dtype=torch.int64)

    def stop(self) -> Stop:
        return EosToken(tuple(self.eos_token_id.reshape(-1).tolist()))

    def __call__(
        self, input_ids: Tensor, scores: Any, new_token_length: int = 1, **kwargs: Any
    ) -> Tensor:
        newest = _ids(input_ids)[:, -new_token_length:]
        return torch.isin(newest, self.eos_token_id.to(input_ids.device)).any(dim=1)


class StopStringCriteria(StoppingCriteria):
    """Rows end where their newest id completes one of the strings.

    `tokenizer`: ours, or a fast one of another library. Nothing is prepared in advance: how tokens
    can end a string is worked out when they are first seen. A string that no token can end is no
    error; it ends nothing. Source: StopStringCriteria.
    """

    def __init__(self, tokenizer: Any, stop_strings: str | Sequence[str]) -> None:
        given = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
        listed = isinstance(given, list | tuple) and all(isinstance(one, str) for one in given)
        require(listed, "stop_strings", "a string or a list of strings", stop_strings)
        given = tuple(given)
        self.stop_strings = given
        self._stop = StopStrings(given, Spelling.of(tokenizer))

    def stop(self) -> Stop:
        return self._stop

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return _ask(self._stop, input_ids)


class ConfidenceCriteria(StoppingCriteria):
    """The first row ends where the probability of its newest id is below the threshold.

    `scores`: per step (R, V); only the last are read. Source: ConfidenceCriteria.
    """

    def __init__(self, assistant_confidence_threshold: float) -> None:
        given = NUMBER.checked(assistant_confidence_threshold, "assistant_confidence_threshold")
        self.assistant_confidence_threshold = given

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        if scores is None:
            raise RequestError(
                "ConfidenceCriteria needs the scores of the newest id",
                wanted="one tensor of scores per step",
                got="None",
                do="Set return_dict_in_generate=True and output_scores=True",
            )
        confidence = scores[-1].softmax(-1)[0, input_ids[0, -1]]
        return bool(confidence < self.assistant_confidence_threshold)


class StoppingCriteriaList(list[Any]):
    """A list of criteria that can be called like one: rows end where any of them says so."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = _all_or_none(False, input_ids)
        for criterion in self:
            ends = ends | criterion(input_ids, scores, **kwargs)
        return ends

    @property
    def max_length(self) -> int | None:
        """The limit of the first `MaxLengthCriteria` in the list, or None."""
        limits = (one.max_length for one in self if isinstance(one, MaxLengthCriteria))
        return next(limits, None)


def validate_stopping_criteria(
    stopping_criteria: StoppingCriteriaList, max_length: int
) -> StoppingCriteriaList:
    """Return a list of the same criteria that ends rows at `max_length` ids if none limits them.

    Warn where one of them has another limit. Source: validate_stopping_criteria.

    Example:

        >>> criteria = es.StoppingCriteriaList([es.EosTokenCriteria(2)])
        >>> criteria = es.validate_stopping_criteria(criteria, max_length=20)
    """
    limit = stopping_criteria.max_length
    if limit is None:
        return StoppingCriteriaList([*stopping_criteria, MaxLengthCriteria(max_length)])
    if limit != max_length:
        warnings.warn(
            f"stopping_criteria ends rows at {limit} ids, whatever max_length={max_length} says.",
            stacklevel=2,
        )
    return StoppingCriteriaList(stopping_criteria)


_OWN = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)


def merge(made: Sequence[Stop], criteria: Any) -> tuple[Stop, ...]:
    """Return the stops of a call: those that its configuration made, and the caller's.

    A criterion of the caller's takes the place, with a warning, of a stop of the same kind. A
    criterion whose class is one of ours, and no subclass, is asked as the stop it stands for. Raise
    RequestError if `criteria` is not a list of callables.
    """
    kinds = {type(stop) for stop in made}
    replaced: set[type] = set()
    custom: dict[Stop, None] = {}
    for criterion in _checked(criteria):
        stop = criterion.stop() if type(criterion) in _OWN else UserStop(criterion)
        custom[stop] = None
        if type(stop) in kinds:
            replaced.add(type(stop))
            warnings.warn(
                f"The {type(criterion).__name__} in stopping_criteria takes the place of the one "
                "that the configuration makes.",
                stacklevel=2,
            )
    return (*(stop for stop in made if type(stop) not in replaced), *custom)


def longest(criteria: Any) -> int:
    """Return the limit of a `MaxLengthCriteria` among the caller's criteria; 0 without one."""
    listed = criteria if isinstance(criteria, (list, tuple)) else ()
    limits = [one.max_length for one in listed if type(one) is MaxLengthCriteria]
    return max(limits, default=0)


def by_hand(stops: Sequence[Stop]) -> StoppingCriteriaList:
    """Return the stops of a call as criteria that a loop outside the engine can ask."""
    return StoppingCriteriaList(_criterion_of(stop) for stop in stops)


def _criterion_of(stop: Stop) -> Any:
    if isinstance(stop, UserStop):
        return stop.call
    if isinstance(stop, EosToken):
        return EosTokenCriteria(list(stop.ids))
    if isinstance(stop, MaxLength):
        return MaxLengthCriteria(int(stop.limit))
    return lambda input_ids, scores, **_: _ask(stop, input_ids)


def _checked(criteria: Any) -> Iterable[Any]:
    if criteria is None:
        return ()
    if isinstance(criteria, (list, tuple)) and all(map(callable, criteria)):
        return criteria
    raise RequestError(
        "stopping_criteria is not a list of criteria",
        wanted="a list or StoppingCriteriaList of functions of (input_ids, scores)",
        got=shown(criteria),
        do="Put the criterion in a list",
    )


def _ids(given: object) -> Tensor:
    """Return (R, T) the ids of a call by hand."""
    wanted = "a (rows, length) tensor of ids"
    return require_tensor(given, "input_ids", wanted, dims=(2,), holds="integers")


def _all_or_none(ends: bool, input_ids: Tensor) -> Tensor:
    """Return (R,) the same for all rows."""
    return torch.full(_ids(input_ids).shape[:1], ends, dtype=torch.bool, device=input_ids.device)


def _ask(stop: Stop, input_ids: Tensor) -> Tensor:
    """Return (R,) bool on the device of the ids: which rows end."""
    ends = stop(Candidates.of_rows(_ids(input_ids).cpu().numpy()))
    return torch.from_numpy(np.array(ends)).to(input_ids.device)
