"""The bar of `progress=True`: on standard error, and in a notebook with and without widgets."""

from __future__ import annotations

import builtins
import importlib.util
import warnings
from typing import Any

import pytest
import torch

import everystep as es
from everystep.shown import progress_bar
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

MODEL, TOKENIZER = tiny_llama(vocab_size=320, dtype=torch.float32), tiny_tokenizer(320)


def test_a_bar_counts_the_prompts_that_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    es.generate(MODEL, TOKENIZER, ["a", "b", "c"], max_new_tokens=2, progress=True)
    shown = capsys.readouterr()
    assert "prompts" in shown.err and "3/3" in shown.err and not shown.out
    es.score(MODEL, TOKENIZER, "abc" * 10, progress=True)
    assert "windows" in capsys.readouterr().err
    es.generate(MODEL, TOKENIZER, ["a", "b"], max_new_tokens=2)
    assert capsys.readouterr().err == ""


def test_a_bar_of_unknown_length_has_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(True, iter(()), "prompts") as advance:
        advance()
    assert "1/?" in capsys.readouterr().err


def test_a_notebook_without_widgets_gets_a_line_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    find = importlib.util.find_spec

    def without_widgets(name: str, *others: Any) -> Any:
        return None if name == "ipywidgets" else find(name, *others)

    monkeypatch.setattr("everystep.shown.find_spec", without_widgets)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with progress_bar(True, "ab", "prompts") as advance:
            advance()
    assert "1/2" in capsys.readouterr().err
