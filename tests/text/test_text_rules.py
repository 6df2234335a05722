"""Folders whose tokenizer.json says otherwise than their class: the file is followed, and it is
said where transformers follows the class."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from everystep.text import Tokenizer
from everystep.text.classes import CLASS_IN_TRANSFORMERS
from tests.text.originals import GEMMA, LLAMA, SPECIAL, T5, TEXTS, folder_of, merges, pieces

PIECES = {
    "LlamaTokenizer": ({"model_type": "bpe", "byte_fallback": True, **LLAMA}, "tokenizer.model"),
    "GemmaTokenizer": ({"model_type": "bpe", "byte_fallback": True, **GEMMA}, "tokenizer.model"),
    "T5Tokenizer": ({"model_type": "unigram", **T5}, "spiece.model"),
}


def of_bytes() -> tokenizers.Tokenizer:
    ids, pairs = merges()
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


def of_pieces(name: str, folder: Path) -> tokenizers.Tokenizer:
    options, file = PIECES[name]
    files = {file: pieces(**options)}
    return Tokenizer.from_folder(folder_of(folder, files, tokenizer_class=name)).backend


def digits(backend: tokenizers.Tokenizer) -> None:
    """As SmolLM2's file."""
    alone = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([alone, backend.pre_tokenizer])


def prepended(backend: tokenizers.Tokenizer) -> None:
    """As Llama 2's file."""
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(marks)
    backend.pre_tokenizer = None


def lower(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Lowercase()


def stripped(backend: tokenizers.Tokenizer) -> None:
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])


def untrimmed(backend: tokenizers.Tokenizer) -> None:
    """Otherwise than the class, and to no effect on ids."""
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)


def same(backend: tokenizers.Tokenizer) -> None:
    """As the class."""


Change = Callable[[tokenizers.Tokenizer], None]
LLAMA2 = {"model_type": "llama"}
CASES: dict[str, tuple[Change, dict[str, Any], dict[str, Any]]] = {
    "the same": (same, {"tokenizer_class": "GPT2Tokenizer"}, {}),
    "no difference in ids": (untrimmed, {"tokenizer_class": "GPT2TokenizerFast"}, {}),
    "digits": (digits, {"tokenizer_class": "GPT2Tokenizer"}, LLAMA2),
    "digits, no class": (digits, {"tokenizer_class": "PreTrainedTokenizerFast"}, LLAMA2),
    "a class of config.json": (digits, {}, {**LLAMA2, "tokenizer_class": "GPT2Tokenizer"}),
    "the class of the model": (digits, {}, {"model_type": "gpt2"}),
    "a model without a class": (digits, {}, LLAMA2),
    "a model of which files are followed": (
        digits,
        {"tokenizer_class": "GPT2Tokenizer"},
        {"model_type": "stablelm"},
    ),
    "a model of which its class is taken": (
        digits,
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"model_type": "qwen2"},
    ),
    "bytes of a Llama": (digits, {"tokenizer_class": "LlamaTokenizerFast"}, LLAMA2),
    "a space before texts": (
        same,
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {},
    ),
    "composed": (same, {"tokenizer_class": "GPTNeoXTokenizer"}, {}),
    "another expression": (same, {"tokenizer_class": "Qwen2Tokenizer"}, {"model_type": "qwen3"}),
    "lower case": (lower, {"tokenizer_class": "RobertaTokenizer"}, {}),
    "a Llama": (same, {"tokenizer_class": "LlamaTokenizer"}, LLAMA2),
    "a Llama of old": (prepended, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, LLAMA2),
    "a Llama since": (prepended, {"tokenizer_class": "LlamaTokenizer", "legacy": False}, LLAMA2),
    "a Mistral": (prepended, {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "mistral"}),
    "a Gemma": (same, {"tokenizer_class": "GemmaTokenizer"}, {"model_type": "gemma2"}),
    "a Gemma that strips": (stripped, {"tokenizer_class": "GemmaTokenizer"}, {}),
    "a T5": (same, {"tokenizer_class": "T5Tokenizer"}, {"model_type": "t5"}),
    "a T5 in lower case": (lower, {"tokenizer_class": "T5Tokenizer"}, {"model_type": "t5"}),
}
SAID = re.compile(r"by those of (\w+), .*? folder: (.*) is \[(.*?)\] .* here and \[(.*?)\] ")


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_where_transformers_has_other_ids(name: str, tmp_path: Path) -> None:
    change, config, model = CASES[name]
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    whole = kind not in PIECES or name in ("bytes of a Llama", CORRECTED)
    backend = of_bytes() if whole else of_pieces(kind, tmp_path / "pieces")
    change(backend)
    folder = folder_of(tmp_path, {"config.json": model} if model else {}, **config)
    backend.save(str(folder / "tokenizer.json"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = AutoTokenizer.from_pretrained(folder)
        caught.clear()
        ours = Tokenizer.from_folder(folder)
    as_filed = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = next(iter(ours.get_added_vocab()))
    differ = False
    for text in (*TEXTS, " the  cat", "1234", "A\u0301b", f"a{special}b {special} c"):
        own, other = (one(text, add_special_tokens=False)["input_ids"] for one in (ours, theirs))
        assert own == as_filed.encode(text, add_special_tokens=False).ids
        again = theirs.decode(own, clean_up_tokenization_spaces=False)
        differ |= own != other or ours.decode(own) != again
    assert len(caught) == differ
    for one in caught:
        found = SAID.search(str(one.message))
        assert found is not None
        assert type(theirs).__name__ == found[1]
        text = ast.literal_eval(found[2])
        for side, tokenizer in ((found[3], ours), (found[4], theirs)):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert side.removesuffix(", ...") == ", ".join(map(str, ids[:12]))


CORRECTED = "a model of which its class is taken"


def test_a_class_names_special_tokens_where_no_file_does(tmp_path: Path) -> None:
    for kind in ("LlamaTokenizer", "GemmaTokenizer", "T5Tokenizer", "GPTNeoXTokenizer"):
        backend = of_pieces(kind, tmp_path / f"{kind} 0") if kind in PIECES else of_bytes()
        config = {"tokenizer_class": kind, "mask_token": None, "add_prefix_space": None}
        if kind == "GPTNeoXTokenizer":
            backend.normalizer = normalizers.NFC()
            config["add_prefix_space"] = False
        folder = folder_of(tmp_path / kind, {}, **config)
        backend.save(str(folder / "tokenizer.json"))
        ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        for name in ("bos", "eos", "unk", "pad", "mask"):
            known = getattr(theirs, f"{name}_token")
            if known in backend.get_vocab():  # transformers adds what the vocabulary lacks
                assert getattr(ours, f"{name}_token") == known


def test_the_classes_of_models_are_those_of_transformers() -> None:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    assert CLASS_IN_TRANSFORMERS.items() <= TOKENIZER_MAPPING_NAMES.items()


def test_a_tokenizer_that_cannot_read_the_texts_is_not_compared(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="none"))
    folder = folder_of(tmp_path, {}, tokenizer_class="GPT2Tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    assert json.loads(Tokenizer.from_folder(folder).backend.to_str())["model"]["vocab"] == {"a": 0}
