"""Fields of a body: name, kind, default and meaning, as rows of a table.

Validation, error texts, the reference and the OpenAPI document are all made of these rows. The
fields of `generate` have the names and the meanings of the table of keywords, and its kinds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from everystep.config import FIELDS
from everystep.errors import RequestError, UnknownArgumentError, nearest, shown
from everystep.requests.door import KEYWORDS

Json = Any
"""A value that JSON can hold."""

_MOST_TEXT = 1 << 24
_MOST_LISTED = 1 << 20
MOST_STEERED = 1 << 18
"""Numbers of all vectors that a request may be steered by."""
_MOST_STEERED_LAYERS = 256


@dataclass(frozen=True, slots=True)
class WireKind:
    """Values that a field may have: in words, as a JSON schema, and as a test."""

    wanted: str
    schema: Mapping[str, Json]
    accepts: Callable[[Json], bool]


@dataclass(frozen=True, slots=True)
class WireField:
    """A field of a body. `line`: its meaning. `default`: what holds without it, in words.
    `keyword`: the keyword of `generate` that it stands for, None for none."""

    name: str
    kind: WireKind
    line: str
    default: str = ""
    keyword: str | None = None
    required: bool = False

    def read(self, value: Json) -> Json:
        """Return the value; RequestError with the field's name if it is of another kind."""
        if not self.kind.accepts(value):
            raise RequestError(
                f"{self.name} is impossible",
                wanted=self.kind.wanted,
                got=shown(value)[:80],
                do=f"Give {self.name} such a value, or leave it out",
            )
        if self.keyword in FIELDS and self.keyword == self.name:
            return FIELDS[self.name].read(_as_keyword(self.name, value))
        return value


# --- kinds ----------------------------------------------------------------------------------------


