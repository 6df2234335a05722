"""Values that no caller means well, each made anew for a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import everystep as es
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(320)
MODEL = tiny_llama(vocab_size=320, dtype=torch.float32)
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
MAPPED: dict[str, Any] = {}
MAPPED["a"] = MAPPED
DEEP: Any = functools.reduce(lambda inner, _: [inner], range(100_000), 1)


class OwnError(Exception):
    """What the code of a caller raises."""


class NoText:
    def __str__(self) -> str:
        raise OwnError

    __repr__ = __str__


class NoTruth:
    def __bool__(self) -> bool:
        raise OwnError


class NoEquals:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise OwnError


class NoNumber:
    def __index__(self) -> int:
        raise OwnError

    def __float__(self) -> float:
        raise OwnError


class NoItems:
    def __len__(self) -> int:
        raise OwnError

    def __iter__(self) -> Any:
        raise OwnError


class NegativeLength(list[int]):
    def __len__(self) -> int:
        return -1


class NoAttributes:
    def __getattr__(self, name: str) -> Any:
        raise OwnError


def ends_badly() -> Any:
    yield 1
    raise OwnError


VALUES: dict[str, Callable[[], Any]] = {
    "an object": object,
    "None": lambda: None,
    "True": lambda: True,
    "a text": lambda: "abc",
    "bytes": lambda: b"abc",
    "an empty text": lambda: "",
    "a lone surrogate": lambda: "\ud800",
    "a zero byte": lambda: "\0",
    "a long text": lambda: "x" * 20_000,
    "-1": lambda: -1,
    "0": lambda: 0,
    "2^63": lambda: 2**63,
    "400 digits": lambda: 10**400,
    "5,000 digits": lambda: 10**5000,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: -float("inf"),
    "a complex number": lambda: 1j,
    "an empty list": list,
    "ragged lists": lambda: [[1], [2, 3]],
    "a list of all kinds": lambda: [1, "a", None],
    "a list that holds itself": lambda: ITSELF,
    "a mapping that holds itself": lambda: MAPPED,
    "a list nested deep": lambda: DEEP,
    "an empty mapping": dict,
    "a mapping of numbers": lambda: {1: 2},
    "a set": lambda: {1, 2},
    "a range": lambda: range(3),
    "a tensor without dimensions": lambda: torch.tensor(3),
    "an empty tensor": lambda: torch.zeros(0, dtype=torch.long),
    "a tensor of floats": lambda: torch.rand(2, 3),
    "a tensor of nan": lambda: torch.full((2, 3), float("nan")),
    "a sparse tensor": lambda: IDS.to_sparse(),
    "a tensor on meta": lambda: IDS.to("meta"),
    "a quantised tensor": lambda: torch.quantize_per_tensor(IDS.float(), 1.0, 0, torch.qint8),
    "a complex tensor": lambda: IDS + 1j,
    "a tensor that learns": lambda: torch.rand(2, 3, requires_grad=True),
    "a tensor of flags": lambda: torch.ones(2, 3, dtype=torch.bool),
    "a tensor of five dimensions": lambda: torch.zeros(1, 1, 1, 1, 1, dtype=torch.long),
    "an array of objects": lambda: np.array([object(), None]),
    "an array of texts": lambda: np.array(["a", "b"]),
    "an array of days": lambda: np.array(["2020-01-01"], dtype="M8[D]"),
    "an array of records": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "an array beyond 63 bits": lambda: np.array([2**63], dtype=np.uint64),
    "a function": lambda: lambda *_, **__: None,
    "the model": lambda: MODEL,
    "the tokenizer": lambda: TOKENIZER,
    "an encoding": lambda: TOKENIZER("ab", return_tensors="pt"),
    "a configuration": es.GenerationConfig,
    "a type of numbers": lambda: torch.float32,
    "the name of a type": lambda: "float32",
    "a path to nowhere": lambda: Path("/nowhere"),
    "what has no text": NoText,
    "a list of what has no text": lambda: [NoText()],
}
OWN: dict[str, Callable[[], Any]] = {
    "what is neither true nor false": NoTruth,
    "what equals nothing": NoEquals,
    "what is no number after all": NoNumber,
    "what holds nothing after all": NoItems,
    "a list of negative length": lambda: NegativeLength([1]),
    "what has no attributes": NoAttributes,
    "a list of what has no attributes": lambda: [NoAttributes()],
    "what ends badly": ends_badly,
}
"""Objects whose own code fails when it is asked."""
