"""The law of the detokenizer: its pieces, joined, are what decoding all ids at once gives."""

from __future__ import annotations

import sys

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from everystep.errors import TokenizerError, UnsupportedError
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import Detokenizer, Tokenizer
from everystep.text.pieces import Decoding, byte_alphabet
from tests.text.reading import sentencepiece, smollm2


def words(decoder: decoders.Decoder | None) -> Tokenizer:
    """A tokenizer whose tokens are words, with a decoder of the caller's choice."""
    vocabulary = {word: id for id, word in enumerate(["a", "▁b", "▁▁c", "d▁", "<0xE2>", ""])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend)


STRIPPING = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 2, 0),
    ]
)
TOKENIZERS = {
    "tiny": tiny_tokenizer(),
    "smollm2": smollm2(),
    "sentencepiece": Tokenizer.from_gguf(sentencepiece()["metadata"]),
    "marks": words(decoders.Metaspace()),
    "marks, none first": words(decoders.Metaspace(prepend_scheme="never")),
    "spaces": words(None),
    "two spaces stripped": words(STRIPPING),
}


@st.composite
def sequences(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A tokenizer's name and ids of it, some of them of tokens that are bytes, some of none."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    size = len(TOKENIZERS[name])
    # The first 300 ids hold every single byte and every special token; a few lie beyond the end.
    id = st.one_of(st.integers(0, min(size, 300) - 1), st.integers(0, size + 3))
    return name, draw(st.lists(id, max_size=24))


@settings(max_examples=1500)
@given(sequences(), st.booleans())
@example(("tiny", [245, 164, 157]), True)  # an emoji without its last byte
@example(("sentencepiece", [229, 133, 5, 131]), True)  # an invalid run, then another
def test_pieces_join_to_the_decoded_text(case: tuple[str, list[int]], skip: bool) -> None:
    name, ids = case
    tokenizer = TOKENIZERS[name]
    follower = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [follower.push(id) for id in ids]
    assert "".join(pieces) + follower.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300)
@given(sequences(), st.integers(0, 24))
def test_a_copy_goes_its_own_way(case: tuple[str, list[int]], at: int) -> None:
    name, ids = case
    original = Detokenizer(TOKENIZERS[name])
    start = original.push(ids[:at])
    fork = original.copy()
    fork_text = start + fork.push(ids[:at][::-1]) + fork.finish()
    original_text = start + original.push(ids[at:]) + original.finish()
    decode = TOKENIZERS[name].decode
    assert original_text == decode(ids, skip_special_tokens=True)
    assert fork_text == decode(ids[:at] + ids[:at][::-1], skip_special_tokens=True)


@settings(max_examples=300)
@given(st.text(max_size=12))
@example("a<bos>é")  # hypothesis writes special tokens too, as it reads them in the sources
def test_no_piece_holds_half_a_character(text: str) -> None:
    follower = Detokenizer(TOKENIZERS["tiny"], skip_special_tokens=False)
    pieces = [follower.push(id) for id in TOKENIZERS["tiny"](text)["input_ids"]]
    assert "".join(pieces) == text
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


def test_a_character_comes_out_with_its_last_byte() -> None:
    follower = Detokenizer(tiny_tokenizer())
    assert [follower.push(id) for id in tiny_tokenizer()("😀")["input_ids"]] == ["", "", "", "😀"]


def test_finish_starts_a_new_text() -> None:
    follower = Detokenizer(tiny_tokenizer())
    ids = tiny_tokenizer()("é")["input_ids"]
    assert (follower.push(ids[0]), follower.finish()) == ("", "\ufffd")
    assert follower.push(ids) == "é"


def test_special_tokens_are_kept_on_request() -> None:
    ids = tiny_tokenizer()("<bos>a")["input_ids"]
    assert Detokenizer(tiny_tokenizer()).push(ids) == "a"
    assert Detokenizer(tiny_tokenizer(), skip_special_tokens=False).push(ids) == "<bos>a"


def test_a_negative_id_is_refused() -> None:
    with pytest.raises(TokenizerError, match="not a token id"):
        Detokenizer(tiny_tokenizer()).push(-1)


def test_a_decoder_that_cannot_be_followed_is_named() -> None:
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Detokenizer(words(decoders.WordPiece()))


def test_the_cost_of_an_id_does_not_grow() -> None:
    follower = Detokenizer(tiny_tokenizer())
    ids = tiny_tokenizer()("to be 😀 " * 250)["input_ids"]

    def calls() -> int:
        made = []
        sys.setprofile(lambda frame, event, about: made.append(event))
        text = follower.push(ids)
        sys.setprofile(None)
        assert text == "to be 😀 " * 250
        return len(made)

    first = calls()
    follower.push(ids * 30)
    assert calls() == first


@pytest.mark.parametrize(
    "token", ["Ġthe", "é", "Ċ", " ", "a b", "\xad", "<|end|>", "日", "Ġ日", ""]
)
def test_a_byte_level_token_is_bytes_unless_a_character_is_no_byte(token: str) -> None:
    letters = {character: byte for byte, character in byte_alphabet().items()}
    known = all(character in letters for character in token)
    expected = bytes(letters[c] for c in token) if known else token.encode()
    assert Decoding("bytes").bytes_of(token) == expected


def test_every_letter_of_the_byte_alphabet_is_its_byte() -> None:
    alphabet = byte_alphabet()
    assert Decoding("bytes").bytes_of("".join(alphabet.values())) == bytes(alphabet)
