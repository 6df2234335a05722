"""`--adapter`: what a command runs with is what the library runs with, and wrong input is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import everystep as es
from everystep.cli.adapters import AskedAdapter, asked_adapters, named_adapters
from everystep.errors import RequestError
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model

TEXT = "the cat sat on the mat and looked at the dog " * 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole tiny model, two adapters of it, and a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    made = write_tiny_model(tmp_path / "tiny")
    model = es.load_model(made)
    for name in ("formal", "terse"):
        config = es.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(len(name))
        adapter = model.add_adapter(name, config)
        with torch.no_grad():
            for one in adapter.parameters():
                one.mul_(3)
        model.save_adapter(tmp_path / name, name)
    return made


def test_commands_run_with_a_mix(folder: Path, call: Caller) -> None:
    beside = folder.parent
    asked = ("--adapter", str(beside / "formal"), "--adapter", f"b={beside / 'terse'}@0.5")
    model, tokenizer = es.load(folder)
    model.load_adapter(beside / "formal", "formal")
    model.load_adapter(beside / "terse", "b")
    mix = {"formal": 1.0, "b": 0.5}
    prompt = ("the cat sat", "-m", str(folder), "-n", "8")
    expected = es.generate(model, tokenizer, "the cat sat", adapters=mix, max_new_tokens=8)
    assert call("generate", *prompt, *asked).out.rstrip("\n") == expected.rstrip("\n")
    assert call("generate", *prompt).out.rstrip("\n") != expected.rstrip("\n")
    line = ("perplexity", str(beside / "text.txt"), "-m", str(folder), "--json")
    score = es.score(model, tokenizer, TEXT.removesuffix("\n"), adapter_names=mix)
    found = json.loads(call(*line, *asked).out)
    assert found["perplexity"] == pytest.approx(score.perplexity)
    assert found["perplexity"] != pytest.approx(json.loads(call(*line).out)["perplexity"])
    bench = ("bench", str(folder), "--prompt-tokens", "4", "--tokens", "2", "--batch", "1")
    figures = json.loads(call(*bench, "--repeats", "1", "--json", *asked).out)
    assert figures["adapters"] == mix


def test_lines_of_a_batch_file_ask_for_an_adapter(folder: Path, call: Caller) -> None:
    """By the name that the command gives it; a line without it has the model as it is."""
    beside = folder.parent
    own = {"prompt": "the cat sat", "max_tokens": 8, "temperature": 0}
    said = {"method": "POST", "url": "/v1/completions"}
    asked = [{**own, "model": "terse"}, own]
    lines = [{"custom_id": f"n{at}", **said, "body": body} for at, body in enumerate(asked)]
    source, target = beside / "in.jsonl", beside / "out.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    line = ("run-batch", str(source), "-o", str(target), str(folder), "--threads", "1")
    done = call(*line, "--adapter", f"terse={beside / 'terse'}")
    assert done.code == 0 and "2 lines, 0 of them without an answer" in done.err
    rows = [json.loads(one)["response"]["body"] for one in target.read_text().splitlines()]
    model, tokenizer = es.load(folder)
    model.load_adapter(beside / "terse", "terse")
    given = {"max_new_tokens": 8, "do_sample": False}
    wanted = [
        es.generate(model, tokenizer, "the cat sat", adapter_names=name, **given)
        for name in ("terse", None)
    ]
    assert [one["choices"][0]["text"] for one in rows] == wanted and wanted[0] != wanted[1]


def test_a_conversation_runs_with_an_adapter(folder: Path, call: Caller) -> None:
    """Each turn of it, in the words of the library."""
    beside = folder.parent
    model, tokenizer = es.load(folder)
    model.load_adapter(beside / "formal", "formal")
    asked: list[dict[str, str]] = []
    expected = []
    for seed, line in enumerate(("the cat sat", "on the mat"), 5):
        asked.append({"role": "user", "content": line})
        given = {"adapter_names": "formal", "max_new_tokens": 8, "seed": seed}
        answer = es.generate(model, tokenizer, asked, **given)
        asked.append({"role": "assistant", "content": answer})
        expected.append(answer)
    chat = ("chat", "-m", str(folder), "-n", "8", "--seed", "5")
    lines = b"the cat sat\non the mat\n"
    found = call(*chat, "--adapter", str(beside / "formal"), given=lines)
    assert (found.code, found.out) == (0, "".join(f"{one}\n" for one in expected))
    plain = call(*chat, given=lines)
    assert plain.code == 0 and plain.out != found.out


def test_commands_are_steered_by_the_vectors_in_a_file(folder: Path, call: Caller) -> None:
    model, tokenizer = es.load(folder)
    vectors = {layer: torch.randn(model.width) * 50 for layer in (0, 1)}
    file = folder.parent / "steer.safetensors"
    save_file({str(layer): one for layer, one in vectors.items()}, file)
    prompt = ("the cat sat", "-m", str(folder), "-n", "8")
    expected = es.generate(model, tokenizer, "the cat sat", steer=vectors, max_new_tokens=8)
    assert call("generate", *prompt, "--steer", str(file)).out.rstrip("\n") == expected.rstrip("\n")
    assert call("generate", *prompt).out.rstrip("\n") != expected.rstrip("\n")
    line = ("perplexity", str(folder.parent / "text.txt"), "-m", str(folder), "--json")
    score = es.score(model, tokenizer, TEXT.removesuffix("\n"), steer=vectors)
    found = json.loads(call(*line, "--steer", str(file)).out)
    assert found["perplexity"] == pytest.approx(score.perplexity)
    save_file({"layers.0": vectors[0]}, file)
    refused = call("generate", *prompt, "--steer", str(file))
    assert refused.code != 0 and "no vectors by layer" in refused.err
    save_file({"7": vectors[0]}, file)
    refused = call("generate", *prompt, "--steer", str(file))
    assert refused.code != 0 and "a layer that the model does not have" in refused.err
    save_file({str(layer): one for layer, one in vectors.items()}, file)
    call("generate", *prompt[:3], "-n", "3", "--steer", str(file), "--save", str(file) + ".run")
    rest = ("--resume", str(file) + ".run", *prompt[1:])
    assert expected.rstrip("\n").endswith(call("generate", *rest).out.rstrip("\n"))
    refused = call("generate", *rest, "--steer", str(file))
    assert refused.code != 0 and "has its prompt and its steering" in refused.err
    refused = call("inspect", "a.jsonl", "--steer", str(file))
    assert refused.code != 0 and "--steer belong to --prompt" in refused.err


def test_a_run_goes_on_with_its_adapter(folder: Path, call: Caller) -> None:
    saved, adapter = str(folder.parent / "run"), ("--adapter", str(folder.parent / "formal"))
    whole = call("generate", "the cat sat", "-m", str(folder), "-n", "8", *adapter)
    call("generate", "the cat sat", "-m", str(folder), "-n", "4", "--save", saved, *adapter)
    again = call("generate", "--resume", saved, "-n", "8", "-m", str(folder), *adapter)
    assert (again.code, whole.code) == (0, 0)
    assert whole.out.rstrip("\n").endswith(again.out.rstrip("\n"))
    missing = call("generate", "--resume", saved, "-n", "8", "-m", str(folder))
    assert missing.code != 0 and "there is no such adapter" in missing.err


@pytest.mark.parametrize(
    "texts, parts",
    [
        (["@0.5"], ["cannot be read", "DIR"]),
        (["a=b@much"], ["cannot be read", "a=b@much"]),
        (["a=b", "a=c"], ["two adapters one name", "'a'"]),
        (["x/a", "y/a"], ["two adapters one name", "'a'"]),
    ],
)
def test_what_cannot_be_read_is_named(texts: list[str], parts: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        asked_adapters(texts)
    assert all(part in str(caught.value) for part in parts)


def test_a_server_names_an_adapter_by_its_folder() -> None:
    assert named_adapters(["x/mine", "poet=y/b"]) == {"mine": "x/mine", "poet": "y/b"}
    for texts, told in ((["x/mine@0.5"], "who asks for an adapter"), (["x/a", "y/a"], "one name")):
        with pytest.raises(RequestError, match=told):
            named_adapters(texts)


def test_a_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a=b", "c@2"):
        (tmp_path / name).mkdir()
    assert asked_adapters(["a=b", "x=c@2", "y=c@2@-0.5", "d"]) == (
        AskedAdapter("a=b", Path("a=b"), 1.0),
        AskedAdapter("x", Path("c@2"), 1.0),
        AskedAdapter("y", Path("c@2"), -0.5),
        AskedAdapter("d", Path("d"), 1.0),
    )


def test_a_folder_that_is_no_adapter_is_an_error(folder: Path, call: Caller) -> None:
    outcome = call("generate", "a", "-m", str(folder), "--adapter", str(folder))
    assert outcome.code == 1 and "adapter_config.json" in outcome.err
