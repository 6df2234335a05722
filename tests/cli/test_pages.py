"""`everystep generate` with a question about a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

import everystep as es
from everystep.testing.models import tiny_document
from everystep.testing.tokenizer import tiny_tokenizer
from tests.api.paper import write_page
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model

QUESTION = "What is the total?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny document model with its tokenizer."""
    made, model = tmp_path_factory.mktemp("document"), tiny_document()
    (made / "config.json").write_text(json.dumps(model.config.to_dict()))
    weights = {name: weight.clone().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    tiny_tokenizer().save_pretrained(made)
    return str(made)


@pytest.mark.parametrize("more", [(), ("--reasoning",), ("--system", "Be brief.")])
def test_the_answer_is_the_one_of_python(
    call: Caller, folder: str, tmp_path: Path, more: tuple[str, ...]
) -> None:
    page, lines = write_page(tmp_path)
    given = ("--page", str(page), "--lines", str(lines), "-m", folder, "-n", "5", "--json")
    outcome = call("generate", QUESTION, *given, *more)
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    model, tokenizer = es.load(folder)
    said = {"reasoning": True} if more == ("--reasoning",) else {}
    said |= {"system": more[1]} if len(more) == 2 else {}
    prompt = es.layout_prompt(model, tokenizer, QUESTION, lines=lines, image=page, **said)
    expected = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert report["prompt_tokens"] == prompt["input_ids"].shape[1]
    tokens = expected[0, report["prompt_tokens"] :].tolist()
    assert report["results"][0]["tokens"] == tokens


def test_what_is_missing_is_said_before_a_model_is_loaded(call: Caller, tmp_path: Path) -> None:
    page, lines = map(str, write_page(tmp_path))
    for given, said in (
        (("--page", page), "--page was given without --lines"),
        (("--lines", lines), "--lines was given without --page"),
        (("--reasoning",), "--reasoning needs --page and --lines"),
        (
            ("--page", page, "--lines", lines, "--resume", "run"),
            "its prompt and its steering; got PROMPT, --page",
        ),
    ):
        outcome = call("generate", QUESTION, "-m", "nowhere", *given)
        assert outcome.code == 2 and said in outcome.err


def test_files_that_cannot_be_are_refused_before_a_model_is_loaded(
    call: Caller, tmp_path: Path
) -> None:
    page, lines = map(str, write_page(tmp_path))
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"lines": [{"text": "a", "box": [1, 2, 3]}]}))
    for given, said in (
        (("none.png", lines), "none.png does not exist"),
        ((lines, lines), "is no picture, or a broken one"),
        ((page, str(bad)), "line 0: the box is impossible"),
    ):
        picture, listed = given
        about = ("--page", picture, "--lines", listed)
        outcome = call("generate", QUESTION, "-m", "nowhere", *about)
        assert outcome.code == 1 and said in outcome.err


def test_a_model_that_reads_no_pages_says_so(call: Caller, tmp_path: Path) -> None:
    page, lines = map(str, write_page(tmp_path))
    folder = str(write_tiny_model(tmp_path / "model"))
    outcome = call("generate", QUESTION, "-m", folder, "--page", page, "--lines", lines)
    assert outcome.code == 1 and "this model reads no pages" in outcome.err


def test_a_rounded_folder_reads_the_same_pages(call: Caller, folder: str, tmp_path: Path) -> None:
    made = str(tmp_path / "rounded")
    assert call("quantize", folder, made, "--format", "int8").code == 0
    page, lines = write_page(tmp_path)
    tokens = []
    for path, how in ((made, "auto"), (folder, "int8")):
        model, tokenizer = es.load(path, quantize=how)  # type: ignore[arg-type]
        prompt = es.layout_prompt(model, tokenizer, QUESTION, lines=lines, image=page)
        tokens.append(model.generate(**prompt, max_new_tokens=5, do_sample=False).tolist())
    assert tokens[0] == tokens[1]
