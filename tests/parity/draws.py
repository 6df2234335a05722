"""Random settings of `generate`, each a piece of data that its number alone determines.

`OPTIONS` is the table to grow: a field of the configuration, how often it is set, for which draws
it makes sense, and what it may be. A draw is consistent: no field that its mode would not read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.parity.models import CATALOGUE
from tests.parity.parts import CRITERIA, PROCESSORS

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
    """What is known of a draw before its options are chosen. `width`: of the longest prompt."""

    mode: Mode
    vocabulary: int
    batch: int
    width: int
    eos: tuple[int, ...]
    beams: int

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.mode in ("sample", "beam_sample")

    @property
    def beamed(self) -> bool:
        """Whether there are beams."""
        return self.beams > 1


@dataclass(frozen=True)
class Draw:
    """One call. `padding`: the side that this library gets; the reference always gets the left.
    `masked`: whether the mask is passed. `as_config`: whether settings are passed as an object.
    `embedded`: whether the prompts are passed as embeddings and nothing else."""

    number: int
    model: str
    shape: Shape
    prompts: tuple[tuple[int, ...], ...]
    padding: Literal["left", "right"]
    fill: int
    masked: bool
    as_config: bool
    settings: Mapping[str, Any]
    processors: tuple[str, ...] = ()
    criteria: tuple[str, ...] = ()
    prefix: bool = False
    embedded: bool = False

    @property
    def seed(self) -> int:
        """What torch's generator is set to before either side runs."""
        return self.number

    def used(self) -> set[str]:
        """Everything that is away from its default, by name."""
        own = {"logits_processor": self.processors, "stopping_criteria": self.criteria}
        own |= {"prefix_allowed_tokens_fn": self.prefix, "inputs_embeds": self.embedded}
        return {*self.settings, *(name for name, value in own.items() if value)}


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
    return shape.mode in ("greedy", "sample")


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
    """A green list, and sometimes one that rules nearly everything else out."""
    return {
        "greenlist_ratio": rng.choice([0.1, 0.25, 0.5, 0.9]),
        "bias": rng.choice([0.5, 2.0, 50.0]),
        "context_width": rng.choice([1, 1, 2]),
    }


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
    Option("watermarking_config", 0.08, _watermark),
    Option("negative_prompt_ids", 0.7, _negative, _single),
    Option("guidance_scale", 0.3, lambda r, s: r.choice([0.5, 1.5, 3.0]), _single),
    Option("length_penalty", 0.5, lambda r, s: r.choice([-1.0, 0.0, 0.5, 2.0]), _beamed),
    Option("early_stopping", 0.5, lambda r, s: r.choice([True, "never"]), _beamed),
    Option("min_length", 0.1, lambda r, s: s.width + r.randint(-2, 10)),
    Option("min_new_tokens", 0.12, lambda r, s: r.randint(1, 12)),
    Option("prefill_chunk_size", 0.15, lambda r, s: r.randint(1, 5)),
    Option("use_cache", 0.1, lambda r, s: False, lambda s: s.mode != "lookup"),
)

# What the reference cannot combine with embeddings, or gets wrong (docs/parity.md).
NEED_IDS = (
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "guidance_scale",
    "use_cache",
    "prefill_chunk_size",
    "repetition_penalty",
)


def draw(number: int) -> Draw:
    """The draw of a number, always the same."""
    rng = random.Random(f"parity {number}")
    tiny = CATALOGUE[rng.choice(sorted(CATALOGUE))]
    mode = rng.choices(list(MODES), list(MODES.values()))[0]
    if tiny.alone and mode == "lookup":
        mode = "greedy"
    lengths = _lengths(rng, mode, tiny.alone)
    eos = _eos(rng, tiny.vocabulary)
    beams = rng.randint(2, 4) if mode.startswith("beam") else 1
    shape = Shape(mode, tiny.vocabulary, len(lengths), max(lengths), eos, beams)
    pad = _pad(rng, shape)
    prompts = tuple(_prompt(rng, shape, length, pad) for length in lengths)
    ragged = len(set(lengths)) > 1
    guessable = pad is not None and pad not in eos
    settings = _special(shape, pad, rng) | _mode(rng, shape) | _reach(rng, shape)
    settings |= {o.name: o.value(rng, shape) for o in OPTIONS if _takes(rng, o, shape)}
    settings |= _outputs(rng)
    if tiny.alone:
        settings.pop("guidance_scale", None)  # it would be another row
    masked = rng.random() < 0.6 or (ragged and not guessable)
    embedded = mode != "lookup" and rng.random() < 0.1
    return Draw(
        number=number,
        model=tiny.name,
        shape=shape,
        prompts=prompts,
        padding="right" if ragged and rng.random() < 0.3 else "left",
        fill=_fill(rng, shape, pad, masked),
        masked=masked,
        as_config=rng.random() < 0.2,
        settings=_consistent(settings, shape, embedded),
        processors=_some(rng, PROCESSORS, 0.15) if mode != "lookup" else (),
        criteria=_some(rng, CRITERIA, 0.12) if eos else (),
        prefix=rng.random() < 0.08 and not embedded,
        embedded=embedded,
    )


