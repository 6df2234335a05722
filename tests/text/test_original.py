"""Folders without `tokenizer.json`: the same ids as transformers' class of that name, on any text.

Where transformers itself leaves the model that was trained, sentencepiece or tiktoken judges.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import everystep as es
from everystep.errors import UnsupportedError
from everystep.text import Detokenizer, Tokenizer
from everystep.text.pieces import byte_alphabet
from everystep.text.pretokenizers import LLAMA3, QWEN2
from tests.cli.tiny_model import write_tiny_model
from tests.text.originals import (
    GEMMA,
    LLAMA,
    T5,
    TEXTS,
    folder_of,
    merge_files,
    pieces,
    ranks,
    tiktoken_file,
)
from tests.text.reading import lines

Sides = tuple[Callable[[str], list[int]], Callable[[str], list[int]]]

LETTERS = "abcdeht  '\n\t.,0123éß日の🙂\u0301ﬁ½\u00a0\u200b\x00\x1f▁<>\u2028\ufeff\u3000ＡÅ"
ANY = st.one_of(
    st.text(st.sampled_from(LETTERS), max_size=30),
    st.text(max_size=20),
    st.lists(st.sampled_from(" ".join(lines()).split()), max_size=8).map(" ".join),
)
LLAMA_BPE = {"model_type": "bpe", "byte_fallback": True, **LLAMA}
LLAMA_UNIGRAM = {**LLAMA_BPE, "model_type": "unigram"}
NO_BYTES = {"byte_fallback": False}


def both(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


def agree(folder: Path, texts: tuple[str, ...] = TEXTS) -> Tokenizer:
    """Ids, texts, offsets and names are those of transformers."""
    ours, theirs = both(folder)
    for text in texts:
        mine = ours(text, return_offsets_mapping=True)
        known = theirs(text, return_offsets_mapping=True)
        assert mine["input_ids"] == known["input_ids"], text
        assert [tuple(one) for one in mine["offset_mapping"]] == known["offset_mapping"], text
        for skip in (False, True):
            ids = mine["input_ids"]
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert ours.special_tokens_map.items() <= theirs.special_tokens_map.items()
    return ours


BYTE_LEVEL = ["GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_prefix_space": True},
        {"add_bos_token": True, "bos_token": "<s>"},
        {"add_eos_token": True, "unk_token": None},
        {"eos_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True}},
        {"pad_token": "<|new|>"},
        {"added_tokens_decoder": {"800": {"content": "<|none|>", "special": True}}},
    ],
)
@pytest.mark.parametrize("name", [*BYTE_LEVEL, "RobertaTokenizer", "BartTokenizer"])
def test_merges_of_each_class(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    agree(folder_of(tmp_path, merge_files(), tokenizer_class=name, **config))


def test_an_older_list_of_added_tokens(tmp_path: Path) -> None:
    files = {**merge_files(), "added_tokens.json": {"<|b|>": 801, "<|a|>": 800}}
    ours = agree(folder_of(tmp_path, files, tokenizer_class="Qwen2TokenizerFast"), ("x<|b|>y",))
    assert ours.convert_tokens_to_ids(["<|a|>", "<|b|>"]) == [800, 801]


@pytest.mark.parametrize("further", [{}, {"split_digits": True}, {"split_by_whitespace": False}])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"legacy": True},
        {"legacy": None, "add_bos_token": True, "add_eos_token": True},
        {"added_tokens_decoder": {"900": {"content": "<|none|>", "special": True}}},
    ],
)
def test_merges_of_sentencepiece_as_llama(
    tmp_path: Path, config: dict[str, Any], further: dict[str, Any]
) -> None:
    model = {"tokenizer.model": pieces(**LLAMA_BPE, **further)}
    agree(folder_of(tmp_path, model, tokenizer_class="LlamaTokenizer", **config))


def test_no_space_before_texts_where_neither_model_nor_class_wants_it(tmp_path: Path) -> None:
    model = {"tokenizer.model": pieces(**LLAMA_BPE, add_dummy_prefix=False)}
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    ours = agree(folder_of(tmp_path, model, **config))
    assert [ours.decode(ours.encode(text)) for text in TEXTS[:8]] == list(TEXTS[:8])


def test_symbols_that_users_defined_are_matched_whole(tmp_path: Path) -> None:
    texts = ("foo", "a foo b", "foofoo", "a<sep>b", "food", "x <sep>", "a  foo")
    model = pieces(**LLAMA_BPE, user_defined_symbols=["foo", "<sep>"])
    ours = agree(
        folder_of(tmp_path, {"tokenizer.model": model}, tokenizer_class="LlamaTokenizer"), texts
    )
    assert ours.encode("a<sep>b", add_special_tokens=False)[-2] == ours.backend.token_to_id("<sep>")
    assert "<sep>" in ours.decode(ours.encode("a<sep>b"), skip_special_tokens=True)


def test_gemma(tmp_path: Path) -> None:
    model = {"tokenizer.model": pieces(model_type="bpe", byte_fallback=True, **GEMMA)}
    ours = agree(folder_of(tmp_path, model, tokenizer_class="GemmaTokenizer", add_bos_token=True))
    assert ours.encode("a")[0] == ours.bos_token_id == 2


@pytest.mark.parametrize("config", [{}, {"extra_ids": 3}, {"model_max_length": 512}])
def test_t5(tmp_path: Path, config: dict[str, Any]) -> None:
    model = {"spiece.model": pieces(model_type="unigram", **T5)}
    texts = (*TEXTS, "a <extra_id_0> b <extra_id_1>.")
    ours = agree(folder_of(tmp_path, model, tokenizer_class="T5Tokenizer", **config), texts)
    assert ours.encode("a")[-1] == 1
    assert ours.convert_ids_to_tokens(len(ours) - 1) == "<extra_id_0>"


# Without a class the model's family says which


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("gpt2", merge_files()),
        ("qwen2", merge_files()),
        ("bart", merge_files()),
        ("gpt_neox", merge_files()),
        ("gemma2", {"tokenizer.model": pieces(model_type="bpe", byte_fallback=True, **GEMMA)}),
        ("t5", {"spiece.model": pieces(model_type="unigram", **T5)}),
    ],
)
def test_the_class_goes_with_the_model(tmp_path: Path, kind: str, files: dict[str, Any]) -> None:
    agree(folder_of(tmp_path, {**files, "config.json": {"model_type": kind}}))


def test_llama_models_have_llama_tokenizers(tmp_path: Path) -> None:
    files = {"tokenizer.model": pieces(**LLAMA_BPE)}
    named = folder_of(tmp_path / "named", files, tokenizer_class="LlamaTokenizer")
    known = folder_of(tmp_path / "known", {**files, "config.json": {"model_type": "mistral"}})
    own, other = Tokenizer.from_folder(named), Tokenizer.from_folder(known)
    assert own.backend.to_str() == other.backend.to_str()


# Any text


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sides]:
    """Name -> this library's and the oracle's way from a text to ids."""
    home = tmp_path_factory.mktemp("sides")
    found: dict[str, Sides] = {}
    models = {
        "llama": ("LlamaTokenizer", pieces(**LLAMA_BPE)),
        "no bytes": ("LlamaTokenizer", pieces(**{**LLAMA_BPE, **NO_BYTES})),
        "unigram": ("LlamaTokenizer", pieces(**LLAMA_UNIGRAM)),
        "unigram, no bytes": (
            "LlamaTokenizer",
            pieces(**{**LLAMA_UNIGRAM, **NO_BYTES}),
        ),
        "gemma": ("GemmaTokenizer", pieces(model_type="bpe", byte_fallback=True, **GEMMA)),
        "t5": ("T5Tokenizer", pieces(model_type="unigram", **T5)),
        "t5 with bytes": ("T5Tokenizer", pieces(model_type="unigram", byte_fallback=True, **T5)),
    }
    for name, (kind, model) in models.items():
        ours, theirs = None, sentencepiece.SentencePieceProcessor(model_proto=model)
        folder = folder_of(home / name, {"tokenizer.model": model}, tokenizer_class=kind)
        ours = Tokenizer.from_folder(folder)
        found[name] = (without_ends(ours), theirs.encode)
        if name in ("llama", "gemma", "t5"):
            known = AutoTokenizer.from_pretrained(folder)
            found[f"{name} of transformers"] = (ours.encode, known.encode)
    for kind in (*BYTE_LEVEL, "RobertaTokenizer"):
        ours, known = both(folder_of(home / kind, merge_files(), tokenizer_class=kind))
        found[kind] = (ours.encode, known.encode)
    file = folder_of(
        home / "ranks", {"tokenizer.model": tiktoken_file()}, tokenizer_class="TokenizersBackend"
    )
    oracle = tiktoken.Encoding("own", pat_str=LLAMA3, mergeable_ranks=ranks(), special_tokens={})
    found["tiktoken"] = (Tokenizer.from_folder(file).encode, oracle.encode_ordinary)
    return found


def without_ends(ours: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: ours.encode(text, add_special_tokens=False)


def outside_differences(name: str, text: str) -> bool:
    """Whether sentencepiece itself is to be followed: docs/decisions/046 lists where it is not."""
    if "<" in text:  # the text of a special token is that token
        return False
    if name in ("llama", "no bytes", "unigram", "unigram, no bytes"):
        return not text.startswith((" ", "▁"))
    if name.startswith("t5") and "of" not in name:
        whole = unicodedata.normalize("NFD", text)
        spaces = "\x85" not in text  # a space to Unicode, a letter to the rules
        return spaces and whole == text and not any(map(unicodedata.combining, text))
    return True


NAMES = [
    *("llama", "no bytes", "unigram", "unigram, no bytes", "gemma", "t5", "t5 with bytes"),
    *(f"{name} of transformers" for name in ("llama", "gemma", "t5")),
    *(*BYTE_LEVEL, "RobertaTokenizer", "tiktoken"),
]


@pytest.mark.parametrize("name", NAMES)
@given(text=ANY)
def test_any_text_has_the_ids_of_the_oracle(sides: dict[str, Sides], name: str, text: str) -> None:
    ours, theirs = sides[name]
    if "of" in name or name in BYTE_LEVEL or outside_differences(name, text):
        assert ours(text) == theirs(text)


def test_where_the_reference_leaves_sentencepiece_it_is_followed(sides: dict[str, Sides]) -> None:
    """A space that a text begins with stands for the one that is added; accents after ligatures."""
    for name, text in (("llama", " the cat"), ("t5", "ﬁ\u0301")):
        ours, theirs = sides[name]
        assert ours(text) != theirs(text)
        own, reference = sides[f"{name} of transformers"]
        assert own(text) == reference(text)


# tiktoken


def test_a_tiktoken_file_with_the_tokens_of_the_configuration(tmp_path: Path) -> None:
    size = len(ranks())
    listed = {str(size + 3): {"content": "<|eot|>", "special": True}}
    folder = folder_of(
        tmp_path,
        {"tokenizer.model": tiktoken_file()},
        tokenizer_class="PreTrainedTokenizerFast",
        added_tokens_decoder=listed,
        eos_token="<|eot|>",
    )
    ours = agree(folder, (*TEXTS, "a<|eot|>"))
    assert (ours.eos_token_id, len(ours)) == (size + 3, size + 4)
    assert ours.convert_ids_to_tokens(size) == f"<|reserved_token_{size}|>"


def test_a_tiktoken_file_of_the_first_qwen(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(
        folder_of(tmp_path, {"qwen.tiktoken": tiktoken_file()}, tokenizer_class="QWenTokenizer")
    )
    size = len(ranks())
    named = {"<|endoftext|>": size, "<|im_start|>": size + 1, "<|im_end|>": size + 2}
    oracle = tiktoken.Encoding("own", pat_str=QWEN2, mergeable_ranks=ranks(), special_tokens=named)
    for text in (*TEXTS[:9], "<|im_start|>user\nhi<|im_end|>"):
        composed = unicodedata.normalize("NFC", text)
        assert ours.encode(text) == oracle.encode(composed, allowed_special="all"), text
    assert (len(ours), ours.convert_ids_to_tokens(size + 207)) == (size + 208, "<|extra_204|>")


# What goes on with such a tokenizer


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("LlamaTokenizer", {"tokenizer.model": pieces(**LLAMA_BPE)}),
        ("T5Tokenizer", {"spiece.model": pieces(model_type="unigram", byte_fallback=True, **T5)}),
        ("Qwen2Tokenizer", merge_files()),
        ("TokenizersBackend", {"tokenizer.model": tiktoken_file()}),
    ],
)
def test_it_streams_and_is_saved_with_a_tokenizer_json(
    tmp_path: Path, kind: str, files: dict[str, Any]
) -> None:
    read = Tokenizer.from_folder(folder_of(tmp_path / "old", files, tokenizer_class=kind))
    read.save_pretrained(tmp_path / "new")
    again, theirs = both(tmp_path / "new")
    for text in TEXTS:
        ids = read.encode(text)
        assert again.encode(text) == ids == theirs.encode(text)
        detokenizer = Detokenizer(read, skip_special_tokens=False)
        streamed = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
        assert streamed == read.decode(ids)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(
        tmp_path, {"tokenizer.model": pieces(**LLAMA_BPE)}, tokenizer_class="LlamaTokenizer"
    )
    for module in ("sentencepiece", "google.protobuf"):
        with monkeypatch.context() as gone:
            gone.delitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", raising=False)
            gone.setitem(sys.modules, module, None)
            if module == "google.protobuf":
                gone.delattr(sentencepiece, "sentencepiece_model_pb2", raising=False)
            with pytest.raises(UnsupportedError, match=r"pip install 'everystep\[sentencepiece\]'"):
                Tokenizer.from_folder(folder)


def test_a_model_loads_with_it(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    letters = {letter: id for id, letter in enumerate(byte_alphabet().values())}
    folder_of(folder, {"vocab.json": letters, "merges.txt": ""}, tokenizer_class="GPT2Tokenizer")
    model, tokenizer = es.load(folder)
    assert len(tokenizer.encode("abc")) == 3
    assert isinstance(es.generate(model, tokenizer, "ab", max_new_tokens=2), str)
