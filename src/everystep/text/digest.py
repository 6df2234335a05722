"""A digest of a tokenizer."""

from __future__ import annotations

import hashlib
from typing import Any

_PROBE = "Hello, World! 12.5 naïve Ωμέγα 日本語 🙂\n\t{'a': 1}"


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a text that is equal for tokenizers that spell alike: judged by a text, their size,
    special tokens and chat template, and 256 of their tokens."""
    if tokenizer is None:
        return "none"
    count = len(tokenizer)
    sample = [*range(0, count, max(1, count // 256))]
    parts = (
        count,
        tokenizer.convert_ids_to_tokens(sample),
        tokenizer.encode(_PROBE),
        tokenizer.all_special_tokens,
        tokenizer.chat_template,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