def _lengths(rng: Rng, mode: Mode, alone: bool) -> list[int]:
    """Of one to four prompts; some of them are a single token, or long."""
    batch = 1 if mode == "lookup" else rng.choice([1, 1, 2, 3, 4])
    longest = rng.choice([1, 3, 8, 8, 14])
    lengths = [rng.randint(1, longest) for _ in range(batch)]
    return [lengths[0]] * batch if alone else lengths


def _eos(rng: Rng, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.sample(range(1, vocabulary), rng.choice([0, 1, 1, 2, 3, 5])))


def _pad(rng: Rng, shape: Shape) -> int | None:
    """None, an end token, the token 0, or any; a pad that is not an end is in no prompt."""
    return rng.choice([None, *shape.eos[:1], 0, *rng.sample(range(1, shape.vocabulary), 2)])


def _prompt(rng: Rng, shape: Shape, length: int, pad: int | None) -> tuple[int, ...]:
    """Random ids, or for speculation a few that repeat."""
    ids = [token for token in range(shape.vocabulary) if token != pad or token in shape.eos]
    if shape.mode == "lookup":
        ids = rng.sample(ids, 3)
    return tuple(rng.choice(ids) for _ in range(length))


def _fill(rng: Rng, shape: Shape, pad: int | None, masked: bool) -> int:
    """What the prompts are padded with: under a mask, at times anything."""
    if masked and rng.random() < 0.2:
        return _token(rng, shape)
    return pad if pad is not None else shape.eos[0] if shape.eos else 0


def _special(shape: Shape, pad: int | None, rng: Rng) -> dict[str, Any]:
    eos = shape.eos[0] if len(shape.eos) == 1 and rng.random() < 0.5 else list(shape.eos)
    found = {"eos_token_id": eos if shape.eos else None, "pad_token_id": pad}
    return {name: value for name, value in found.items() if value is not None}


def _mode(rng: Rng, shape: Shape) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if shape.sampled:
        settings["do_sample"] = True
    if shape.beamed:
        settings["num_beams"] = shape.beams
    if shape.mode == "lookup":
        settings["prompt_lookup_num_tokens"] = rng.randint(1, 6)
        if rng.random() < 0.7:
            settings["max_matching_ngram_size"] = rng.randint(1, 4)
    most = shape.beams if shape.beamed else 3 if shape.sampled else 1
    if most > 1 and rng.random() < 0.6:
        settings["num_return_sequences"] = rng.randint(2, most)
    return settings


def _reach(rng: Rng, shape: Shape) -> dict[str, Any]:
    """How far: new tokens, a total length, both, or neither."""
    new = {"max_new_tokens": rng.choice([1, 2, 6, 12, 24])}
    total = {"max_length": shape.width + rng.choice([1, 4, 10, 20])}
    return rng.choice([new, new, total, new | total, {}])


def _outputs(rng: Rng) -> dict[str, Any]:
    """Flags of outputs: mostly an object with some of them, at times a bare tensor."""
    if rng.random() < 0.15:
        return {}
    flags = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    chosen = {flag: True for flag in flags if rng.random() < 0.5}
    return {"return_dict_in_generate": True, **chosen}


def _takes(rng: Rng, option: Option, shape: Shape) -> bool:
    return rng.random() < option.chance and option.when(shape)


def _consistent(settings: dict[str, Any], shape: Shape, embedded: bool) -> dict[str, Any]:
    """Without chunks where nothing is cached, and without a minimum beyond the maximum."""
    if embedded:
        for name in NEED_IDS:
            settings.pop(name, None)
    if "guidance_scale" not in settings:
        settings.pop("negative_prompt_ids", None)
    if settings.get("use_cache") is False:
        settings.pop("prefill_chunk_size", None)
    longest = settings.get("max_new_tokens", settings.get("max_length", 99) - shape.width)
    for name, least in (("min_new_tokens", 0), ("min_length", shape.width)):
        if name in settings:
            settings[name] = min(settings[name], longest + least)
    if settings.get("min_length", 1) < 0:
        settings["min_length"] = 0
    return settings


def _some(rng: Rng, known: Mapping[str, Any], chance: float) -> tuple[str, ...]:
    if rng.random() >= chance:
        return ()
    return tuple(rng.sample(sorted(known), rng.randint(1, 2)))
