"""Small vocabularies of the kinds of folders without `tokenizer.json`, trained on the spot."""

from __future__ import annotations

import base64
import functools
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from everystep.text.pieces import byte_alphabet
from tests.text.reading import lines

# Texts in which spaces, scripts, digits and what no vocabulary knows meet.
TEXTS = (
    "",
    "the cat",
    "two  spaces and   three",
    "ends with a space ",
    "a\nb\n\nc\td\r\ne",
    "don't, we'll: 12345.67",
    "naïve Ångström ﬁne ½ ①",
    "日本語と한국어 🙂👍🏽",
    "camelCase HTTPServer x_y",
    "<unk> <0x41> <|none|>",
)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>", "<|padding|>")
LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
GEMMA = {
    **LLAMA,
    "add_dummy_prefix": False,
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "bos_piece": "<bos>",
    "eos_piece": "<eos>",
}


@functools.cache
def _trained(options: str) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines(), "the cat sat on the mat and the dog"] * 2),
        model_writer=model,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 900, **json.loads(options)},
    )
    return model.getvalue()


def pieces(**options: Any) -> bytes:
    """A SentencePiece model that was trained with these options."""
    return _trained(json.dumps(options))


@functools.cache
def merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary with special tokens first, and its merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(lines(), trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


@functools.cache
def ranks() -> dict[bytes, int]:
    """A tiktoken vocabulary: bytes first, then what the merges make, in their order."""
    letters = {letter: byte for byte, letter in byte_alphabet().items()}
    found = {bytes([byte]): byte for byte in range(256)}
    for left, right in merges()[1]:
        found.setdefault(bytes(letters[one] for one in left + right), len(found))
    return found


def tiktoken_file() -> bytes:
    """The ranks as tiktoken writes them."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items())


def folder_of(folder: Path, files: dict[str, Any], **config: Any) -> Path:
    """A folder with these files, texts or bytes, and a `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**files, "tokenizer_config.json": config}.items():
        text = json.dumps(content) if isinstance(content, dict) else content
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def merge_files() -> dict[str, Any]:
    """`vocab.json` and `merges.txt`."""
    ids, pairs = merges()
    text = "#version: 0.2\n" + "\n".join(f"{left} {right}" for left, right in pairs) + "\n"
    return {"vocab.json": ids, "merges.txt": text}
