"""The fields of a configuration that are drawn: how often each is set, for which draws, to what.

`OPTIONS` is the table to grow. What a draw is beside its fields is known to `draws`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.parity.text import spellings

Mode = Literal["greedy", "sample", "beam", "beam_sample", "lookup"]
MODES: Mapping[Mode, float] = {
    "greedy": 0.24,
    "sample": 0.26,
    "beam": 0.2,
    "beam_sample": 0.16,
    "lookup": 0.14,
}


@dataclass(frozen=True)
class Shape:
    """What is known of a draw before its options are chosen. `width`: columns of the rectangle that
    tokens are added to. `encodes`: whether an encoder reads the prompts."""

    mode: Mode
    vocabulary: int
    batch: int
    width: int
    eos: tuple[int, ...]
    beams: int
    encodes: bool = False

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.mode in ("sample", "beam_sample")

    @property
    def looks_up(self) -> bool:
        """Whether tokens are drafted by copying."""
        return self.mode == "lookup"

    @property
    def beamed(self) -> bool:
        """Whether there are beams."""
        return self.beams > 1


Rng = random.Random


@dataclass(frozen=True)
class Option:
    """A field that is set in a share of the draws for which `when` holds."""

    name: str
    chance: float
    value: Callable[[Rng, Shape], Any]
    when: Callable[[Shape], bool] = field(default=lambda shape: True)


def _sampled(shape: Shape) -> bool:
    return shape.sampled


def _beamed(shape: Shape) -> bool:
    return shape.beamed


def _ends(shape: Shape) -> bool:
    return bool(shape.eos)


def _single(shape: Shape) -> bool:
    return shape.mode in ("greedy", "sample") and not shape.encodes


def _undrafted(shape: Shape) -> bool:
    return not shape.looks_up


def _token(rng: Rng, shape: Shape) -> int:
    return rng.randrange(shape.vocabulary)


def _tokens(rng: Rng, shape: Shape, most: int = 4) -> list[int]:
    return rng.sample(range(shape.vocabulary), rng.randint(1, most))


def _words(rng: Rng, shape: Shape) -> list[list[int]]:
    """Distinct runs of one to three ids."""
    words = {tuple(_tokens(rng, shape, 3)) for _ in range(rng.randint(1, 6))}
    return [list(word) for word in sorted(words)]


def _bias(rng: Rng, shape: Shape) -> Any:
    values = [(word, rng.uniform(-5, 5)) for word in _words(rng, shape)]
    if rng.random() < 0.5:
        return [[word, value] for word, value in values]
    return {tuple(word): value for word, value in values}


def _close_to_one(rng: Rng, shape: Shape) -> float:
    return rng.choice([0.5, 0.8, 1.1, 1.3, 2.0])


def _watermark(rng: Rng, shape: Shape) -> dict[str, Any]:
    """SynthID where transformers knows its rows, or a green list."""
    if not (shape.beamed or shape.looks_up) and rng.random() < 0.5:
        return _synthid(rng)
    return _green_list(rng, shape)


def _green_list(rng: Rng, shape: Shape) -> dict[str, Any]:
    """Sometimes one that rules nearly everything else out. transformers hashes the best 40 tokens
    with themselves, and one of them at least has to be green."""
    hashed = shape.vocabulary >= 40 and rng.random() < 0.5
    return {
        "greenlist_ratio": rng.choice([0.5, 0.9] if hashed else [0.1, 0.25, 0.5, 0.9]),
        "bias": rng.choice([0.5, 2.0, 50.0]),
        "context_width": rng.choice([1, 1, 2]),
        "seeding_scheme": "selfhash" if hashed else "lefthash",
    }


def _synthid(rng: Rng) -> dict[str, Any]:
    """Few keys or many, and contexts and tables so small that they repeat."""
    return {
        "ngram_len": rng.randint(2, 5),
        "keys": [rng.randrange(1000) for _ in range(rng.choice([1, 3, 12]))],
        "context_history_size": rng.choice([1, 4, 1024]),
        "sampling_table_seed": rng.randrange(9),
        "sampling_table_size": rng.choice([7, 2**8, 2**16]),
        "skip_first_ngram_calls": rng.random() < 0.3,
        "debug_mode": rng.random() < 0.1,
    }


def _stop_strings(rng: Rng, shape: Shape) -> str | list[str]:
    """Parts of what two tokens spell, so that they may begin in one and end in another."""
    found = []
    for _ in range(rng.randint(1, 3)):
        text = "".join(rng.choices(spellings(shape.vocabulary), k=2))
        start = rng.randrange(len(text))
        found.append(text[start : start + rng.randint(1, 3)])
    return found[0] if rng.random() < 0.4 else found


def _cache(rng: Rng, shape: Shape) -> str:
    """Drafts need a cache that can be truncated."""
    return "dynamic" if shape.looks_up else rng.choice(["dynamic", "static", "static", "static"])


def _negative(rng: Rng, shape: Shape) -> list[list[int]]:
    """One prompt to guide away from per row, all of one length."""
    length = rng.randint(1, 5)
    return [[_token(rng, shape) for _ in range(length)] for _ in range(shape.batch)]


def _decay(rng: Rng, shape: Shape) -> tuple[int, float]:
    return rng.randint(0, 6), rng.choice([0.9, 1.05, 1.2, 1.5])


OPTIONS: tuple[Option, ...] = (
    Option("temperature", 0.45, lambda r, s: r.choice([0.05, 0.5, 0.8, 1.3, 2.0, 5.0]), _sampled),
    Option("top_k", 0.4, lambda r, s: r.choice([0, 1, 3, 8, 20, s.vocabulary + 9]), _sampled),
    Option("top_p", 0.35, lambda r, s: r.choice([0.01, 0.3, 0.7, 0.9, 0.99]), _sampled),
    Option("min_p", 0.2, lambda r, s: r.choice([0.0, 0.01, 0.1, 0.5]), _sampled),
    Option("typical_p", 0.2, lambda r, s: r.choice([0.1, 0.5, 0.9]), _sampled),
    Option("epsilon_cutoff", 0.18, lambda r, s: r.choice([1e-4, 0.01, 0.2]), _sampled),
    Option("eta_cutoff", 0.18, lambda r, s: r.choice([1e-4, 0.01, 0.2]), _sampled),
    Option("top_h", 0.18, lambda r, s: r.choice([0.1, 0.4, 0.9, 1.0]), _sampled),
    Option("repetition_penalty", 0.2, _close_to_one),
    Option("encoder_repetition_penalty", 0.08, _close_to_one),
    Option("no_repeat_ngram_size", 0.15, lambda r, s: r.randint(1, 4)),
    Option("encoder_no_repeat_ngram_size", 0.08, lambda r, s: r.randint(1, 3)),
    Option("bad_words_ids", 0.15, _words),
    Option("sequence_bias", 0.15, _bias),
    Option("suppress_tokens", 0.12, _tokens),
    Option("begin_suppress_tokens", 0.12, _tokens),
    Option("forced_bos_token_id", 0.08, _token),
    Option("forced_eos_token_id", 0.1, lambda r, s: r.choice([_token(r, s), _tokens(r, s, 3)])),
    Option("exponential_decay_length_penalty", 0.12, _decay, _ends),
    Option("renormalize_logits", 0.15, lambda r, s: True),
    Option("remove_invalid_values", 0.12, lambda r, s: True),
    Option("watermarking_config", 0.15, _watermark),
    Option("negative_prompt_ids", 0.7, _negative, _single),
    Option("guidance_scale", 0.3, lambda r, s: r.choice([0.5, 1.5, 3.0]), _single),
    Option("length_penalty", 0.5, lambda r, s: r.choice([-1.0, 0.0, 0.5, 2.0]), _beamed),
    Option("early_stopping", 0.5, lambda r, s: r.choice([True, "never"]), _beamed),
    Option("min_length", 0.1, lambda r, s: s.width + r.randint(-2, 10)),
    Option("min_new_tokens", 0.12, lambda r, s: r.randint(1, 12)),
    Option("prefill_chunk_size", 0.15, lambda r, s: r.randint(1, 5)),
    Option("use_cache", 0.1, lambda r, s: False, _undrafted),
    Option("cache_implementation", 0.3, _cache),
    Option("max_cache_len", 0.5, lambda r, s: r.choice([1, 40, 70])),
    Option("stop_strings", 0.12, _stop_strings, _ends),
    Option("max_time", 0.1, lambda r, s: r.choice([0.0, 1000.0, 1000.0])),
)
