"""What the small files of a whole model folder give."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystep.errors import FormatError
from everystep.files.model_folder import open_folder
from everystep.files.strict_json import MAX_DEPTH, field, parse_object
from tests.files.model_folders import CONFIG, write_json, write_single


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_single(tmp_path)


def test_a_configuration_alone_is_enough(folder: Path) -> None:
    opened = open_folder(folder)
    assert opened.config == CONFIG
    assert opened.generation_config is opened.tokenizer is None


def test_the_other_files_are_read(folder: Path) -> None:
    write_json(folder / "generation_config.json", {"temperature": 0.5})
    write_json(folder / "tokenizer.json", {})
    opened = open_folder(folder)
    assert opened.generation_config == {"temperature": 0.5}
    assert opened.tokenizer == folder / "tokenizer.json"


def test_weights_are_opened_on_request(folder: Path) -> None:
    assert "embed.weight" in open_folder(folder).weights()


def test_code_in_a_folder_is_neither_needed_nor_read(folder: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "canary.Model"}
    write_json(folder / "config.json", {**CONFIG, "auto_map": auto_map, "trust_remote_code": True})
    (folder / "canary.py").write_text("raise SystemExit")
    assert open_folder(folder).config["auto_map"] == auto_map


def test_the_deepest_nesting_is_read() -> None:
    text = '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert parse_object(text.encode(), "f")


def test_one_level_more_is_refused() -> None:
    text = '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)
    with pytest.raises(FormatError, match="f is nested too deeply"):
        parse_object(text.encode(), "f")


def test_a_field_that_is_null_has_the_default() -> None:
    assert field({"a": None}, "a", str, "f", "b") == "b"


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [(True, str, "a text"), ("a", list, "a list"), ({}, list, "a list"), ([], dict, "an object")],
)
def test_a_field_of_another_kind_is_refused(value: object, kind: type[str], wanted: str) -> None:
    with pytest.raises(
        FormatError, match=f"f: the field 'a' is of the wrong kind; wanted {wanted}"
    ):
        field({"a": value}, "a", kind, "f")
