"""`everystep generate` with --save, --resume and --trace, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import everystep as es
from tests.cli.running import Caller, Outcome
from tests.cli.tiny_model import write_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def generated(call: Caller, folder: Path, *arguments: str) -> Any:
    outcome = call("generate", "-m", str(folder), "--json", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    (result,) = json.loads(outcome.out)["results"]
    return result


@pytest.mark.parametrize("options", [["--do-sample", "--seed", "5"], ["--num-beams", "3"]])
def test_a_saved_run_goes_on_where_it_was_stopped(
    folder: Path, call: Caller, tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, line = tmp_path / "run", ["hello", "-n", "12", *options]
    wanted = generated(call, folder, *line)
    step, taken = es.Run.__next__, [0]

    def interrupted(run: es.Run) -> es.Step:
        taken[0] += 1
        if taken[0] == 5:
            raise KeyboardInterrupt
        return step(run)

    monkeypatch.setattr(es.Run, "__next__", interrupted)
    outcome: Outcome = call("generate", "-m", str(folder), *line, "--save", str(file))
    assert outcome.code == 130 and f"--resume {file}" in outcome.err
    assert generated(call, folder, "--resume", str(file)) == wanted


def test_a_run_goes_on_with_more_room(folder: Path, call: Caller, tmp_path: Path) -> None:
    file = str(tmp_path / "run")
    wanted = generated(call, folder, "hello", "-n", "20")
    generated(call, folder, "hello", "-n", "8", "--save", file)
    outcome = call("generate", "-m", str(folder), "--resume", file, "-n", "20", "--jsonl")
    tokens = [json.loads(one)["token"] for one in outcome.out.splitlines()]
    assert tokens == wanted["tokens"][8:]
    assert generated(call, folder, "--resume", file) == wanted  # it was saved there again


def test_a_run_with_an_assistant_goes_on_with_it(
    folder: Path, call: Caller, tmp_path: Path
) -> None:
    file, assisted = str(tmp_path / "run"), ["--assistant", str(folder)]
    wanted = generated(call, folder, "hello", "-n", "12")
    generated(call, folder, "hello", "-n", "5", *assisted, "--save", file)
    outcome = call("generate", "-m", str(folder), "--resume", file)
    assert outcome.code == 2 and "the saved run needs --assistant" in outcome.err
    assert generated(call, folder, "--resume", file, "-n", "12", *assisted) == wanted


def test_a_trace_has_a_line_per_step(folder: Path, call: Caller, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    options = ["--temperature", "0.7", "--top-k", "5", "--seed", "1", "--trace", str(file)]
    result = generated(call, folder, "hello", "-n", "6", *options)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(len(result["tokens"])))
    assert [token for line in lines for token in line["tokens"]] == result["tokens"]
    assert "".join(line["text"] for line in lines) == result["text"]
    for line in lines:
        names = [one["processor"] for one in line["changes"]]
        assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper"]
        assert line["tokens"][0] in [one["token"] for one in line["best"]]
    assert lines[-1]["finish_reason"] == result["finish_reason"]


@pytest.mark.parametrize("more", [["Why?"], ["--chat"], ["--system", "a"], ["--file", "b"]])
def test_a_run_that_goes_on_has_its_prompt(call: Caller, more: list[str]) -> None:
    outcome = call("generate", "--resume", "run", *more)
    assert outcome.code == 2 and "--resume" in outcome.err


def test_a_file_that_holds_no_run_is_an_error(folder: Path, call: Caller, tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"nothing of the kind")
    outcome = call("generate", "-m", str(folder), "--resume", str(tmp_path / "run"))
    assert outcome.code == 1 and "not a safetensors file" in outcome.err


@pytest.mark.parametrize("option", ["--save", "--trace"])
def test_an_impossible_path_is_found_before_a_model_is_loaded(
    option: str, call: Caller, tmp_path: Path
) -> None:
    place = tmp_path / "nowhere" / "x"
    outcome = call("generate", "-m", str(tmp_path / "no model"), "hello", option, str(place))
    assert outcome.code == 1
    assert outcome.err.startswith(f"everystep: {place} cannot be written: the folder")


def test_a_run_is_saved_where_a_link_leads(folder: Path, call: Caller, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("run")
    generated(call, folder, "hello", "-n", "4", "--save", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert generated(call, folder, "--resume", str(tmp_path / "run"), "-n", "6")
