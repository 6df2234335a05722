"""Rounding weights from a shell: to a folder or a file, and while a model is loaded."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest

import everystep as es
from everystep.api.quantize import WrittenFormat
from everystep.cli import models as commands
from everystep.files.gguf import read_gguf
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole tiny model."""
    return write_tiny_model(tmp_path / "tiny")


def text_of(call: Caller, *arguments: str) -> str:
    """The tokens that a command line finds."""
    outcome = call(
        "generate", "hello", "--chat", "--json", "-n", "12", "--temperature", "0", *arguments
    )
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)["results"][0]["text"]


def test_a_folder_answers_as_rounding_while_loading_does(folder: Path, call: Caller) -> None:
    target = folder.parent / "small"
    outcome = call("quantize", str(folder), str(target))
    assert (outcome.code, outcome.out) == (0, f"{target}\n")
    assert json.loads((target / "config.json").read_text())["quantization_config"] == {
        "quant_method": "everystep",
        "version": 1,
        "format": "int8",
    }
    assert set(es.load_model(target).weight_bytes) == {"int8", "float32"}
    wanted = text_of(call, "-m", str(folder), "--quantize", "int8")
    assert text_of(call, "-m", str(target)) == wanted
    messages = [{"role": "user", "content": "hello"}]
    loaded = es.load(folder, quantize="int8")
    assert es.generate(*loaded, messages, max_new_tokens=12, do_sample=False) == wanted


def test_what_is_there_already_stays(folder: Path, call: Caller) -> None:
    target = folder.parent / "small"
    target.mkdir()
    outcome = call("quantize", str(folder), str(target))
    assert (outcome.code, outcome.out) == (1, "")
    assert "is there already" in outcome.err and list(target.iterdir()) == []


def test_rounding_twice_is_refused_and_leaves_nothing(folder: Path, call: Caller) -> None:
    small, again = folder.parent / "small", folder.parent / "again"
    assert call("quantize", str(folder), str(small)).code == 0
    outcome = call("quantize", str(small), str(again), "--format", "int4")
    assert outcome.code == 2 and "not rounded again" in outcome.err and not again.exists()


def test_inputs_that_are_no_whole_groups_are_refused(folder: Path, call: Caller) -> None:
    outcome = call("quantize", str(folder), str(folder.parent / "small"), "--format", "int4")
    assert outcome.code == 1 and "int4 needs inputs in whole groups" in outcome.err
    assert not (folder.parent / "small").exists()


def test_a_type_beside_codes_is_refused(folder: Path, call: Caller) -> None:
    line = ("-m", str(folder), "--quantize", "int8", "--dtype", "float64")
    outcome = call("generate", "hello", *line)
    assert outcome.code == 2 and "computed with in float32" in outcome.err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_unknown_format_is_a_wrong_command_line(command: str, call: Caller) -> None:
    outcome = call(command, "--quantize", "int3")
    assert outcome.code == 2 and "int3" in outcome.err


def test_the_command_knows_every_format() -> None:
    assert {one.value for one in commands.WrittenFormat} == set(typing.get_args(WrittenFormat))


@pytest.mark.parametrize("weighed", [False, True])
def test_a_file_is_what_python_writes(folder: Path, call: Caller, weighed: bool) -> None:
    text = folder.parent / "text.txt"
    text.write_text("hello hello there, how are you\n")
    target, other = folder.parent / "a.gguf", folder.parent / "b.gguf"
    outcome = call("quantize", str(folder), str(target), *["--importance", str(text)] * weighed)
    assert (outcome.code, outcome.out) == (0, f"{target}\n")
    es.quantize(folder, other, "q4_k_m", importance=text.read_text().strip() if weighed else None)
    assert target.read_bytes()[4096:] == other.read_bytes()[4096:]
    assert read_gguf(target).metadata["general.file_type"] == 15
    assert call("generate", "hello", "-m", str(target), "-n", "4").code == 0


def test_a_format_that_does_not_fit_the_target(folder: Path, call: Caller) -> None:
    outcome = call("quantize", str(folder), str(folder.parent / "x"), "--format", "q6_k")
    assert outcome.code == 2 and "ends in .gguf" in outcome.err
    outcome = call("quantize", str(folder), str(folder.parent / "x.gguf"), "--format", "q3_k")
    assert outcome.code == 2 and "q3_k" in outcome.err
