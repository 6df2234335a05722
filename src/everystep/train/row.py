"""A row of training: the ids of one sequence, what is learned of them, and what the model reads
beside them.

Labels have a place for each id, and say -100 where nothing is learned. Further keys, such as boxes
or pixels, travel along to the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from everystep.errors import EverystepError, RequestError, shown
from everystep.nn.loss import NO_LABEL
from everystep.requests.arrays import as_numbers

PER_POSITION = ("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids")
"""Keys whose values have one number for each position of their row."""
_MADE = "Make rows with es.read_rows, or with a tokenizer"


def read_row(given: object, name: str, *, aligned: bool = True) -> dict[str, Tensor]:
    """Return a row with tensors in it, ids and labels as 1-D int64 ones.

    `name`: what errors call it. `aligned`: labels have a place for each id, as of a decoder.
    RequestError where it is no mapping, ids are none, and for keys per position of other lengths.
    """
    values = numbers_of(given, name)
    length = length_of(values, name)
    for key in PER_POSITION:
        if key in values and (key != "position_ids" or values[key].dim() < 2):
            values[key] = _line(values[key], f"{name}: {key}")
            if aligned or key != "labels":
                _require_length(values[key], length, f"{name}: {key}")
    if "input_ids" in values and int(values["input_ids"].min()) < 0:
        got = int(values["input_ids"].min())
        do = "Where nothing is learned, labels are -100 and ids stay as they are"
        raise RequestError(f"{name}: input_ids are negative", wanted="0 or more", got=got, do=do)
    return values


def numbers_of(given: object, name: str) -> dict[str, Tensor]:
    """Return the values of a mapping as tensors, without those that are None; RequestError for what
    is no mapping, and for values without numbers."""
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{name} is no mapping",
            wanted="{'input_ids': ..., 'labels': ...}, or a form that es.read_rows takes",
            got=type(given).__name__,
            do=_MADE,
        )
    found: dict[str, Tensor] = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise RequestError(f"{name} has a key that is no text", got=shown(key), do="Rename it")
        if isinstance(value, str | bytes):
            do = f"Take {key!r} out of the rows, or turn it into ids"
            raise RequestError(f"{name}: {key} is a text, and no model reads it", do=do)
        if value is not None:
            found[key] = as_numbers(f"{name}: {key}", value, "numbers", "Pass a list or a tensor")
    return found


def length_of(values: Mapping[str, Tensor], name: str) -> int:
    """Return how many positions a row has; RequestError for none, and for ids of two axes."""
    for key, axes in (("input_ids", 1), ("inputs_embeds", 2)):
        if key in values:
            found = values[key]
            if found.dim() != axes:
                wanted = "one row, (length,)" if axes == 1 else "one row, (length, hidden)"
                do = f"Pass {key}[0] of a batch of one, and each row as an example of its own"
                got = f"shape {tuple(found.shape)}"
                raise RequestError(f"{name}: {key} is no row", wanted=wanted, got=got, do=do)
            if not len(found):
                raise RequestError(f"{name} is empty", wanted="at least one id", do="Leave it out")
            return len(found)
    got = ", ".join(values) or "nothing"
    raise RequestError(f"{name} has no input_ids", wanted="input_ids", got=got, do=_MADE)


def _line(value: Tensor, name: str) -> Tensor:
    """Return whole numbers (length,) as int64; RequestError for others, and for other shapes."""
    if value.dim() != 1:
        do = "Give each position one number, along the axis of the ids"
        got = f"shape {tuple(value.shape)}"
        raise RequestError(f"{name} stand on another axis", wanted="(length,)", got=got, do=do)
    mask = name.endswith("attention_mask")
    wrong = value.is_floating_point() or value.is_complex()
    if len(value) and (wrong or (str(value.dtype) == "torch.bool" and not mask)):
        do = "Pass integers; embeddings are inputs_embeds"
        raise RequestError(f"{name} are no ids", wanted="integers", got=value.dtype, do=do)
    return value.long()


def _require_length(value: Tensor, length: int, name: str) -> None:
    if len(value) != length:
        do = "Give each position of the row one"
        raise RequestError(f"{name} has another length", wanted=length, got=len(value), do=do)


def prompt_of(row: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the ids before the first one that is learned; all of them where none is."""
    ids, labels = row["input_ids"], row.get("labels")
    if labels is None or len(labels) != len(ids):
        return tuple(ids.tolist())
    learned = (labels != NO_LABEL).nonzero()
    return tuple(ids[: int(learned[0])].tolist() if len(learned) else ids.tolist())


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of an example before the text of an error of this library."""
    try:
        yield
    except EverystepError as error:
        raise type(error)(f"{name}: {error}") from error
