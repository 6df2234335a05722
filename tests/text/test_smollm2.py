"""The original SmolLM2 tokenizer's ids on 200 lines; data/README.md says how they were made."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from everystep.files.gguf import read_gguf
from everystep.text import Tokenizer
from tests.text.reading import lines, smollm2, smollm2_ids, smollm2_metadata

CASES = list(zip(lines(), smollm2_ids(), strict=True))
# The bytes of these lines that the vocabulary has no token for; the original leaves them out too.
UNKNOWN = b"\x04\x06\x13\x14\x16\x1d\xf1\xf2"


def test_the_lines_cover_what_they_should() -> None:
    text = "\n".join(lines())
    scripts = {unicodedata.name(c, "?").split()[0] for c in text if c.isalpha()}
    assert len(lines()) == 200
    assert {"LATIN", "GREEK", "CYRILLIC", "HEBREW", "ARABIC", "CJK", "HANGUL"} <= scripts
    assert all(part in text for part in ("😀", "    ", "\t\t", "1234567890", "def f(x)"))


@pytest.mark.parametrize(("text", "ids"), CASES)
def test_ids_are_the_originals(text: str, ids: list[int]) -> None:
    assert smollm2()(text)["input_ids"] == ids


@pytest.mark.parametrize(("text", "ids"), CASES)
def test_ids_decode_to_the_line(text: str, ids: list[int]) -> None:
    spelled = text.encode().translate(None, delete=UNKNOWN)
    assert smollm2().decode(ids) == spelled.decode("utf-8", "replace")


@pytest.mark.parametrize("rule", ["gpt-2", "qwen2", "llama-bpe", "default"])
def test_the_lines_tell_other_splitting_rules_apart(rule: str) -> None:
    metadata = {
        **smollm2_metadata(),
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.add_bos_token": False,
    }
    other = Tokenizer.from_gguf(metadata)(lines())["input_ids"]
    assert sum(a != b for a, b in zip(other, smollm2_ids(), strict=True)) >= 5


def test_the_names_of_special_tokens_come_from_the_file() -> None:
    tokenizer = smollm2()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    assert tokenizer.all_special_ids == list(range(17))


def test_the_file_says_that_no_bos_is_added() -> None:
    assert smollm2()("Hi")["input_ids"] == smollm2()("Hi", add_special_tokens=False)["input_ids"]


def test_the_chat_template_writes_the_default_system_message() -> None:
    prompt = smollm2().apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_the_stored_vocabulary_is_the_files(model_path: Path) -> None:
    file = read_gguf(model_path)
    assert {key: file.metadata[key] for key in smollm2_metadata()} == smollm2_metadata()
