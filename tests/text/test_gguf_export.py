"""A tokenizer in the words of a GGUF file splits every text as before, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from everystep.errors import UnsupportedError
from everystep.text import Settings, Tokenizer
from everystep.text.gguf_export import tokenizer_metadata
from everystep.text.pieces import byte_alphabet
from everystep.text.pretokenizers import RULES
from tests.text.reading import lines, sentencepiece, smollm2

LETTERS = list(byte_alphabet().values())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2")]


def byte_level(**changes: Any) -> Backend:
    """A tokenizer of a few merges, as folders hold them."""
    tokens = [*LETTERS, *(left + right for left, right in MERGES)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=MERGES, **changes))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def same(ours: Tokenizer, size: int | None = None) -> Tokenizer:
    """The tokenizer that is read again, after its ids were compared."""
    again = Tokenizer.from_gguf(tokenizer_metadata(ours, size or len(ours)))
    texts = [*lines()[:60], "the  the 12 123", "", " ", "the<s>the</s>", "é\n\n\tx"]
    for special in (True, False):
        first, second = (
            one(texts, add_special_tokens=special)["input_ids"] for one in (ours, again)
        )
        assert first == second
    assert again.special == ours.special
    assert again.chat_template == ours.chat_template
    return again


def test_smollm2_comes_back() -> None:
    again = same(smollm2())
    assert again.decode(again.encode("naïve <|im_end|>")) == "naïve <|im_end|>"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.names[0])
def test_every_rule_with_a_name(rule: Any) -> None:
    backend = byte_level(ignore_merges=rule.whole_words)
    backend.pre_tokenizer = rule.split()
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer()
    same(Tokenizer(backend, Settings(special={"eos_token": "</s>"})))


def test_a_rule_in_a_sequence_of_one_and_other_offsets() -> None:
    backend = byte_level()
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split])
    same(Tokenizer(backend))


def test_sentencepiece_comes_back() -> None:
    data = sentencepiece()
    again = same(Tokenizer.from_gguf(data["metadata"]))
    for text in data["texts"]:
        assert again(text["text"])["input_ids"] == text["ids"]


@pytest.mark.parametrize("ends", [("<s>",), ("</s>",), ("<s>", "</s>"), ()])
def test_what_stands_around_a_text(ends: tuple[str, ...]) -> None:
    backend = byte_level()
    single = [*(end for end in ends if end == "<s>"), "$A", *(end for end in ends if end != "<s>")]
    pairs = [(end, backend.token_to_id(end)) for end in ends]
    if ends:
        backend.post_processor = TemplateProcessing(single=single, pair=None, special_tokens=pairs)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    same(Tokenizer(backend, Settings(special=special)))


def test_ids_without_a_token_and_templates() -> None:
    templates = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    ours = Tokenizer(byte_level(), Settings(chat_template=templates))
    metadata = tokenizer_metadata(ours, len(ours) + 3)
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{len(ours) + 2}]"  # type: ignore[index]
    assert metadata["tokenizer.chat_templates"] == ["tools"]
    again = Tokenizer.from_gguf(metadata)
    assert again.chat_template == templates and len(again) == len(ours) + 3


def _unigram(backend: Backend) -> None:
    backend.model = models.Unigram([("a", 0.0), ("b", -1.0)], 0)


def _own_rule(backend: Backend) -> None:
    split = pre_tokenizers.Split(Regex("[aeiou]"), "isolated")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte])


def _lower(backend: Backend) -> None:
    backend.normalizer = normalizers.Lowercase()


def _odd_ends(backend: Backend) -> None:
    pairs = [(end, backend.token_to_id(end)) for end in ("<s>", "</s>")]
    backend.post_processor = TemplateProcessing(
        single=["</s>", "<s>", "$A"], pair=None, special_tokens=pairs
    )


def _words(backend: Backend) -> None:
    backend.model = byte_level(ignore_merges=True).model


def _no_bytes(backend: Backend) -> None:
    backend.decoder = decoders.WordPiece()


@pytest.mark.parametrize("change", [_unigram, _own_rule, _lower, _odd_ends, _words, _no_bytes])
def test_what_a_file_cannot_say_is_refused(change: Any) -> None:
    backend = byte_level()
    change(backend)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    with pytest.raises(UnsupportedError, match="GGUF"):
        ours = Tokenizer(backend, Settings(special=special))
        tokenizer_metadata(ours, len(ours))


def test_more_tokens_than_embeddings_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="embeddings"):
        tokenizer_metadata(Tokenizer(byte_level()), 5)
