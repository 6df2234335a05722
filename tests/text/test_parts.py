"""A long text gets the ids in parts that it has in one piece."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from everystep.testing.tokenizer import WORDS, tiny_tokenizer
from everystep.text import Tokenizer, parts
from everystep.text.gguf import surrounding
from everystep.text.pieces import byte_alphabet
from everystep.text.pretokenizers import RULES
from tests.text.reading import lines, smollm2

PIECES = [
    *"aZé'_/,.!+1½",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "'s",
    "中",
    "文",
    "。",
    "…",
    "\u0301",
    "\x85",
]


def every_pair_merges() -> models.BPE:
    """A model that merges any two bytes of `PIECES` that stand side by side in a word."""
    letters = [byte_alphabet()[byte] for byte in sorted(set("".join(PIECES).encode()))]
    pairs = [(one, two) for one in letters for two in letters]
    tokens = [*letters, *map("".join, pairs)]
    return models.BPE({token: id for id, token in enumerate(tokens)}, pairs)


def merging(model: models.BPE, rule: Any) -> tokenizers.Tokenizer:
    """A tokenizer with this rule."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = rule.split()
    backend.normalizer = None if rule.normalizer is None else rule.normalizer()
    return backend


_MODEL = every_pair_merges()
MERGING = [merging(_MODEL, rule) for rule in RULES]
texts = st.lists(st.sampled_from(PIECES), min_size=8, max_size=60).map("".join)


def both(backend: tokenizers.Tokenizer, text: str, *, special: bool = False) -> tuple[Any, Any]:
    """The ids of a text in parts, and in one piece."""
    how = {"add_special_tokens": special}
    (found,) = parts.encoded(backend, [text], only_ids=True, **how)
    assert isinstance(found, parts.Joined)
    return found.ids, backend.encode_batch([text], **how)[0].ids


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 2)


@pytest.mark.parametrize("number", range(len(RULES)))
@settings(max_examples=50)
@given(text=texts)
def test_every_rule_splits_a_text_where_it_is_cut(number: int, text: str) -> None:
    found, whole = both(MERGING[number], text)
    assert found == whole


@settings(max_examples=200)
@given(texts, st.integers(1, 9))
def test_parts_are_the_text(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART", size)
        found = list(parts.parts_of(text))
    assert "".join(found) == text
    assert all(len(one) >= size for one in found[:-1])


def test_a_vocabulary_of_a_model_gives_the_same_ids() -> None:
    text = " ".join(lines())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART", 50)
        assert len(list(parts.parts_of(text))) > 50
        found, whole = both(smollm2().backend, text)
    assert found == whole


@pytest.mark.parametrize(
    "around", [("<bos>", "<eos>"), ("<bos>", None), (None, "<eos>"), (None,) * 2]
)
def test_what_is_added_stands_around_the_whole(around: tuple[str | None, str | None]) -> None:
    tokenizer = tiny_tokenizer()
    named = [one and (one, tokenizer.backend.token_to_id(one)) for one in around]
    if any(named):
        tokenizer.backend.post_processor = surrounding(*named)
    text = "to be or not to be"
    found, whole = both(tokenizer.backend, text, special=True)
    assert found == whole
    asked = {"max_length": 6, "truncation": True}
    for side in ("left", "right"):
        tokenizer.truncation_side = side
        cut = dict(tokenizer(text, **asked))
        columns = dict(tokenizer(text, return_offsets_mapping=True, **asked))
        assert columns.pop("offset_mapping") and columns == cut


NO_PARTS = {
    "a token with a space": lambda backend: backend.add_tokens(["o b"]),
    "a token that takes spaces": lambda backend: backend.add_tokens(
        [AddedToken("to", rstrip=True)]
    ),
    "a token that is a word": lambda backend: backend.add_tokens(
        [AddedToken("be", single_word=True)]
    ),
    "another rule": lambda backend: setattr(
        backend, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="always")
    ),
    "no rule": lambda backend: setattr(backend, "pre_tokenizer", None),
    "another normalizer": lambda backend: setattr(
        backend, "normalizer", normalizers.Replace("o b", "x")
    ),
    "a space before the first word": lambda backend: setattr(
        backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
}


@pytest.mark.parametrize("name", NO_PARTS)
def test_what_could_reach_across_a_cut_keeps_a_text_whole(name: str) -> None:
    backend = tiny_tokenizer().backend
    NO_PARTS[name](backend)
    text = "to be\nor not to be"
    (found,) = parts.encoded(backend, [text], add_special_tokens=True, only_ids=True)
    assert not isinstance(found, parts.Joined)
    assert found.ids == backend.encode_batch([text])[0].ids


def test_what_is_added_within_a_text_keeps_it_whole() -> None:
    backend = tiny_tokenizer().backend
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos> $A", special_tokens=[("<eos>", 2)]
    )
    (found,) = parts.encoded(backend, ["to be or"], add_special_tokens=True, only_ids=True)
    assert not isinstance(found, parts.Joined) and found.ids.count(2) == 1


def test_texts_of_a_batch_are_long_or_short_each_by_itself() -> None:
    tokenizer, many = tiny_tokenizer(), ["a", "to be or not", "", "".join(WORDS)]
    whole = tokenizer.backend.encode_batch(many)
    found = tokenizer(many, padding=False)
    assert found["input_ids"] == [one.ids for one in whole]
    assert list(chain(*found["attention_mask"])) == [1] * sum(map(len, whole))


def test_a_chat_in_parts_keeps_written_tokens_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(tokenizer: Tokenizer) -> list[int]:
        said = [{"role": "user", "content": "to be <|im_end|> or not <|im_start|> to be"}]
        return tokenizer.apply_chat_template(said, return_dict=False)

    found = ids(tiny_tokenizer())
    monkeypatch.setattr(parts, "PART", 1 << 16)
    assert found == ids(tiny_tokenizer())
