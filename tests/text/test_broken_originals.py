"""Broken vocabularies of folders without `tokenizer.json`, and those that cannot be followed."""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import sentencepiece_model_pb2

from everystep.errors import EverystepError, FormatError, MissingFileError, UnsupportedError
from everystep.text import Tokenizer
from everystep.text.merges import MAX_TOKEN
from tests.text.originals import LLAMA, T5, folder_of, merge_files, pieces, ranks, tiktoken_file

LLAMA_CLASS = {"tokenizer_class": "LlamaTokenizer"}
T5_CLASS = {"tokenizer_class": "T5Tokenizer"}
GPT2_CLASS = {"tokenizer_class": "GPT2Tokenizer"}
Change = Callable[[Any], object]


def refused(folder: Path, error: type[EverystepError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        Tokenizer.from_folder(folder)
    assert len(str(caught.value)) < 2000


def changed(data: bytes, change: Change) -> bytes:
    """A model file after a change of what it declares."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(data)
    change(proto)
    return proto.SerializeToString()


def piece(id: int, **fields: Any) -> Change:
    """A change of one piece."""
    return lambda proto: [setattr(proto.pieces[id], *field) for field in fields.items()]


def trainer(**fields: Any) -> Change:
    """A change of how the model was trained."""
    return lambda proto: [setattr(proto.trainer_spec, *field) for field in fields.items()]


def normalizer(**fields: Any) -> Change:
    """A change of how texts are prepared."""
    return lambda proto: [setattr(proto.normalizer_spec, *field) for field in fields.items()]


LLAMA_MODEL = pieces(model_type="bpe", byte_fallback=True, **LLAMA)
T5_MODEL = pieces(model_type="unigram", **T5)

CHANGES: list[tuple[Change, type[EverystepError], str]] = [
    (piece(300, piece="\u2581the"), FormatError, "in .*tokenizer.model twice"),
    (piece(300, piece=""), FormatError, "Piece 300 .* has no text"),
    (piece(300, piece="x" * (MAX_TOKEN + 1)), FormatError, "an endless token"),
    (piece(300, score=float("nan")), FormatError, "Piece 300 .* has no score"),
    (piece(300, score=float("-inf")), FormatError, "Piece 300 .* has no score"),
    (piece(300, score=0.0), UnsupportedError, "order merges otherwise than the ids"),
    (piece(300, type=5), UnsupportedError, "pieces that are not used"),
    (piece(300, type=2), FormatError, "no single unknown piece; wanted one; got 2"),
    (piece(0, type=1), FormatError, "no single unknown piece; wanted one; got 0"),
    (piece(5, type=1), FormatError, "byte pieces .* are wrong; wanted 256 of them; got 255"),
    (trainer(byte_fallback=False), FormatError, "byte pieces .* are wrong; wanted none"),
    (trainer(model_type=3), UnsupportedError, "of another kind; wanted unigram or bpe; got word"),
    (trainer(treat_whitespace_as_suffix=True), UnsupportedError, "writes spaces after words"),
    (normalizer(escape_whitespaces=False), UnsupportedError, "does not write spaces as"),
    (normalizer(add_dummy_prefix=False), UnsupportedError, "does not add a space before a text"),
    (normalizer(remove_extra_whitespaces=True), UnsupportedError, "prepares texts otherwise"),
    (normalizer(precompiled_charsmap=b"rules"), UnsupportedError, "prepares texts otherwise"),
    (lambda proto: proto.ClearField("pieces"), FormatError, "not a SentencePiece model"),
]


@pytest.mark.parametrize(("change", "error", "match"), CHANGES)
def test_a_model_that_contradicts_itself_is_refused(
    tmp_path: Path, change: Change, error: type[EverystepError], match: str
) -> None:
    folder = folder_of(tmp_path, {"tokenizer.model": changed(LLAMA_MODEL, change)}, **LLAMA_CLASS)
    refused(folder, error, match)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (piece(600, piece="\u2581a\u2581b"), UnsupportedError, "pieces with spaces inside"),
        (normalizer(precompiled_charsmap=b""), UnsupportedError, "prepares texts otherwise"),
        (normalizer(precompiled_charsmap=b"\xff" * 9), FormatError, "does not make a tokenizer"),
        (trainer(model_type=2), UnsupportedError, "another kind than its tokenizer_class"),
        (piece(1, piece="<end>"), FormatError, "no piece </s>"),
    ],
)
def test_what_t5_cannot_follow_is_refused(
    tmp_path: Path, change: Change, error: type[EverystepError], match: str
) -> None:
    folder = folder_of(tmp_path, {"spiece.model": changed(T5_MODEL, change)}, **T5_CLASS)
    refused(folder, error, match)


def test_rules_that_make_texts_longer_without_end_are_refused(tmp_path: Path) -> None:
    def longer(proto: Any) -> None:
        rules = proto.normalizer_spec.precompiled_charsmap
        proto.normalizer_spec.precompiled_charsmap = rules + b"y" * 1000 + b"\0"

    folder = folder_of(tmp_path, {"spiece.model": changed(T5_MODEL, longer)}, **T5_CLASS)
    refused(folder, FormatError, "normalizer makes texts longer; wanted.*up to 1000 times")


def test_a_piece_that_is_no_text_is_refused(tmp_path: Path) -> None:
    surrogate = "\ud800".encode("utf-8", "surrogatepass")
    for wrong in (b"\xff\xfe\xfd", surrogate):
        data = LLAMA_MODEL.replace("\u2581".encode(), wrong, 1)
        assert data != LLAMA_MODEL
        folder = folder_of(tmp_path, {"tokenizer.model": data}, **LLAMA_CLASS)
        refused(folder, FormatError, "has no text; wanted text in UTF-8")


IDS = merge_files()["vocab.json"]
ALSO = {"<s>": 0, "<pad>": 0}
FILES: list[tuple[dict[str, Any], dict[str, Any], type[EverystepError], str]] = [
    ({"tokenizer.model": b""}, LLAMA_CLASS, FormatError, "tokenizer.model is empty"),
    ({"tokenizer.model": b"\0" * 99}, LLAMA_CLASS, FormatError, "not a SentencePiece model"),
    ({"tokenizer.model": b"\x80\x04"}, LLAMA_CLASS, FormatError, "is a pickle or zip archive"),
    ({"tokenizer.model": b"\n" + b"\0" * (1 << 24)}, LLAMA_CLASS, FormatError, "is too large"),
    ({"tokenizer.model": T5_MODEL}, LLAMA_CLASS, UnsupportedError, "prepares texts otherwise"),
    ({"spiece.model": LLAMA_MODEL}, T5_CLASS, UnsupportedError, "another kind than"),
    ({"vocab.json": {}, "merges.txt": ""}, GPT2_CLASS, FormatError, "ids of .* are wrong"),
    ({"vocab.json": "[]", "merges.txt": ""}, GPT2_CLASS, FormatError, "holds no object"),
    ({"vocab.json": ALSO, "merges.txt": ""}, GPT2_CLASS, FormatError, "got 0 for '<pad>'"),
    ({"vocab.json": {"a": 1}, "merges.txt": ""}, GPT2_CLASS, FormatError, "got 1 for 'a'"),
    ({"vocab.json": {"a": "0"}, "merges.txt": ""}, GPT2_CLASS, FormatError, "got '0' for 'a'"),
    ({"vocab.json": {"a": 1 << 80}, "merges.txt": ""}, GPT2_CLASS, FormatError, "are wrong"),
    ({"vocab.json": '{"\\ud800": 0}', "merges.txt": ""}, GPT2_CLASS, FormatError, "surrogate"),
    ({"vocab.json": IDS, "merges.txt": b"\xff"}, GPT2_CLASS, FormatError, "is not UTF-8"),
    ({"vocab.json": IDS, "merges.txt": "x y z"}, GPT2_CLASS, FormatError, "Merge 0 of .*is wrong"),
    ({"vocab.json": IDS, "merges.txt": "q q"}, GPT2_CLASS, FormatError, "'qq' is no token"),
    ({"vocab.json": IDS}, GPT2_CLASS, MissingFileError, "has no merges.txt"),
    ({"tokenizer.model": LLAMA_MODEL}, GPT2_CLASS, MissingFileError, "has no vocab.json"),
    ({**merge_files()}, LLAMA_CLASS, MissingFileError, "no vocabulary that LlamaTokenizer reads"),
    ({**merge_files()}, {}, UnsupportedError, "class is not named; wanted .*GPT2Tokenizer"),
    (
        {**merge_files()},
        {"tokenizer_class": "CLIPTokenizer"},
        UnsupportedError,
        "class is not known.*got 'CLIPTokenizer'. Save the tokenizer",
    ),
    ({**merge_files()}, {"tokenizer_class": 3}, FormatError, "tokenizer_class is wrong"),
    ({**merge_files()}, {**GPT2_CLASS, "add_prefix_space": 1}, FormatError, "add_prefix_space"),
    ({"spiece.model": T5_MODEL}, {**T5_CLASS, "extra_ids": 10**9}, FormatError, "extra_ids"),
    ({"spiece.model": T5_MODEL}, {**T5_CLASS, "extra_ids": -1}, FormatError, "extra_ids"),
    ({**merge_files(), "added_tokens.json": {"<a>": "1"}}, GPT2_CLASS, FormatError, "added_tokens"),
    ({**merge_files(), "added_tokens.json": {"<a>": 900}}, GPT2_CLASS, FormatError, "the id 900"),
]


@pytest.mark.parametrize(("files", "config", "error", "match"), FILES)
def test_a_broken_folder_is_refused(
    tmp_path: Path,
    files: dict[str, Any],
    config: dict[str, Any],
    error: type[EverystepError],
    match: str,
) -> None:
    refused(folder_of(tmp_path, files, **config), error, match)


def line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (tiktoken_file() + b"AAAA", "Line .* is wrong; wanted a token in base64 and its rank"),
        (tiktoken_file() + b"A?A= 793\n", "is wrong; wanted a token in base64"),
        (tiktoken_file() + line(b"zzz", "-1"), "is wrong; wanted a token in base64"),
        (tiktoken_file() + line(b"zzz", "9" * 5000), "is wrong; wanted a token in base64"),
        (tiktoken_file() + line(b"zzz", 1), "ranks of .* are wrong"),
        (tiktoken_file() + line(b"zzz", 10_000), "ranks of .* are wrong"),
        (tiktoken_file() + line(b"a", len(ranks())), "has a token again"),
        (tiktoken_file() + line(b"z" * (MAX_TOKEN + 1), len(ranks())), "has an endless token"),
        (line(b"a", 0), "cannot spell every text; wanted a token for each byte; got none for 0"),
    ],
)
def test_a_broken_tiktoken_file_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    refused(folder_of(tmp_path, {"tokenizer.model": data}, **LLAMA_CLASS), FormatError, match)


def test_a_token_far_beyond_a_tiktoken_file_is_refused(tmp_path: Path) -> None:
    listed = {str(1 << 62): {"content": "<|far|>"}}
    files = {"tokenizer.model": tiktoken_file()}
    folder = folder_of(tmp_path, files, **LLAMA_CLASS, added_tokens_decoder=listed)
    refused(folder, FormatError, "lies far beyond")


@pytest.mark.parametrize("model", [LLAMA_MODEL, T5_MODEL, tiktoken_file()])
def test_any_beginning_and_any_flipped_byte_is_an_error_or_a_tokenizer(
    tmp_path: Path, model: bytes
) -> None:
    draws = random.Random(5)
    for number in range(120):
        data = bytearray(model[: draws.randrange(len(model))] if number % 2 else model)
        for _ in range(draws.randrange(1, 4)):
            data[draws.randrange(len(data))] = draws.randrange(256)
        kind = T5_CLASS if model is T5_MODEL else LLAMA_CLASS
        folder = folder_of(tmp_path, {"tokenizer.model": bytes(data)}, **kind)
        try:
            read = Tokenizer.from_folder(folder)
            read.decode(read.encode("the cat  sat\n🙂 ﬁ½"))
        except EverystepError:
            continue


def run_of(count: int) -> Change:
    """A change that adds pieces of one letter, up to so many of it, which can be cut anywhere."""

    def change(proto: Any) -> None:
        for length in range(1, count + 1):
            proto.pieces.add(piece="☃" * length, score=-1000.0 - length)

    return change


def test_long_tokens_take_no_endless_time(tmp_path: Path) -> None:
    runs = {"a" * length: length - 1 for length in range(1, 1500)}
    merges = "\n".join(f"{'a' * length} a" for length in range(1, 1499))
    files = {"vocab.json": json.dumps(runs), "merges.txt": merges}
    started = time.perf_counter()
    Tokenizer.from_folder(folder_of(tmp_path / "json", files, **GPT2_CLASS)).encode("a" * 4_000)
    files = {"tokenizer.model": changed(LLAMA_MODEL, run_of(400))}
    Tokenizer.from_folder(folder_of(tmp_path / "model", files, **LLAMA_CLASS)).encode("☃" * 4_000)
    assert time.perf_counter() - started < 60


def test_tokens_that_can_be_cut_without_end_are_refused(tmp_path: Path) -> None:
    files = {"tokenizer.model": changed(LLAMA_MODEL, run_of(1500))}
    refused(folder_of(tmp_path, files, **LLAMA_CLASS), FormatError, "can be cut in too many ways")


def test_tokens_of_endless_length_together_are_refused(tmp_path: Path) -> None:
    def change(proto: Any) -> None:
        for number in range(2200):
            proto.pieces.add(piece=f"{number}" + "x" * 4000, score=-1000.0 - number)

    files = {"tokenizer.model": changed(T5_MODEL, change)}
    refused(folder_of(tmp_path, files, **T5_CLASS), FormatError, "are too long")
