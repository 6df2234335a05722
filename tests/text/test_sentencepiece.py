"""SentencePiece models from GGUF metadata, against ids that sentencepiece itself made."""

from __future__ import annotations

from typing import Any

import pytest

from everystep.text import Detokenizer, Tokenizer
from tests.text.reading import sentencepiece

TEXTS = [(each["text"], each["ids"]) for each in sentencepiece()["texts"]]


def tokenizer(**changes: Any) -> Tokenizer:
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_gguf({**sentencepiece()["metadata"], **changed})


def test_ids_are_those_of_sentencepiece() -> None:
    ours = tokenizer()
    assert [ours(text)["input_ids"] for text, _ in TEXTS] == [ids for _, ids in TEXTS]


def test_ids_decode_to_the_text() -> None:
    ours = tokenizer()
    assert [ours.decode(ids) for _, ids in TEXTS] == [text for text, _ in TEXTS]


def test_a_detokenizer_gives_the_text() -> None:
    ours = tokenizer()
    for text, ids in TEXTS:
        follower = Detokenizer(ours)
        assert "".join(map(follower.push, ids)) + follower.finish() == text


def test_the_lines_need_byte_fallback() -> None:
    assert any("<0xF0>" in tokenizer().tokenize(text) for text, _ in TEXTS)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a <mark>b", ["▁a", "▁", "<mark>", "▁b"]),
        ("<s>a</s>", ["<s>", "▁a", "</s>"]),
    ],
)
def test_a_space_mark_follows_an_added_token(text: str, tokens: list[str]) -> None:
    assert tokenizer().tokenize(text) == tokens


def test_without_a_space_prefix_the_text_starts_as_it_is() -> None:
    ours = tokenizer(add_space_prefix=False)
    assert ours.tokenize("a b") == ["a", "▁b"]
    assert ours.decode(ours("a b")["input_ids"]) == "a b"


def test_bos_is_added_unless_the_file_says_otherwise() -> None:
    metadata = dict(sentencepiece()["metadata"])
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(metadata)("a")["input_ids"][0] == 1
