"""What scripts ask of a tokenizer around generate gives what transformers' tokenizer gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from tests.cli.tiny_model import write_tiny_model

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ROWS = torch.tensor([[72, 256, 33], [80, 81, 257]])

CALLS: dict[str, Callable[[Any], Any]] = {
    "one text": lambda t: t("some text"),
    "a list": lambda t: t(["some", "texts"]),
    "a pair": lambda t: t("some", "text"),
    "tensors": lambda t: t("some text", return_tensors="pt"),
    "padding": lambda t: t(["some", "longer text"], padding=True, return_tensors="pt"),
    "padding right": lambda t: t(["some", "longer text"], padding=True, padding_side="right"),
    "padding to a length": lambda t: t("some", padding="max_length", max_length=9),
    "padding to a multiple": lambda t: t("some", padding=True, pad_to_multiple_of=8),
    "truncation": lambda t: t("some longer text", truncation=True, max_length=5),
    "no mask": lambda t: t("some", return_attention_mask=False),
    "encode": lambda t: t.encode("some text"),
    "encode to tensors": lambda t: t.encode("some text", return_tensors="pt"),
    "tokenize": lambda t: t.tokenize("some text"),
    "decode": lambda t: t.decode([72, 256, 33]),
    "decode one id": lambda t: t.decode(72),
    "decode a tensor": lambda t: t.decode(ROWS[0], skip_special_tokens=True),
    "decode rows": lambda t: t.batch_decode(ROWS, skip_special_tokens=True),
    "decode lists": lambda t: t.batch_decode(ROWS.tolist()),
    "ids of tokens": lambda t: t.convert_tokens_to_ids(["a", "b", "<|end|>"]),
    "id of a token": lambda t: t.convert_tokens_to_ids("a"),
    "tokens of ids": lambda t: t.convert_ids_to_tokens([72, 256]),
    "string of tokens": lambda t: t.convert_tokens_to_string(["a", "b"]),
    "special ids": lambda t: (t.eos_token, t.eos_token_id, t.pad_token, t.pad_token_id),
    "missing specials": lambda t: (t.bos_token, t.bos_token_id, t.unk_token, t.cls_token_id),
    "map of specials": lambda t: dict(t.special_tokens_map),
    "sizes": lambda t: (len(t), t.vocab_size, len(t.get_vocab())),
    "added": lambda t: t.get_added_vocab(),
    "sides": lambda t: (t.padding_side, t.truncation_side, t.is_fast),
    "template": lambda t: t.apply_chat_template(CHAT, tokenize=False),
    "prompt": lambda t: t.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False),
    "ids of a chat": lambda t: t.apply_chat_template(CHAT, tokenize=True, return_dict=False),
    "encoded chat": lambda t: t.apply_chat_template(CHAT, return_dict=True, return_tensors="pt"),
    "chats": lambda t: t.apply_chat_template([CHAT, CHAT[:1]], padding=True, return_dict=True),
    "pad": lambda t: t.pad({"input_ids": [[5], [6, 7]]}, return_tensors="pt"),
    "pad rows": lambda t: t.pad([{"input_ids": [5]}, {"input_ids": [6, 7]}]),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tokenizers") / "model")
    ours = es.AutoTokenizer.from_pretrained(folder, padding_side="left")
    return ours, transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")


def plain(value: Any) -> Any:
    """Values of either side as lists and dictionaries; the order of columns does not count."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if hasattr(value, "keys"):
        return {key: plain(value[key]) for key in value.keys() if key != "token_type_ids"}  # noqa: SIM118
    return value


@pytest.mark.parametrize("call", CALLS)
def test_a_call_gives_what_the_references_gives(pair: tuple[Any, Any], call: str) -> None:
    ours, theirs = (plain(CALLS[call](tokenizer)) for tokenizer in pair)
    assert ours == theirs


def test_a_pad_token_may_be_set(pair: tuple[Any, Any]) -> None:
    for tokenizer in pair:
        tokenizer.pad_token = "<|user|>"
    ours, theirs = pair
    assert (ours.pad_token, ours.pad_token_id) == (theirs.pad_token, theirs.pad_token_id)
    rows = [tokenizer(["a", "abc"], padding=True)["input_ids"] for tokenizer in pair]
    assert rows[0] == rows[1]
    for tokenizer in pair:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    assert ours.pad_token == theirs.pad_token == "<|end|>"


def test_an_encoding_is_used_as_the_references(pair: tuple[Any, Any]) -> None:
    ours, theirs = (t(["a", "abc"], padding=True, return_tensors="pt") for t in pair)
    assert ours.to("cpu") is ours
    assert sorted(ours.keys()) == sorted(set(theirs.keys()) - {"token_type_ids"})
    assert ours.input_ids.shape == theirs.input_ids.shape
    assert ours["attention_mask"].tolist() == theirs["attention_mask"].tolist()
    assert {**ours}.keys() == dict(ours).keys()
    assert ours.data.keys() == ours.keys()
    with pytest.raises(AttributeError):
        _ = ours.nothing
    with pytest.raises(KeyError):
        _ = ours["nothing"]
    assert isinstance(ours, es.BatchEncoding)