def _is_integer(value: Json, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Json, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


def integer(least: int, most: int) -> WireKind:
    """Return the kind of whole numbers within bounds."""
    schema = {"type": "integer", "minimum": least, "maximum": most}
    wanted = f"an integer from {least} to {most}"
    return WireKind(wanted, schema, partial(_is_integer, least=least, most=most))


def number(least: float, most: float) -> WireKind:
    """Return the kind of numbers within bounds."""
    bounds = {"minimum": least} | ({} if most == math.inf else {"maximum": most})
    wanted = f"a number of at least {least:g}" if most == math.inf else None
    return WireKind(
        wanted or f"a number from {least:g} to {most:g}",
        {"type": "number", **bounds},
        partial(_is_number, least=least, most=most),
    )


def listed(kind: WireKind, most: int, least: int = 0) -> WireKind:
    """Return the kind of lists of such values."""
    schema = {"type": "array", "items": kind.schema, "minItems": least, "maxItems": most}

    def accepts(value: Json) -> bool:
        fits = isinstance(value, list) and least <= len(value) <= most
        return fits and all(map(kind.accepts, value))

    return WireKind(f"a list of {least} to {most}, each {kind.wanted}", schema, accepts)


def either(*kinds: WireKind) -> WireKind:
    """Return the kind of values that one of these accepts."""
    return WireKind(
        " or ".join(one.wanted for one in kinds),
        {"anyOf": [one.schema for one in kinds]},
        lambda value: any(one.accepts(value) for one in kinds),
    )


def text(most: int = _MOST_TEXT, least: int = 0) -> WireKind:
    """Return the kind of texts of at most so many characters."""
    return WireKind(
        f"a text of {least} to {most} characters" if least else f"a text of up to {most}",
        {"type": "string", "maxLength": most, "minLength": least},
        lambda value: isinstance(value, str) and least <= len(value) <= most,
    )


def one_of(*names: str) -> WireKind:
    """Return the kind of a few texts."""
    wanted = "one of " + ", ".join(map(repr, names))
    return WireKind(wanted, {"enum": [*names]}, lambda value: value in names)


def _is_steering(value: Json) -> bool:
    """Return whether these are vectors by layer, as far as their number goes, or a name."""
    if not isinstance(value, dict):
        return isinstance(value, str) and 0 < len(value) <= 128
    numbers = sum(len(one) if isinstance(one, list) else 1 for one in value.values())
    return 0 < len(value) <= _MOST_STEERED_LAYERS and numbers <= MOST_STEERED


FLAG = WireKind("true or false", {"type": "boolean"}, lambda value: type(value) is bool)
MAPPING = WireKind("an object", {"type": "object"}, lambda value: isinstance(value, dict))
ID = integer(0, (1 << 31) - 1)
IDS = replace(listed(ID, _MOST_LISTED, 1), wanted="a list of ids")
TEXT = replace(text(), wanted="a text")
SEED = integer(-(1 << 63), (1 << 63) - 1)
STEER = WireKind(
    f"an object of 1 to {_MOST_STEERED_LAYERS} layers with {MOST_STEERED} numbers in all, or a "
    "name",
    {
        "anyOf": [
            {
                "type": "object",
                "additionalProperties": {"type": "array", "items": {"type": "number"}},
                "minProperties": 1,
                "maxProperties": _MOST_STEERED_LAYERS,
            },
            {"type": "string", "minLength": 1, "maxLength": 128},
        ]
    },
    _is_steering,
)
_STAGE_NAME = text(100, 1)


def _is_stage(value: Json) -> bool:
    """Return whether this is a name, or an object of a name and options."""
    if not isinstance(value, dict):
        return _STAGE_NAME.accepts(value)
    fits = value.keys() <= {"name", "options"} and _STAGE_NAME.accepts(value.get("name"))
    return fits and isinstance(value.get("options", {}), dict)


STAGES = listed(
    WireKind(
        "a name, or an object with name and options",
        {
            "anyOf": [
                _STAGE_NAME.schema,
                {
                    "type": "object",
                    "properties": {"name": _STAGE_NAME.schema, "options": {"type": "object"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            ]
        },
        _is_stage,
    ),
    16,
)
STOP = either(text(256, 1), listed(text(256, 1), 16, 1))


# --- fields of generate ---------------------------------------------------------------------------

NOT_ON_THE_WIRE: Mapping[str, str] = {
    **dict.fromkeys(
        ("stopping_criteria", "prefix_allowed_tokens_fn", "majority", "scorer"),
        "is code, and no code comes from a request",
    ),
    **dict.fromkeys(("constraints", "generation_config", "prefix"), "is an object of Python"),
    **dict.fromkeys(
        ("amateur_model", "assistant_model", "assistant_tokenizer", "draft_corpus"),
        "is an object of Python",
    ),
    **dict.fromkeys(("contrast_alpha", "contrast_beta"), "belongs to amateur_model"),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        "has no place in an answer",
    ),
    "return_dict_in_generate": "has no place in an answer",
    **dict.fromkeys(
        ("cache_implementation", "cache_config", "max_cache_len", "use_cache", "compile_config"),
        "is decided by whoever runs the server",
    ),
    **dict.fromkeys(
        ("disable_compile", "continuous_batching_config", "prefill_chunk_size", "low_memory"),
        "is decided by whoever runs the server",
    ),
    "record": "is decided by whoever runs the server",
    "trim_stop_strings": "has another name here: include_stop_str_in_output",
    "adapter_names": "has another name here: an adapter is asked for as the model",
}
"""Keywords of `generate` that a request cannot have, each with the reason."""

_MOST_ROWS = 64
_MOST_BEST = 20
_OWN: Mapping[str, WireKind] = {
    "num_beams": integer(1, _MOST_ROWS),
    "num_beam_groups": integer(1, _MOST_ROWS),
    "num_return_sequences": integer(1, _MOST_ROWS),
    "best_of": integer(1, _MOST_ROWS),
    "n_best": integer(1, _MOST_ROWS),
    "num_drafts": integer(1, 16),
    "num_assistant_tokens": integer(1, 64),
    "prompt_lookup_num_tokens": integer(1, 64),
    "logprobs": integer(0, _MOST_BEST),
    "prompt_logprobs": integer(0, _MOST_BEST),
    "seed": SEED,
    "schema": either(MAPPING, FLAG, TEXT),
    "regex": text(1 << 16),
    "grammar": text(1 << 18),
    "choices": listed(text(1 << 12), 1024, 1),
    "allowed_sequences": listed(either(text(1 << 12), IDS), 4096, 1),
    "adapters": MAPPING,
    "steer": STEER,
    "strategy": text(100, 1),
    "strategy_options": MAPPING,
    "logits_processor": STAGES,
    "hooks": STAGES,
    "add_generation_prompt": FLAG,
    "cache_salt": text(128, 1),
    "timeout": number(0.001, 86400.0),
    "negative_prompt": either(TEXT, IDS, listed(MAPPING, 4096, 1)),
    "stop_strings": STOP,
    "logit_bias": MAPPING,
    "tools": listed(MAPPING, 128, 1),
    "tool_choice": either(text(128, 1), MAPPING),
    "parallel_tool_calls": FLAG,
    "enable_thinking": FLAG,
    "thinking_budget": integer(0, 1 << 24),
}
"""Kinds of keywords that are bounded here, or that are no fields of a configuration."""

_STAGE = '`"name"` or `{"name": "name", "options": {"argument": 1}}`'
_LINES: Mapping[str, str] = {
    "logits_processor": f"Processors that the operator has installed, each {_STAGE}.",
    "hooks": f"Hooks that the operator has installed, each {_STAGE}.",
    "steer": 'Vectors that are added to the hidden states after layers, `{"12": [0.5, -1]}`, or '
    "the name of vectors that the server was started with.",
}
"""Meanings of keywords that have another form here."""

_JSON_TYPES: Mapping[str, dict[str, Json]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
}


def generate_field(name: str) -> WireField:
    """Return the field that stands for a keyword of `generate`, by its own name."""
    row = KEYWORDS[name]
    kind = _OWN.get(name)
    if kind is None:
        one = FIELDS[name]
        kind = WireKind(one.kind.wanted, _schema_of(row.type), _is_json)
    return WireField(name, kind, _LINES.get(name, row.line), keyword=name)


OF_MESSAGES = (
    *("add_generation_prompt", "tools", "tool_choice", "parallel_tool_calls"),
    *("enable_thinking", "thinking_budget"),
)
"""Keywords that only a conversation has."""


def _is_json(_: Json) -> bool:
    """Accept anything: the kind of the configuration's field judges it next."""
    return True


def _schema_of(written: str) -> dict[str, Json]:
    """Return the JSON schema of a type as the table of keywords writes it."""
    parts = [part.strip() for part in re.sub(r"\[.*\]", "", written).split("|")]
    known: list[dict[str, Json]] = [_JSON_TYPES[one] for one in parts if one in _JSON_TYPES]
    known += [{"type": "array"}] * ("Sequence" in parts or "tuple" in parts)
    known += [{"type": "object"}] * ("Mapping" in parts)
    known += [{"enum": re.findall(r'"(\w+)"', written)}] * ("Literal" in parts)
    return {"anyOf": known} if len(known) > 1 else dict(*known)


def _as_keyword(name: str, value: Json) -> Json:
    """Return a value of JSON as the keyword has it: keys of objects are texts there."""
    if name != "logit_bias" or not isinstance(value, dict):
        return value
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise RequestError(
            "logit_bias is impossible",
            wanted="ids as keys, written as texts",
            got=shown(value)[:80],
        ) from None


GENERATE: tuple[WireField, ...] = tuple(
    generate_field(row.name)
    for row in KEYWORDS.values()
    if "texts" in row.calls and row.name not in NOT_ON_THE_WIRE
)
"""Every keyword of `generate` that is data."""


# --- bodies ---------------------------------------------------------------------------------------


def read_fields(
    fields: Mapping[str, WireField],
    ignored: Mapping[str, str],
    refused: Mapping[str, str],
    body: Json,
) -> dict[str, Json]:
    """Return the fields of a body that are set, each of its kind; null is not set.

    UnknownArgumentError for a name that the route does not have; RequestError for a value of
    another kind, for a name that is refused, and for one that is missing.
    """
    if not isinstance(body, dict):
        raise RequestError("the body is no JSON object", got=type(body).__name__)
    found = {}
    for name, value in body.items():
        if name in ignored:
            continue
        if name in refused:
            if value in (None, [], {}):
                continue
            raise RequestError(f"{name} {refused[name]}", do=f"Leave {name} out")
        if name not in fields:
            near = nearest(name, fields)
            do = f"Perhaps you meant {near}" if near else f"Leave {name[:80]} out"
            raise UnknownArgumentError(f"there is no field {name[:80]!r}", do=do)
        if value is not None:
            found[name] = fields[name].read(value)
    for one in fields.values():
        if one.required and one.name not in found:
            raise RequestError(f"{one.name} is missing", wanted=one.kind.wanted)
    return found


def require_fields(given: Any, where: str, known: Collection[str]) -> Mapping[str, Json]:
    """Return an object inside of a body; RequestError if it is none, UnknownArgumentError if it has
    a field that is not known."""
    if not isinstance(given, dict):
        raise RequestError(f"{where} is no object", got=shown(given)[:80])
    for name in given:
        if name not in known:
            near = nearest(name, known)
            do = f"Perhaps you meant {near}" if near else "Leave it out"
            raise UnknownArgumentError(f"{where}.{name[:80]} is unknown", do=do)
    return given
