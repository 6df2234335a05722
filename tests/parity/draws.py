"""Random settings of `generate`, each a piece of data that its number alone determines.

A draw is consistent: it has no field that its mode would not read. Which fields there are is known
to `options`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tests.parity.models import CATALOGUE, TINIES, Tiny
from tests.parity.options import MODES, OPTIONS, Mode, Option, Rng, Shape
from tests.parity.parts import CRITERIA, PROCESSORS
from tests.parity.text import LETTERS, own_tokenizer


@dataclass(frozen=True)
class Earlier:
    """A call before the draw's own, which goes on from its cache: it read the first `read` columns
    of the prompts, was made to generate what follows them, and left `cached` columns in a cache of
    the named kind. `apart`: the draw's own call is given the columns behind those alone."""

    read: int
    cached: int
    kind: Literal["dynamic", "static"]
    apart: bool


@dataclass(frozen=True)
class Draw:
    """One call. `padding`: the side that this library gets; transformers gets the left, but for
    the prompts of an encoder. `masked`: whether the mask is passed. `as_config`: whether settings
    are passed as an object. `embedded`: whether the prompts are passed as embeddings and nothing
    else. `unsaid`: whether the prompts are begin tokens, and not passed at all. `begun`: ids that
    the decoder behind an encoder begins with."""

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
    unsaid: bool = False
    begun: tuple[tuple[int, ...], ...] = ()
    earlier: Earlier | None = None

    @property
    def seed(self) -> int:
        """What torch's generator is set to before either side runs."""
        return self.number

    @property
    def span(self) -> int:
        """The length of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def ragged(self) -> bool:
        """Whether prompts are padded."""
        return len(set(map(len, self.prompts))) > 1

    def used(self) -> set[str]:
        """Everything that is away from its default, by name."""
        own: dict[str, Any] = {
            "logits_processor": self.processors,
            "stopping_criteria": self.criteria,
            "prefix_allowed_tokens_fn": self.prefix,
            "inputs_embeds": self.embedded,
            "decoder_input_ids": self.begun,
            "past_key_values": self.earlier,
        }
        return {*self.settings, *(name for name, value in own.items() if value)}


# What transformers cannot combine with embeddings, or gets wrong (docs/parity.md).
NEED_IDS = (
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "guidance_scale",
    "use_cache",
    "prefill_chunk_size",
    "repetition_penalty",
)


def draw(number: int, model: str | None = None) -> Draw:
    """The draw of a number, always the same, of any model of the catalogue or of the one named."""
    rng = random.Random(f"parity {number}")
    drawn = rng.choice(sorted(CATALOGUE))
    tiny = TINIES[model or drawn]
    shape, lengths = _shape(rng, tiny)
    pad = _pad(rng, shape)
    ragged = len(set(lengths)) > 1
    guessable = pad is not None and pad not in shape.eos
    masked = rng.random() < 0.6 or (ragged and not guessable)
    one = Draw(
        number=number,
        model=tiny.name,
        shape=shape,
        prompts=tuple(_prompt(rng, shape, length, pad) for length in lengths),
        padding="right" if ragged and (rng.random() < 0.3 or tiny.placed) else "left",
        fill=_fill(rng, shape, pad, masked),
        masked=masked,
        as_config=rng.random() < 0.2,
        settings=_special(shape, pad, rng),
        processors=_some(rng, PROCESSORS, 0.15) if not shape.looks_up else (),
        criteria=_some(rng, CRITERIA, 0.12) if shape.eos else (),
        prefix=rng.random() < 0.08,
    )
    found = _with_settings(rng, _decoded(rng, one) if tiny.encodes else _entered(rng, one), tiny)
    return _spelled_apart(found) if "stop_strings" in found.settings else found


def _spelled_apart(draw: Draw) -> Draw:
    """Padding that no stop string can begin in: see "Stop strings that begin in padding"."""
    return replace(draw, fill=draw.shape.vocabulary - 1, masked=True)


def _shape(rng: Rng, tiny: Tiny) -> tuple[Shape, list[int]]:
    """A mode and what goes with it, and the lengths of the prompts."""
    mode = rng.choices(list(MODES), list(MODES.values()))[0]
    if tiny.alone and mode == "lookup":
        mode = "greedy"
    lengths = _lengths(rng, mode, tiny.alone)
    eos = _eos(rng, tiny.vocabulary)
    beams = rng.randint(2, 4) if mode.startswith("beam") else 1
    vocabulary, width = tiny.vocabulary, max(lengths)
    return Shape(mode, vocabulary, len(lengths), width, eos, beams, tiny.encodes), lengths


def _entered(rng: Rng, one: Draw) -> Draw:
    """How the prompts of a decoder are passed: mostly as ids, whole and by themselves."""
    ways = {"ids": 0.57, "embedded": 0.1, "unsaid": 0.07, "earlier": 0.17, "healed": 0.09}
    way = rng.choices(list(ways), list(ways.values()))[0]
    if way == "embedded" and not one.shape.looks_up:
        return replace(one, embedded=True, prefix=False)
    if way == "earlier" and min(map(len, one.prompts)) > 1 and not TINIES[one.model].alone:
        return _continuing(rng, one)
    if way == "healed":
        return _healed(rng, one)
    return _unsaid(rng, one) if way == "unsaid" else one


def _healed(rng: Rng, one: Draw) -> Draw:
    """Prompts of one length that are what the tokenizer makes of their text."""
    length = max(one.span, 2)
    tokenizer = own_tokenizer(one.shape.vocabulary)
    # The first tokens of a text are the tokens of what they spell.
    texts = ("".join(rng.choices(LETTERS, k=4 * length)) for _ in one.prompts)
    return replace(
        one,
        prompts=tuple(tuple(tokenizer.encode(text)[:length]) for text in texts),
        padding="left",
        masked=True,
        shape=replace(one.shape, width=length),
        settings={**one.settings, "token_healing": True},
    )


def _unsaid(rng: Rng, one: Draw) -> Draw:
    """A begin token stands for the prompt."""
    bos = rng.choice([token for token in range(one.shape.vocabulary) if token != one.fill])
    return replace(
        one,
        prompts=((bos,),),
        padding="left",
        masked=False,
        unsaid=True,
        shape=replace(one.shape, batch=1, width=1),
        settings={**one.settings, "bos_token_id": bos},
    )


def _continuing(rng: Rng, one: Draw) -> Draw:
    """An earlier call read something of every prompt, and left the last column uncached."""
    width = one.shape.width
    read = rng.randint(width - min(map(len, one.prompts)) + 1, width - 1)
    cached = rng.randint(read, width - 1)
    rigid = one.shape.looks_up or one.shape.beamed
    kind = "dynamic" if rigid else rng.choice(["dynamic", "static"])
    apart = rng.random() < 0.3
    shape = replace(one.shape, width=width - cached) if apart else one.shape
    earlier = Earlier(read, cached, kind, apart)
    return replace(one, earlier=earlier, shape=shape, padding="left", masked=True)


def _decoded(rng: Rng, one: Draw) -> Draw:
    """What the decoder behind an encoder begins with: a start token, one per row, or more ids."""
    batch, vocabulary = one.shape.batch, one.shape.vocabulary
    starts = [rng.randrange(vocabulary) for _ in range(batch)]
    name = "decoder_start_token_id" if rng.random() < 0.8 else "bos_token_id"
    if name == "bos_token_id" or rng.random() < 0.7:
        starts = [starts[0]] * batch
    said: Any = starts if len(set(starts)) > 1 else starts[0]
    begun: tuple[tuple[int, ...], ...] = ()
    if rng.random() < 0.4:
        length, started = rng.randint(1, 5), rng.random() < 0.5
        begun = tuple(_started(rng, vocabulary, start, length, started) for start in starts)
    own = any(row[0] == start for row, start in zip(begun, starts, strict=False))
    return replace(
        one,
        begun=begun,
        embedded=rng.random() < 0.1,
        shape=replace(one.shape, width=len(begun[0]) + (not own) if begun else 1),
        settings={**one.settings, name: said},
    )


def _started(rng: Rng, vocabulary: int, start: int, length: int, started: bool) -> tuple[int, ...]:
    """Ids that a decoder begins with, its start token among them or not."""
    first = start if started else rng.choice([t for t in range(vocabulary) if t != start])
    return (first, *(rng.randrange(vocabulary) for _ in range(length - 1)))


def _with_settings(rng: Rng, one: Draw, tiny: Tiny) -> Draw:
    shape = one.shape
    settings = {**one.settings, **_mode(rng, shape), **_reach(rng, shape)}
    settings |= {o.name: o.value(rng, shape) for o in OPTIONS if _takes(rng, o, shape)}
    settings |= _outputs(rng)
    return replace(one, settings=_consistent(settings, one, tiny))


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
        return rng.randrange(shape.vocabulary)
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


def _consistent(settings: dict[str, Any], one: Draw, tiny: Tiny) -> dict[str, Any]:
    """Without what would be read over, and without a minimum beyond the maximum."""
    for name in _idle(settings, one, tiny):
        settings.pop(name, None)
    width = one.shape.width
    longest = settings.get("max_new_tokens", settings.get("max_length", 99) - width)
    for name, least in (("min_new_tokens", 0), ("min_length", width)):
        if name in settings:
            settings[name] = max(0, min(settings[name], longest + least))
    return settings


def _idle(settings: Mapping[str, Any], one: Draw, tiny: Tiny) -> set[str]:
    """The fields that something else rules out."""
    idle: set[str] = set()
    if one.embedded:
        idle |= {*(NEED_IDS[:2] if tiny.encodes else NEED_IDS)}
    if one.earlier is not None:
        idle |= {"use_cache", "cache_implementation"}
        idle |= {"repetition_penalty"} if one.earlier.apart else set()
        idle |= {"num_return_sequences"} if one.earlier.kind == "static" else set()
    if tiny.alone:
        idle.add("guidance_scale")  # it would be another row
    if settings.get("use_cache") is False and "use_cache" not in idle:
        idle |= {"prefill_chunk_size", "cache_implementation"}
    if "guidance_scale" in idle or "guidance_scale" not in settings:
        idle.add("negative_prompt_ids")
    if "cache_implementation" in idle or settings.get("cache_implementation") != "static":
        idle.add("max_cache_len")
    return idle


def _some(rng: Rng, known: Mapping[str, Any], chance: float) -> tuple[str, ...]:
    if rng.random() >= chance:
        return ()
    return tuple(rng.sample(sorted(known), rng.randint(1, 2)))
