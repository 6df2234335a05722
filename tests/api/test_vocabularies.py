"""Tokenizers and tables of embeddings of different lengths: ids that only one of them knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import everystep as es
from everystep.errors import RequestError
from tests.cli.tiny_model import CONFIG, SPECIAL, write_tiny_model
from tests.models.tiny import farthest

TOKENS = 256 + len(SPECIAL)
WIDE, NARROW = 300, 250  # logits beyond the tokenizer's ids, and tokens beyond the logits
IDS = torch.tensor([[70, 71, 72]])
FIXED = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
each_executor = pytest.mark.parametrize("executor", ["torch", "native"])


def folder_of(folder: Path, rows: int) -> Path:
    """A model whose table has so many rows, with a tokenizer of 259 tokens."""
    write_tiny_model(folder)
    ends = CONFIG["eos_token_id"] if rows > TOKENS else None
    changed = {**CONFIG, "vocab_size": rows, "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(changed))
    tensors = load_file(folder / "model.safetensors")
    table = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
    tensors["model.embed_tokens.weight"] = table
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {
        rows: folder_of(tmp_path_factory.mktemp("folders") / str(rows), rows)
        for rows in (WIDE, NARROW)
    }


@pytest.fixture(scope="module")
def references(folders: dict[int, Path]) -> dict[int, Any]:
    auto = transformers.AutoModelForCausalLM
    return {rows: auto.from_pretrained(folder).eval() for rows, folder in folders.items()}


@pytest.fixture(scope="module")
def spelled(folders: dict[int, Path]) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folders[WIDE])


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "a bias for an id without a token": {"sequence_bias": {(WIDE - 1,): 100.0}},
    "a bias after an id without a token": {"sequence_bias": {(283, 5): 50.0, (283,): 9.0}},
    "bans of ids without tokens": {"bad_words_ids": [[WIDE - 1], [283], [283, 271]]},
    "ids without tokens suppressed": {"suppress_tokens": [*range(TOKENS, WIDE)]},
    "first ids without tokens suppressed": {"begin_suppress_tokens": [*range(TOKENS, WIDE)]},
    "ids beyond the logits suppressed": {"suppress_tokens": [WIDE + 3]},
    "a penalty": {"repetition_penalty": 1.4},
    "no word twice": {"no_repeat_ngram_size": 1},
    "beams": {"num_beams": 3, "sequence_bias": {(WIDE - 1,): 3.0}},
    "lookup": {"prompt_lookup_num_tokens": 3, "sequence_bias": {(WIDE - 1,): 9.0}},
    "an end without a token": {"eos_token_id": WIDE - 1, "sequence_bias": {(WIDE - 1,): 6.0}},
    "forced to an id without a token": {"forced_eos_token_id": WIDE - 1},
}


@each_executor
@pytest.mark.parametrize("name", SETTINGS)
def test_ids_without_tokens_are_chosen_as_in_the_reference(
    name: str, executor: Any, folders: dict[int, Path], references: dict[int, Any]
) -> None:
    model = es.load_model(folders[WIDE], executor=executor)
    given = {**FIXED, "do_sample": False, **SETTINGS[name]}
    assert torch.equal(model.generate(IDS, **given), references[WIDE].generate(IDS, **given))


@each_executor
def test_prompts_may_hold_ids_without_tokens(
    executor: Any, folders: dict[int, Path], references: dict[int, Any]
) -> None:
    model, read = es.load_model(folders[WIDE], executor=executor), torch.tensor([[5, 299, 280]])
    with torch.no_grad():
        assert farthest(model(read).logits, references[WIDE](read).logits) < 1e-5


@each_executor
def test_ids_without_tokens_add_nothing_to_a_text(
    executor: Any, folders: dict[int, Path], spelled: Any
) -> None:
    model, tokenizer = es.load(folders[WIDE], executor=executor)
    drawn = {"do_sample": True, "seed": 3, "max_new_tokens": 60, "temperature": 3.0}
    rows = model.generate(IDS.repeat(4, 1), eos_token_id=None, pad_token_id=0, **drawn)
    assert (rows >= TOKENS).any(dim=1).all()
    for skip in (False, True):
        assert tokenizer.batch_decode(rows, skip) == spelled.batch_decode(rows, skip)
    often = {"sequence_bias": [[[id], 9.0] for id in range(TOKENS, WIDE)]}
    asked = {"max_new_tokens": 20, "do_sample": True, "seed": 1, **often}
    (text,) = es.generate(model, tokenizer, ["ab"], **asked)
    events = list(es.stream(model, tokenizer, ["ab"], **asked))
    said = [one.token for one in events if one.token is not None]
    assert any(id >= TOKENS for id in said)
    assert "".join(one.text for one in events) == text == tokenizer.decode(said, True)
    stopped = es.generate(model, tokenizer, ["ab"], stop_strings=["never"], **asked)
    assert stopped == [text]
    run = es.open(model, tokenizer, "ab", **asked)
    assert run.result().text == text


GRAMMARS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[a-c]{4}"},
    "choices": {"choices": ["yes", "no"]},
    "schema": {"schema": {"enum": [1, 22]}},
}


@each_executor
@pytest.mark.parametrize("name", GRAMMARS)
def test_no_grammar_allows_an_id_without_a_token(
    name: str, executor: Any, folders: dict[int, Path]
) -> None:
    model, tokenizer = es.load(folders[WIDE], executor=executor)
    often = {"sequence_bias": [[[id], 200.0] for id in range(TOKENS, WIDE)]}
    asked = {"max_new_tokens": 12, **GRAMMARS[name], **often}
    for way in ({}, {"do_sample": True, "seed": 1, "temperature": 4.0}, {"num_beams": 2}):
        (text,) = es.generate(model, tokenizer, ["ab"], **asked, **way)
        assert text in ("yes", "no", "1", "22") or {*text} <= {*"abc"}
        assert text


BEYOND = {
    "ids": lambda model, spell: model.generate(torch.tensor([[1, NARROW]])),
    "a text": lambda model, spell: es.generate(model, spell, ["<|user|>a"]),
    "a chat": lambda model, spell: es.chat(model, spell, "a"),
    "a stream": lambda model, spell: next(es.stream(model, spell, ["<|user|>"])),
    "a run": lambda model, spell: es.open(model, spell, "<|user|>"),
    "a negative prompt": lambda model, spell: model.generate(
        IDS, negative_prompt_ids=torch.tensor([[NARROW]]), guidance_scale=2.0
    ),
    "a forward": lambda model, spell: model(torch.tensor([[1, NARROW + 2]])),
    "a forward of a negative id": lambda model, spell: model(torch.tensor([[-1]])),
    "embeddings": lambda model, spell: model.get_input_embeddings()(torch.tensor([NARROW])),
    "labels": lambda model, spell: model(IDS, labels=torch.tensor([[1, 2, NARROW]])),
    "what a function allows": lambda model, spell: model.generate(
        IDS, prefix_allowed_tokens_fn=lambda row, ids: [3, NARROW], max_new_tokens=2
    ),
    "a negative id that a function allows": lambda model, spell: model.generate(
        IDS, prefix_allowed_tokens_fn=lambda row, ids: [3, -1], max_new_tokens=2
    ),
}


@each_executor
@pytest.mark.parametrize("name", BEYOND)
def test_an_id_beyond_the_logits_is_refused(
    name: str, executor: Any, folders: dict[int, Path]
) -> None:
    model, tokenizer = es.load(folders[NARROW], executor=executor)
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        BEYOND[name](model, tokenizer)
    assert f"0 to {NARROW - 1}" in str(caught.value)


@each_executor
def test_what_is_sent_is_refused_too(executor: Any, folders: dict[int, Path]) -> None:
    run = es.open(*es.load(folders[NARROW], executor=executor), "a", max_new_tokens=4)
    next(run)
    with pytest.raises(RequestError, match="0 to 249"):
        run.send("<|user|>")


@each_executor
def test_tokens_that_no_logit_stands_for_are_never_said(
    executor: Any, folders: dict[int, Path], references: dict[int, Any], spelled: Any
) -> None:
    """A tokenizer with more tokens than the model has logits serves, and so does its end token
    where the model's own settings name it."""
    model, tokenizer = es.load(folders[NARROW], executor=executor)
    said = model.generate(IDS, do_sample=False, **FIXED)
    assert torch.equal(said, references[NARROW].generate(IDS, do_sample=False, **FIXED))
    assert tokenizer.batch_decode(said) == spelled.batch_decode(said)
    model.generation_config.eos_token_id = 256
    with_end = model.generate(IDS, do_sample=False, max_new_tokens=10, pad_token_id=0)
    assert torch.equal(with_end, said)
    healed = model.generate(IDS, token_healing=True, tokenizer=tokenizer, max_new_tokens=3)
    assert healed.shape == (1, 6)


def test_healing_passes_over_tokens_beyond_the_logits(folders: dict[int, Path]) -> None:
    model, tokenizer = es.load(folders[NARROW])
    begins = tokenizer.convert_ids_to_tokens(64)
    tokenizer.backend.add_tokens([f"{begins}xyz"])
    assert len(tokenizer) > NARROW
    prompt = torch.tensor([[70, 71, 64]])
    healed = model.generate(prompt, token_healing=True, tokenizer=tokenizer, max_new_tokens=3)
    assert healed.shape == (1, 6) and int(healed.max()) < NARROW
