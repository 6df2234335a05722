"""Random calls of the whole face, each of which a schedule must leave as it is.

A call is one of the draws of tests/parity, seeded or greedy, with settings that transformers does
not have, or that it cannot combine. What a caller brings of his own looks at one row at a time, and
nothing reads a clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice, product
from typing import Any

import tokenizers

from everystep import config
from everystep.text import Settings, Tokenizer
from tests.parity.draws import Draw, draw
from tests.parity.models import CATALOGUE, subject
from tests.parity.options import Option, Rng, Shape
from tests.parity.sides import arguments

# Rotary frequencies that follow the length are outside the laws (docs/laws.md).
MODELS = tuple(sorted(tiny.name for tiny in CATALOGUE.values() if not tiny.alone))
# What reads a clock, what changes a prompt before it is a request, and caches of the call's own,
# which a schedule does not know.
APART = {"max_time", "token_healing", "cache_implementation", "max_cache_len"}
# These look at other rows, or count calls.
ACROSS_ROWS = {"DependsOnRow", "Remembers", "StopsOnBest"}
LETTERS = "abc"
RETURNS = "num_return_sequences"


@dataclass(frozen=True)
class Call:
    """A draw, and the keywords that are no configuration."""

    draw: Draw
    own: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """What chooses its tokens."""
        sampled = "do_sample" in self.draw.settings
        if self.draw.shape.mode == "lookup":
            return "sampled lookup" if sampled else "lookup"
        return "contrastive" if "penalty_alpha" in self.draw.settings else self.draw.shape.mode

    @property
    def width(self) -> int:
        """How many rows of scores a prompt has."""
        shape = self.draw.shape
        return shape.beams if shape.beamed else self.draw.settings.get(RETURNS, 1)

    def used(self) -> set[str]:
        """Everything that is away from its default, by name."""
        return self.draw.used() | {name for name in self.own if name != "tokenizer"}

    def arguments(self) -> dict[str, Any]:
        """The keywords of the call; objects of the caller are new ones each time."""
        model = subject(self.draw.model)
        return {**arguments(self.draw, self.draw.padding, config, model), **self.own}


def calls(model: str, first: int, number: int) -> tuple[Call, ...]:
    """`number` calls of one model, from the draws that come after the one of number `first`."""
    drawn = (one for one in map(draw, count(first)) if one.model == model and not one.earlier)
    return tuple(islice(map(_call, drawn), number))


def _call(base: Draw) -> Call:
    rng = random.Random(f"calls {base.number}")
    kept = {name: value for name, value in base.settings.items() if name not in APART}
    settings = _combined(rng, base.shape, kept)
    settings |= {
        option.name: option.value(rng, base.shape)
        for option in MORE
        if rng.random() < option.chance and option.when(base.shape)
    }
    settings = _per_row(rng, base.shape, settings)
    turned = replace(
        base,
        settings={**settings, "return_dict_in_generate": True},
        processors=tuple(name for name in base.processors if name not in ACROSS_ROWS),
        criteria=tuple(name for name in base.criteria if name not in ACROSS_ROWS),
    )
    return Call(turned, dict(_own(rng, turned)))


def _combined(rng: Rng, shape: Shape, settings: dict[str, Any]) -> dict[str, Any]:
    """Drafts for sampling, and contrastive search, each in a share of the draws it is made of."""
    if shape.mode == "lookup" and rng.random() < 0.5:
        returns = {RETURNS: rng.choice([2, 3])} if rng.random() < 0.3 else {}
        return settings | {"do_sample": True, "temperature": rng.choice([0.5, 1.3])} | returns
    if shape.mode == "greedy" and rng.random() < 0.35:
        return settings | {"penalty_alpha": rng.choice([0.1, 0.6]), "top_k": rng.randint(2, 4)}
    return settings


def _per_row(rng: Rng, shape: Shape, settings: dict[str, Any]) -> dict[str, Any]:
    """Here and there a value per row."""
    for name in ("temperature", "repetition_penalty", "top_p"):
        if name in settings and rng.random() < 0.3:
            settings[name] = [
                settings[name] * rng.choice([1.0, 0.9, 0.7]) for _ in range(shape.batch)
            ]
    return settings


def _own(rng: Rng, drawn: Draw) -> Iterator[tuple[str, Any]]:
    """Seeds, of the call or of each row, and what is to be told beside the tokens."""
    yield "tokenizer", tokenizer(drawn.shape.vocabulary)
    seeds = [rng.randrange(2**31) for _ in range(drawn.shape.batch)]
    yield "seed", rng.choice([seeds, seeds[0]])
    if rng.random() < 0.2:
        yield "logprobs", rng.randint(0, 3)
    if rng.random() < 0.2 and not drawn.embedded:
        yield "prompt_logprobs", rng.randint(0, 3)


@cache
def tokenizer(vocabulary: int) -> Tokenizer:
    """Its ids stand for words of three letters, so that short texts are met often."""
    words = ("".join(word) for n in count(1) for word in product(LETTERS, repeat=n))
    ids = {word: id for id, word in enumerate(islice(words, vocabulary))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, Settings())


def _sampled(shape: Shape) -> bool:
    return shape.sampled


def _text(rng: Rng, shape: Shape) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(2, 5)))


def _strings(rng: Rng, shape: Shape) -> str | list[str]:
    return rng.choice([_text(rng, shape), [_text(rng, shape) for _ in range(2)]])


def _bias(rng: Rng, shape: Shape) -> dict[int, float]:
    return {token: rng.uniform(-3, 3) for token in rng.sample(range(shape.vocabulary), 3)}


def _synthid(rng: Rng, shape: Shape) -> dict[str, Any]:
    return {"ngram_len": rng.randint(2, 4), "keys": [rng.randrange(1000) for _ in range(4)]}


MORE: tuple[Option, ...] = (
    Option("stop_strings", 0.25, _strings),
    Option("watermarking_config", 0.06, _synthid, _sampled),
    Option("presence_penalty", 0.1, lambda r, s: r.choice([-1.0, 0.5, 1.5])),
    Option("frequency_penalty", 0.1, lambda r, s: r.choice([-0.5, 0.5, 1.0])),
    Option("logit_bias", 0.1, _bias),
    Option("dry_multiplier", 0.1, lambda r, s: r.choice([0.5, 1.0])),
    Option("top_n_sigma", 0.08, lambda r, s: r.choice([1.0, 2.0]), _sampled),
    Option("xtc_probability", 0.12, lambda r, s: r.choice([0.3, 0.9]), _sampled),
    Option("mirostat_tau", 0.08, lambda r, s: r.choice([2.0, 4.0]), _sampled),
    Option("dynatemp_range", 0.08, lambda r, s: r.choice([0.01, 0.04]), _sampled),
)
