"""The recorded texts, ids and vocabularies of tests/text/data; see the README there."""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path
from typing import Any

from everystep.text import Tokenizer

DATA = Path(__file__).parent / "data"


def lines() -> list[str]:
    """The 200 texts."""
    text = (DATA / "lines.txt").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def smollm2_ids() -> list[list[int]]:
    """The recorded ids of each line."""
    return json.loads((DATA / "smollm2_ids.json").read_text())


@functools.cache
def smollm2_metadata() -> dict[str, Any]:
    """The tokenizer's metadata of the GGUF file; do not change it in place."""
    return json.loads(lzma.decompress((DATA / "smollm2_vocabulary.json.xz").read_bytes()))


@functools.cache
def smollm2() -> Tokenizer:
    """The tokenizer of SmolLM2-135M-Instruct; do not change it in place."""
    return Tokenizer.from_gguf(smollm2_metadata())


@functools.cache
def sentencepiece() -> dict[str, Any]:
    """A small SentencePiece model as GGUF metadata, with texts and their ids."""
    return json.loads((DATA / "sentencepiece.json").read_text())


# The template that many models tuned on chats bring.
CHATML_OF_MANY = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
