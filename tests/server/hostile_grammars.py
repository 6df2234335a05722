"""Grammars that mean harm, drawn: each number is another one, the same each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Drawn = dict[str, Any]


def _power(rng: random.Random, most: int) -> int:
    """A number whose size is drawn, not its value."""
    return rng.randint(1, 1 << rng.randint(1, most))


# --- expressions ----------------------------------------------------------------------------------


def nested_repeats(rng: random.Random) -> Drawn:
    text = rng.choice(("a", "a|aa", "[a-z]", ".", "\\w", "a?", "(?:a|b)*"))
    for _ in range(rng.randint(1, 8)):
        least = rng.randint(0, 5)
        marks = ("*", "+", f"{{{least},{least + _power(rng, 12)}}}", f"{{{_power(rng, 14)}}}")
        text = f"({text}){rng.choice(marks)}"
    return {"regex": text + rng.choice(("", "b", "$"))}


def deep_brackets(rng: random.Random) -> Drawn:
    depth = _power(rng, 14)
    return {"regex": "(" * depth + "a" + ")" * (depth - rng.randint(0, 1))}


def alternatives(rng: random.Random) -> Drawn:
    words = ["".join(rng.choices("ab", k=rng.randint(1, 12))) for _ in range(_power(rng, 11))]
    return {"regex": f"({'|'.join(words)}){rng.choice(('', '+', '{1,400}'))}"}


def garbage(rng: random.Random) -> Drawn:
    return {"regex": "".join(rng.choices("()[]{}|*+?\\.^$-,09az\u202e\0", k=rng.randint(1, 300)))}


def looks_around(rng: random.Random) -> Drawn:
    parts = ("(?=a)b", "(?<!x)y", "(a)\\1", "(?P<n>a)(?P=n)", "(?i:a)\\b", "(?!q)", "a*+", "(?>ab)")
    return {"regex": "".join(rng.choices(parts, k=rng.randint(1, 9)))}


# --- schemas --------------------------------------------------------------------------------------


def nested_schema(rng: random.Random) -> Drawn:
    schema: Any = {"type": rng.choice(("integer", "string", "null"))}
    for _ in range(rng.randint(1, 9)):
        match rng.randrange(5):
            case 0:
                schema = {"oneOf": [schema, {"type": "array", "items": schema}]}
            case 1:
                names = [f"p{number}" for number in range(_power(rng, 4))]
                schema = {"type": "object", "properties": dict.fromkeys(names, schema)}
            case 2:
                least = _power(rng, 20)
                schema = {"type": "array", "items": schema, "minItems": least}
            case 3:
                schema = {"allOf": [schema, {"anyOf": [schema, {"type": "string"}]}]}
            case _:
                schema = {"type": "object", "additionalProperties": schema}
    return {"schema": schema}


def chained_schema(rng: random.Random) -> Drawn:
    schema: Any = {"type": "integer"}
    for _ in range(_power(rng, 9)):
        schema = {"type": "array", "items": schema}
    return {"schema": schema}


def circular_schema(rng: random.Random) -> Drawn:
    count = rng.randint(1, 6)
    to = [f"#/$defs/d{rng.randrange(count)}" for _ in range(count + 1)]
    inner = [{"$ref": one} if rng.random() < 0.5 else {"items": {"$ref": one}} for one in to]
    return {"schema": {"$ref": to[-1], "$defs": {f"d{n}": inner[n] for n in range(count)}}}


def foreign_schema(rng: random.Random) -> Drawn:
    where = ("http://127.0.0.1:9/x.json", "file:///etc/passwd", "#/nowhere", "x.json", "##", "")
    return {"schema": {"$ref": rng.choice(where) + "/x" * rng.randint(0, 400)}}


def texts_of_a_schema(rng: random.Random) -> Drawn:
    most = _power(rng, 30)
    pattern = nested_repeats(rng)["regex"]
    return {"schema": {"type": "string", "pattern": pattern, "maxLength": most}}


def wrong_schema(rng: random.Random) -> Drawn:
    values: tuple[Any, ...] = (None, 3, "x", [], [{}], {"type": 3}, {"x": -1}, -1, 1e300, True)
    names = ("type", "properties", "items", "required", "enum", "minItems", "pattern", "const")
    return {"schema": {name: rng.choice(values) for name in rng.sample(names, 3)}}


def long_enum(rng: random.Random) -> Drawn:
    return {"schema": {"enum": [f"{number:x}" * 9 for number in range(_power(rng, 13))]}}


# --- grammars -------------------------------------------------------------------------------------


def deep_rule(rng: random.Random) -> Drawn:
    depth = _power(rng, 13)
    return {"grammar": "start: " + "(" * depth + '"a"' + ")" * depth}


def recursive_rules(rng: random.Random) -> Drawn:
    count = rng.randint(1, 12)
    names = ["start", *(f"r{number}" for number in range(count))]
    lines = []
    for name in names:
        ways = [
            " ".join(rng.choice((*names, '"a"', '"ab"', "")) for _ in range(rng.randint(1, 4)))
            for _ in range(rng.randint(1, 4))
        ]
        lines.append(f"{name}: {' | '.join(ways)}")
    return {"grammar": "\n".join(lines)}


def intersections(rng: random.Random) -> Drawn:
    parts = " & ".join(f"/(.*{chr(97 + n % 26)}.*){{{n + 1}}}/" for n in range(rng.randint(2, 24)))
    return {"grammar": f"start: T\nT: {parts}"}


def repeated_rule(rng: random.Random) -> Drawn:
    return {"grammar": f'start: ("a" | "aa" start){{{_power(rng, 4)},{_power(rng, 24)}}}'}


def torn_grammar(rng: random.Random) -> Drawn:
    whole = 'start: "a" b+ | /[a-z]{3}/ "x"\nb: start? "b"\n%ignore " "\n%import common.INT\n'
    return {"grammar": "".join(one for one in whole * 3 if rng.random() < 0.8)}


def many_choices(rng: random.Random) -> Drawn:
    return {"choices": ["ab" * _power(rng, 10) + str(n) for n in range(_power(rng, 9))]}


KINDS: tuple[Callable[[random.Random], Drawn], ...] = (
    *(nested_repeats, deep_brackets, alternatives, garbage, looks_around, nested_schema),
    *(chained_schema, circular_schema, foreign_schema, texts_of_a_schema, wrong_schema, long_enum),
    *(deep_rule, recursive_rules, intersections, repeated_rule, torn_grammar, many_choices),
)


def drawn(number: int) -> Drawn:
    """Return the fields of the grammar of a number: kinds take turns."""
    return KINDS[number % len(KINDS)](random.Random(number))
