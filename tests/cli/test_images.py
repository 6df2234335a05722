"""`everystep generate --image` shows pictures before a question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import everystep as es
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.cli.running import Caller
from tests.images.making import drawn, write_folder

QUESTION = "What is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_folder(tmp_path_factory.mktemp("model"))
    drawn(20, 30).save(made / "a.png")
    drawn(31, 9, 7).save(made / "b.png")
    return made


@pytest.mark.parametrize("names", [("a.png",), ("a.png", "b.png")])
def test_the_answer_is_the_one_of_python(
    call: Caller, folder: Path, names: tuple[str, ...]
) -> None:
    model, tokenizer = es.load(folder)
    shown = [{"type": "image", "image": folder / name} for name in names]
    message = {"role": "user", "content": [*shown, {"type": "text", "text": QUESTION}]}
    expected = es.chat(model, tokenizer, [message], max_new_tokens=5, do_sample=False)
    line = [part for name in names for part in ("--image", str(folder / name))]
    more = ("-m", str(folder), "-n", "5", "--strategy", "greedy", "--json")
    outcome = call("generate", QUESTION, *line, *more)
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert report["results"][0]["text"] == expected
    alone = call("generate", QUESTION, "--chat", *more)
    assert json.loads(alone.out)["prompt_tokens"] < report["prompt_tokens"]


def test_what_is_wrong_is_said(call: Caller, folder: Path, tmp_path: Path) -> None:
    for given, said in (
        (("--image", "nowhere.png"), "no picture 'nowhere.png'"),
        (
            ("--image", str(folder / "a.png"), "--resume", "run"),
            "has its prompt and its steering; got PROMPT, --image",
        ),
    ):
        outcome = call("generate", QUESTION, "-m", "nowhere", *given)
        assert outcome.code == 2 and said in outcome.err
    tiny_llama(vocab_size=320).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    outcome = call("generate", QUESTION, "-m", str(tmp_path), "--image", str(folder / "a.png"))
    assert outcome.code in (1, 2) and "picture" in outcome.err, outcome.err
