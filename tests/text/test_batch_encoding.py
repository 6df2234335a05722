"""`BatchEncoding` is made as transformers' is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import everystep as es

ROWS = {"input_ids": [[5, 6], [7, 8]], "weights": [0.5, 1.0], "nothing": []}
MADE: list[dict[str, Any]] = [
    {"tensor_type": "pt"},
    {"tensor_type": "np"},
    {"tensor_type": "pt", "prepend_batch_axis": True, "n_sequences": 2},
    {"tensor_type": "np", "prepend_batch_axis": True},
    {"prepend_batch_axis": True},
    {},
]


@pytest.mark.parametrize("options", MADE)
def test_columns_become_what_they_become_in_the_reference(options: dict[str, Any]) -> None:
    ours = es.BatchEncoding(ROWS, **options)
    theirs = transformers.BatchEncoding(ROWS, **options)
    assert ours.n_sequences == theirs.n_sequences
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value)
        assert getattr(ours[name], "dtype", None) == getattr(value, "dtype", None)
        assert np.array_equal(ours[name], value)


def test_tensors_stay_and_nothing_is_an_empty_encoding() -> None:
    ids = torch.tensor([[1, 2]])
    assert es.BatchEncoding({"input_ids": ids}, tensor_type="pt")["input_ids"] is ids
    assert len(es.BatchEncoding()) == 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data": {"input_ids": [[1], [2, 3]]}, "tensor_type": "pt"}, "input_ids.*padding=True"),
    ({"data": {"input_ids": [[1], [2, 3]]}, "tensor_type": "np"}, "input_ids.*padding=True"),
    ({"data": ROWS, "tensor_type": "tf"}, "tensor_type"),
    ({"data": ROWS, "encoding": ["something"]}, "encoding.*return_offsets_mapping"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=said):
        es.BatchEncoding(**given)
