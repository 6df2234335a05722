"""The steps of a tokenizer call: reading its arguments, and making columns of encodings.

What a text or a chat argument may be, what `padding`, `truncation` and `max_length` mean together
(as in transformers), and which columns are wanted.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from everystep.errors import (
    RequestError,
    TokenizerError,
    UnknownArgumentError,
    UnsupportedError,
    nearest,
    shown,
)
from everystep.text.batch import Columns, Padding, Side, Truncation
from everystep.text.native import checked_text
from everystep.text.parts import Encoded
from everystep.text.tokenizer_settings import NO_LIMIT

TextInput = str | Sequence[str] | Sequence[tuple[str, str]]
TextItem = str | tuple[str, str]

# Arguments of transformers' tokenizers that can only have the value they have by default.
UNSUPPORTED: dict[str, object] = {
    "text_target": None,
    "text_pair_target": None,
    "stride": 0,
    "is_split_into_words": False,
    "return_overflowing_tokens": False,
    "return_length": False,
    "verbose": True,
    "tokenizer_kwargs": None,
}

# Each column, and the attribute of the library's encoding that holds it.
COLUMNS = {
    "input_ids": "ids",
    "token_type_ids": "type_ids",
    "special_tokens_mask": "special_tokens_mask",
    "offset_mapping": "offsets",
}

PADDINGS: dict[Any, str | None] = {
    True: "longest",
    False: None,
    None: None,
    "do_not_pad": None,
    "longest": "longest",
    "max_length": "max_length",
}
TRUNCATIONS: dict[Any, str | None] = {
    True: "longest_first",
    False: None,
    None: None,
    "do_not_truncate": None,
    "longest_first": "longest_first",
    "only_first": "only_first",
    "only_second": "only_second",
}


def refuse_unknown(call: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Raises for arguments that `call` does not know, or knows and cannot honour."""
    for name, value in given.items():
        if name in UNSUPPORTED:
            if value != UNSUPPORTED[name]:
                what = f"The tokenizer cannot honour {name}"
                raise UnsupportedError(what, wanted=UNSUPPORTED[name], got=value)
            continue
        known = [name for name in inspect.signature(call).parameters if name != "self"]
        near = nearest(name, known)
        raise UnknownArgumentError(
            f"The tokenizer has no argument {name!r}",
            wanted=f"perhaps {near!r}" if near else ", ".join(known),
        )


def as_texts(text: TextInput, pair: str | Sequence[str] | None) -> tuple[list[TextItem], bool]:
    """Return the texts or pairs to encode, and whether a single one was given."""
    if isinstance(text, str) or not isinstance(text, Iterable):
        first = checked_text(text)
        return [first if pair is None else (first, checked_text(pair, "text_pair"))], True
    if hasattr(text, "dtype"):
        raise TokenizerError("text is not text", wanted="a str", got=type(text).__name__)
    items: list[Any] = list(text)
    if pair is not None:
        if isinstance(pair, str) or len(pair) != len(items):
            raise RequestError(
                "text_pair does not fit text", wanted=f"{len(items)} texts", got=pair
            )
        items = list(zip(items, pair, strict=True))
    if not items:
        raise RequestError("There is no text to encode", got="an empty list")
    return [_item(item, index) for index, item in enumerate(items)], False


def _item(item: object, index: int) -> TextItem:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return (checked_text(item[0], f"text {index}"), checked_text(item[1], f"pair {index}"))
    return checked_text(item, f"text {index}")


def as_chats(conversation: Sequence[Any]) -> tuple[list[Sequence[Any]], bool]:
    """Return the chats of an argument that is one chat (messages) or several, and whether it is
    one."""
    if isinstance(conversation, (str, Mapping)) or not isinstance(conversation, Sequence):
        raise RequestError(
            "A conversation is a list of messages",
            wanted='e.g. [{"role": "user", "content": "Hello"}]',
            got=type(conversation).__name__,
        )
    if not conversation:
        raise RequestError("The conversation has no message")
    if isinstance(conversation[0], (list, tuple)):
        return list(conversation), False
    return [conversation], True


def truncation_of(
    truncation: bool | str | None,
    max_length: int | None,
    padding: bool | str,
    limit: int,
    side: Side,
) -> Truncation | None:
    """Return the rule that cuts rows, or None; `max_length` alone cuts, as in transformers."""
    if max_length is not None and padding is False and truncation is None:
        truncation = True
    strategy = _choice("truncation", truncation, TRUNCATIONS)
    if strategy is None:
        if max_length is not None and padding != "max_length":
            raise RequestError(
                "max_length would have no effect",
                do="Pass truncation=True to cut, or padding='max_length' to pad to it",
            )
        return None
    return Truncation(_length("truncation", max_length, limit), side, strategy)  # type: ignore[arg-type]


