"""Functions as tools: the schemas of transformers, and errors that say what a function lacks."""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from PIL.Image import Image
from transformers.utils import get_json_schema

from everystep.errors import RequestError
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text.tool_schemas import schema_of_function


class Unit(enum.Enum):
    CELSIUS = "c"
    KELVIN = 1


class Shelf:
    def fetch(self, name: str, count: int = 1) -> list[str]:
        """Fetch things from a shelf.

        Args:
            name: What they are called
            count: How many of them
        """
        return [name] * count

    @classmethod
    def make(cls, size: float) -> Shelf:
        """Make a shelf.

        Args:
            size: Its length: in metres,
                and no less than one
                note: not an argument

        Returns:
            The shelf.
        """
        return cls()


def everything(
    a: int,
    b: str | None,
    c: int | float | list | tuple,
    d: list[str] | dict[str, int],
    e: Literal["x", 1, None],
    f: Unit,
    g: typing.Optional[Unit],  # noqa: UP045
    h: tuple[int, list[str]],
    i: dict,
    j: typing.List,  # noqa: UP006
    k: Any,
    l: torch.Tensor,  # noqa: E741
    m: Image,
    n: typing.Annotated[bool, "said"],
    o: None = None,
    *rest: str,
    p: typing.Dict = {},  # noqa: B006, UP006
    q: typing.Tuple = (),  # noqa: UP006
    **more: float,
) -> tuple[int, ...] | None:
    """Do everything

    at once.

    Args:
        a: A

            and more of it
        b: B (choices: ["tea ", "coffee", 3])
        c: C
        d: D
        e: E (choices: [1])
        f: F
        g: G
        h: H
        i: I
        j: J
        k: K
        l: L
        m: M
        n: N
        o: O
        rest: R
        p: P
        q: Q
        more: S

    Raises:
        ValueError: Never.
    """


def plain() -> None:
    """Say nothing.

    Returns:
        Nothing.
    """


def wrong_result() -> Shelf:
    """Return a shelf."""
    return Shelf()


FUNCTIONS: list[Callable[..., Any]] = [
    everything,
    plain,
    wrong_result,
    Shelf.fetch,
    Shelf().fetch,
    Shelf.make,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_schema_is_that_of_transformers(function: Callable[..., Any]) -> None:
    ours, theirs = schema_of_function(function), get_json_schema(function)
    assert ours == theirs
    assert repr(ours) == repr(theirs)  # templates print keys in their order


def test_a_template_reads_functions_as_their_schemas() -> None:
    tokenizer, tool = tiny_tokenizer(), {"type": "function"}
    tokenizer.chat_template = "{{ tools | tojson }}{{ messages[0].content }}"
    chat = [{"role": "user", "content": "a"}]
    given = tokenizer.apply_chat_template(chat, tools=(Shelf().fetch, tool), tokenize=False)
    schemas = [get_json_schema(Shelf.fetch), tool]
    assert given == tokenizer.apply_chat_template(chat, tools=schemas, tokenize=False)


def no_text(a: int) -> None: ...


def no_hint(a) -> None:  # type: ignore[no-untyped-def]
    """Do it."""


def no_description(a: int, b: int) -> None:
    """Do it.

    Args:
        a: A
    """


def of_a_class(a: Shelf) -> None:
    """Do it."""


def any_number(a: tuple[int, ...]) -> None:
    """Do it."""


def one_in_a_tuple(a: tuple[int]) -> None:
    """Do it."""


def not_json(a: Literal[b"x"]) -> None:
    """Do it."""


def unreadable(a: Nothing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Do it."""


def wrong_choices(a: str) -> None:
    """Do it.

    Args:
        a: A (choices: tea, coffee)
    """


REFUSED: list[tuple[Any, str]] = [
    (no_text, "The tool 'no_text' has no docstring; wanted what it does"),
    (no_hint, "The argument 'a' of the tool 'no_hint' has no type hint"),
    (no_description, "docstring of the tool 'no_description' does not describe 'b'; wanted a line"),
    (of_a_class, "'a' of the tool 'of_a_class' has a type hint without a JSON schema.*Shelf"),
    (any_number, r"without a JSON schema.*tuple\[int, ...\]"),
    (one_in_a_tuple, r"without a JSON schema.*tuple\[int\]"),
    (not_json, "without a JSON schema.*b'x'"),
    (unreadable, "The type hints of the tool 'unreadable' cannot be read.*Nothing"),
    (wrong_choices, "The choices of 'a' of the tool 'wrong_choices' are no list"),
    (len, "A tool is neither a JSON schema nor a function"),
    ("add", "A tool is neither a JSON schema nor a function"),
]


@pytest.mark.parametrize(("tool", "what"), REFUSED)
def test_a_function_that_does_not_say_enough_is_refused(tool: Any, what: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson }}"
    with pytest.raises(RequestError, match=what):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tools=[tool])
