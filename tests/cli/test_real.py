"""The commands with real models: a tiny one always, the default one where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import everystep as es
from everystep.config.named_strategies import NAMED
from everystep.files.sources import DEFAULT_MODEL
from tests.cli.running import Caller, everystep, on_terminal, run
from tests.cli.tiny_model import write_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole tiny model."""
    return write_tiny_model(tmp_path / "tiny")


def generated(call: Caller, *arguments: str) -> dict[str, object]:
    """The JSON document of a command line that must succeed."""
    outcome = call("generate", "hello", "--chat", "--json", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


def test_the_answer_is_the_librarys(folder: Path, call: Caller) -> None:
    model, tokenizer = es.load(folder)
    messages = [{"role": "user", "content": "hello"}]
    wanted = es.generate(model, tokenizer, messages, max_new_tokens=9, seed=3)
    (result,) = generated(call, "-m", str(folder), "-n", "9", "--seed", "3")["results"]
    assert result["text"] == wanted
    assert (len(result["tokens"]), result["finish_reason"]) == (9, "length")


def test_streamed_text_is_the_documents_text(folder: Path, call: Caller) -> None:
    line = ("-m", str(folder), "-n", "30", "--seed", "3")
    (result,) = generated(call, *line)["results"]
    assert call("generate", "--chat", "hello", *line).out == result["text"] + "\n"


def test_a_seed_repeats_the_draws(folder: Path, call: Caller) -> None:
    line = ("-m", str(folder), "-n", "20", "--do-sample", "--seed", "4")
    line += ("--num-return-sequences", "3")
    first, second = generated(call, *line), generated(call, *line)
    assert first["results"] == second["results"]
    assert len({result["text"] for result in first["results"]}) == 3


def test_beams_give_their_scores(folder: Path, call: Caller) -> None:
    line = ("-m", str(folder), "--num-beams", "3", "--num-return-sequences", "2", "-n", "5")
    scores = [result["score"] for result in generated(call, *line)["results"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == 2


def test_a_chat_goes_on(folder: Path, call: Caller) -> None:
    outcome = call("chat", "-m", str(folder), "-n", "6", given=b"hello\nand now?\n")
    assert (outcome.code, outcome.err) == (0, "")


def test_the_program_runs(folder: Path) -> None:
    outcome = run(everystep("generate", "-m", str(folder), "-n", "3", "--jsonl"), b"hello")
    assert (outcome.code, outcome.err) == (0, "")
    assert [json.loads(line)["position"] for line in outcome.out.splitlines()] == [0, 1, 2]


def test_a_folder_without_a_tokenizer(folder: Path, call: Caller) -> None:
    (folder / "tokenizer.json").unlink()
    outcome = call("generate", "a", "-m", str(folder))
    assert outcome.code == 1 and "no tokenizer.json" in outcome.err


def test_an_unknown_family(folder: Path, call: Caller) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard"}))
    outcome = call("generate", "a", "-m", str(folder))
    assert outcome.code == 1 and "unheard" in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_broken_file(tmp_path: Path, call: Caller) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03")
    outcome = call("generate", "a", "-m", str(tmp_path / "a.gguf"))
    assert outcome.code == 1 and "a.gguf" in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_messages_the_template_refuses(tmp_path: Path, call: Caller) -> None:
    folder = write_tiny_model(tmp_path / "strict", "{{ raise_exception('no, thanks') }}")
    outcome = call("generate", "a", "--chat", "-m", str(folder))
    assert outcome.code == 2 and "no, thanks" in outcome.err


@pytest.mark.model
def test_the_default_model_answers(model_path: Path, call: Caller) -> None:
    outcome = call("chat", "Tell me the capital of France.", "-n", "24", "--offline")
    assert (outcome.code, outcome.err) == (0, "")
    assert "Paris" in outcome.out


@pytest.mark.model
def test_an_interrupted_answer_leaves_the_model_usable(model_path: Path, tmp_path: Path) -> None:
    # A path has not the default model's own settings: without these the answers would be drawn.
    greedy = ("--temperature", "0", "--system", "You are a helpful assistant.")
    line = everystep("chat", "-n", "400", "--offline", "-m", str(model_path), *greedy)
    with on_terminal(line, XDG_CACHE_HOME=str(tmp_path)) as terminal:
        terminal.until("> ")
        terminal.type("Why is the sky blue?\n")
        terminal.until("The ")
        terminal.type("\x03")
        terminal.until("stopped")
        terminal.type("/clear\n")
        terminal.until("> ", count=3)
        terminal.type("Tell me the capital of France.\n")
        terminal.until("Paris")
        terminal.until("> ", count=4)
        terminal.type("/exit\n")
        assert terminal.end() == 0


NEEDED = {
    "constrained_beam": ["--force-words", " Paris"],
    "assisted": ["--assistant", DEFAULT_MODEL],
}
"""What is typed beside the name of a strategy that needs more."""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", NAMED)
def test_every_strategy_answers(call: Caller, name: str) -> None:
    """With nothing else said than its name and what it needs."""
    line = ["generate", "Tell me the capital of France.", "--chat", "-n", "12", "--strategy", name]
    if NAMED[name].needs:
        outcome = call(*line)
        assert outcome.code == 2 and "needs more than its name" in outcome.err
    outcome = call(*line, *NEEDED.get(name, []))
    assert outcome.code == 0 and len(outcome.out.split()) > 3