def columns_to_pad(rows: Any) -> dict[str, list[list[Any]]]:
    """Columns of rows, as a call returns them or as a list of encoded texts."""
    several = isinstance(rows, list | tuple) and all(isinstance(one, Mapping) for one in rows)
    if several and rows and "input_ids" in rows[0]:
        missing = [name for name in rows[0] if not all(name in row for row in rows)]
        rows = {name: [row[name] for row in rows] for name in rows[0] if name not in missing}
    if not isinstance(rows, Mapping) or "input_ids" not in rows:
        what, wanted = "there is nothing to pad", "rows with input_ids, as a call returns them"
        raise RequestError(what, wanted=wanted, got=shown(rows))
    return {
        str(name): [listed(row, f"a row of {name}") for row in listed(column, f"the column {name}")]
        for name, column in rows.items()
    }


def padding_of(
    padding: bool | str,
    max_length: int | None,
    limit: int,
    side: Side,
    multiple: int | None,
    pad_id: int | None,
) -> Padding | None:
    """Return the rule that pads rows, or None."""
    strategy = _choice("padding", padding, PADDINGS)
    if strategy is None:
        if multiple is not None:
            raise RequestError(
                "pad_to_multiple_of would have no effect", do="Pass padding=True with it"
            )
        return None
    if pad_id is None:
        raise RequestError(
            "Padding needs a pad token, and the tokenizer has none",
            do="Choose one, e.g. tokenizer.pad_token = tokenizer.eos_token",
        )
    if multiple is not None and (type(multiple) is not int or multiple < 1):
        raise RequestError("pad_to_multiple_of is wrong", wanted="1 or more", got=shown(multiple))
    length = _length("padding", max_length, limit) if strategy == "max_length" else None
    return Padding(pad_id, side, length, multiple or 1)


def _choice(name: str, value: object, choices: Mapping[Any, str | None]) -> str | None:
    if isinstance(value, bool | str | None) and value in choices:
        return choices[value]
    strategies = dict.fromkeys(filter(None, choices.values()))
    raise RequestError(
        f"{name} is unknown", wanted=", ".join(["True", "False", *strategies]), got=shown(value)
    )


def _length(what: str, max_length: int | None, limit: int) -> int:
    if max_length is None and limit >= NO_LIMIT:
        raise RequestError(
            f"There is no length for {what}",
            wanted="max_length",
            got="a model without a known limit",
            do="Pass max_length=...",
        )
    length = limit if max_length is None else max_length
    if not isinstance(length, int) or length < 0:
        raise RequestError("max_length is wrong", wanted="0 or more", got=max_length)
    return length


def columns_of(
    encodings: Sequence[Encoded],
    wanted: Collection[str],
    cut: Truncation | None,
) -> Columns:
    """Return the wanted columns of the encodings, in the order of COLUMNS, cut where they are too
    long."""
    columns: Columns = {
        name: [getattr(encoding, attribute) for encoding in encodings]
        for name, attribute in COLUMNS.items()
        if name in wanted
    }
    if "attention_mask" in wanted:  # rows are not padded yet
        columns["attention_mask"] = [[1] * len(encoding) for encoding in encodings]
    for row, encoding in enumerate(encodings):
        if cut is not None and len(encoding) > cut.length:
            kept = cut.kept(encoding.sequence_ids)
            for rows in columns.values():
                rows[row] = [rows[row][position] for position in kept]
    return columns


def checked_id(id: Any) -> int:
    """Return the id itself, if it can be one; TokenizerError otherwise."""
    try:
        found = -1 if isinstance(id, bool) else operator.index(id)
    except (TypeError, ValueError, RuntimeError):
        found = -1
    if not 0 <= found < 2**32:
        raise TokenizerError("This is not a token id", wanted="0 or more", got=shown(id))
    return found


def listed(given: Any, what: str) -> list[Any]:
    """Return the values as a list; TokenizerError where there are none to be had."""
    found = _plain(given)
    if isinstance(found, str | bytes) or not isinstance(found, Iterable) or hasattr(found, "dtype"):
        raise TokenizerError(f"this is not {what}", wanted="a list", got=shown(given))
    return list(found)


def _plain(given: Any) -> Any:
    """Tensors and arrays as lists; anything else, also a tensor without numbers, as it is."""
    try:
        return given.tolist()
    except Exception:
        return given


def _row(given: Any) -> Any:
    return given if isinstance(given, str) else listed(given, "a row of ids")


def id_rows(token_ids: Any) -> tuple[list[list[int]], bool]:
    """Ids in any of the shapes that decoding takes, as rows, and whether it was a single one."""
    ids = _plain(token_ids)
    if not isinstance(ids, Iterable):
        return [[checked_id(ids)]], True
    rows = [_plain(row) for row in ids]
    if any(isinstance(row, Iterable) for row in rows):
        return [[checked_id(id) for id in _row(row)] for row in rows], False
    return [[checked_id(id) for id in rows]], True
