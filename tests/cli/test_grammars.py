"""`everystep generate` with something that the answer has to follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import everystep as es
from tests.cli.fakes import Stage
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["schema", "grammar"])
def test_what_a_file_holds_is_handed_on(
    stage: Stage, call: Caller, tmp_path: Path, name: str
) -> None:
    (tmp_path / "asked").write_text(json.dumps(SCHEMA) + "\n")
    assert call("generate", "hi", f"--{name}", str(tmp_path / "asked")).code == 0
    ((_, options),) = stage.streams
    assert options[name] == json.dumps(SCHEMA)


def test_a_file_that_is_not_there(call: Caller) -> None:
    outcome = call("generate", "hi", "--schema", "nowhere.json")
    assert outcome.code != 0 and "nowhere.json" in outcome.err


def test_two_of_them_are_refused(call: Caller) -> None:
    outcome = call("generate", "hi", "--regex", "a", "--choices", "b")
    assert outcome.code == 2
    assert "--regex and --choices were both given" in outcome.err


def test_the_answer_follows_them(call: Caller, tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "model"))
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "sums.lark").write_text('start: "1" ("+" "1")*')
    asked = (
        ("--schema", str(tmp_path / "schema.json"), "--do-sample", "--seed", "3"),
        ("--grammar", str(tmp_path / "sums.lark"), "-n", "9"),
        ("--choices", "yes", "--choices", "no"),
        ("--regex", "[ab]{3}"),
    )
    found = [call("generate", "a", "-m", folder, *line) for line in asked]
    assert [outcome.code for outcome in found] == [0] * 4
    answer, total, choice, letters = (outcome.out.rstrip("\n") for outcome in found)
    assert 0 <= json.loads(answer)["age"] <= 99
    assert set(total) <= {"1", "+"} and choice in ("yes", "no") and set(letters) <= {"a", "b"}


def test_a_schema_that_cannot_be_followed_names_the_place(call: Caller, tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "model"))
    (tmp_path / "schema.json").write_text('{"properties": {"a": {"not": {}}}}')
    outcome = call("generate", "a", "-m", folder, "--schema", str(tmp_path / "schema.json"))
    assert outcome.code == 1 and "'not' at #/properties/a" in outcome.err


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email", "maxLength": 40},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "vip"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "zip": {"type": "integer", "minimum": 0, "maximum": 99999},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


@pytest.mark.model
@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_sampled_answers_of_the_default_model_parse(model_path: Path, count: int) -> None:
    model, tokenizer = es.load(str(model_path))
    asked = [
        [{"role": "user", "content": f"Invent person number {n} and describe them as JSON."}]
        for n in range(count)
    ]
    answers = es.generate(
        model, tokenizer, asked, schema=PERSON, do_sample=True, seed=1, max_new_tokens=400,
        return_dict_in_generate=True,
    )  # fmt: skip
    for one in answers:
        assert one.finish_reason.kind == "stop", one.text
        assert {"name", "age", "tags", "address"} <= {*json.loads(one.text)}
