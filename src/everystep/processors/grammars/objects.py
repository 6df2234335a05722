"""Objects of a schema as grammars follow them: closed where a schema lists their properties, and
told apart by one of these where only one of several may hold.

Every text of what is returned is one of the schema that was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, count
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
_OF_OBJECTS = (
    *("properties", "patternProperties", "additionalProperties", "required"),
    *("minProperties", "maxProperties"),
)
_NESTED = ("allOf", "anyOf", "oneOf")
_JSON_TYPES = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    type(None): "null",
}
_DEEPEST = 20  # references and unions that are followed to tell two schemas apart


def close_objects(root: Schema, subschemas: Callable[[Schema], Iterator[Any]]) -> None:
    """Closes each object whose properties are listed and that says nothing of further ones.

    Objects that several schemas describe together, as those of 'allOf' do, stay open: what one does
    not list, another may.
    """
    shared: set[int] = set()
    waiting = [(root, False)]
    seen: set[tuple[int, bool]] = set()
    listed: list[Schema] = []
    while waiting:
        one, joined = waiting.pop()
        if (id(one), joined) in seen:
            continue
        seen.add((id(one), joined))
        listed.append(one)
        parts, targets = _parts(root, one)
        if targets is None:
            return  # a reference by another name than its place may join any two
        joined = joined or parts > 1
        if joined:
            shared.add(id(one))
        waiting += [(target, joined) for target in targets]
        waiting += [(inner, False) for inner in subschemas(one) if isinstance(inner, dict)]
    for one in listed:
        if id(one) not in shared and _lists_all(one):
            one["additionalProperties"] = False


def _parts(root: Schema, one: Schema) -> tuple[int, list[Schema] | None]:
    """Return how many schemas hold of an object at once, and those that hold of it too; None where
    a reference leads nowhere that is known."""
    parts = int(any(name in one for name in _OF_OBJECTS))
    targets = [inner for name in _NESTED for inner in one.get(name, ()) if isinstance(inner, dict)]
    parts += sum(len(one[name]) if name == "allOf" else 1 for name in _NESTED if name in one)
    if "$ref" in one:
        target = resolved(root, one["$ref"])
        if target is None:
            return parts, None
        parts += 1
        targets.append(target)
    return parts, targets


def _lists_all(one: Schema) -> bool:
    """Return True for an object that can do with the properties that it lists."""
    named = one.get("properties")
    return (
        named is not None
        and "additionalProperties" not in one
        and set(one.get("required", ())) <= named.keys()
        and ("patternProperties" in one or one.get("minProperties", 0) <= len(named))
    )


def resolved(root: Schema, reference: str) -> Schema | None:
    """Return the schema at a place such as #/$defs/a, None where there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: Any = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class _Facts:
    """Facts about all values of a schema; None where nothing is known.

    `tags`: of objects, property -> which values it may have if it is there.
    """

    types: frozenset[str] | None = None
    values: frozenset[Any] | None = None
    tags: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


def tell_apart(root: Schema, schemas: Iterable[Schema]) -> None:
    """Writes 'oneOf' as 'anyOf' where no two of its schemas can hold at once.

    Where a property with a value of its own tells two of them apart, both have to have it.
    """
    known = _Known(root)
    found = [(one, _names_needed(known, one["oneOf"])) for one in schemas if "oneOf" in one]
    told = [(one, needed) for one, needed in found if needed is not None and "anyOf" not in one]
    for one, _ in told:
        one["anyOf"] = one.pop("oneOf")
    required = _Required(root)
    for one, needed in told:
        one["anyOf"] = list(map(required, one["anyOf"], needed))


def _names_needed(known: _Known, branches: list[Any]) -> list[frozenset[str]] | None:
    """Return the properties that each schema has to require so that no other holds too, None where
    two may hold at once."""
    facts = [known.of(branch) for branch in branches]
    needed: list[set[str]] = [set() for _ in branches]
    for i, j in combinations(range(len(branches)), 2):
        one, other = facts[i], facts[j]
        if _are_disjoint(one.types, other.types) or _are_disjoint(one.values, other.values):
            continue
        tag = _tag(one, other)
        if tag is None:
            return None
        needed[i].add(tag)
        needed[j].add(tag)
    return [frozenset(names - one.required) for names, one in zip(needed, facts, strict=True)]


class _Required:
    """Schemas that require further properties, as definitions where they were references.

    The library follows no reference with keywords beside it that leads back to itself.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._named: dict[tuple[int, frozenset[str]], Schema] = {}

    def __call__(self, branch: Schema, names: frozenset[str]) -> Schema:
        """Return the schema, with these properties required."""
        if not names:
            return branch
        target = resolved(self._root, branch["$ref"]) if branch.keys() == {"$ref"} else None
        if target is None or "$id" in target:
            return _with(branch, names)
        key = id(target), names
        if key not in self._named:
            definitions = self._root.setdefault("$defs", {})
            name = next(n for i in count() if (n := f"told-apart-{i}") not in definitions)
            self._named[key] = {"$ref": f"#/$defs/{name}"}
            own = {k: v for k, v in target.items() if k not in ("$defs", "definitions", "$anchor")}
            definitions[name] = _with(own, names)
        return self._named[key]


def _with(one: Schema, names: frozenset[str]) -> Schema:
    return {**one, "required": sorted({*one.get("required", ()), *names})}


def _are_disjoint(one: frozenset[Any] | None, other: frozenset[Any] | None) -> bool:
    return one is not None and other is not None and one.isdisjoint(other)


def _tag(one: _Facts, other: _Facts) -> str | None:
    """Return the property that tells objects of two schemas apart, None where none does."""
    if frozenset({"object"}) not in (one.types, other.types):
        return None
    common = (name for name in one.tags if name in other.tags)
    return next((name for name in common if one.tags[name].isdisjoint(other.tags[name])), None)


class _Known:
    """Facts about the schemas of a root, each of which is read once."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._found: dict[tuple[int, bool], _Facts] = {}

    def of(self, one: Any, depth: int = _DEEPEST, *, tags: bool = True) -> _Facts:
        """Return what is known of a schema, `tags` included if wanted; nothing of one that leads
        back to itself, or far."""
        if not isinstance(one, dict) or not depth:
            return _Facts()
        key = id(one), tags
        if key not in self._found:
            self._found[key] = _Facts()
            self._found[key] = self._read(one, depth - 1, tags)
        return self._found[key]

    def _read(self, one: Schema, depth: int, tags: bool) -> _Facts:
        found = self._own(one, depth, tags)
        target = resolved(self._root, one["$ref"]) if "$ref" in one else None
        for inner in (target, *one.get("allOf", ())):
            found = _both(found, self.of(inner, depth, tags=tags))
        for name in ("anyOf", "oneOf"):
            if name in one:
                several = [self.of(inner, depth, tags=tags) for inner in one[name]]
                found = _both(found, _either(several))
        return found

    def _own(self, one: Schema, depth: int, tags: bool) -> _Facts:
        values = None
        listed = [one["const"]] if "const" in one else one.get("enum", [{}])
        if not any(isinstance(value, dict | list) for value in listed):
            # True is equal to 1 in Python, and not in JSON.
            values = frozenset((_JSON_TYPES[type(value)], value) for value in listed)
        kind = one.get("type")
        types = None if kind is None else frozenset([kind] if isinstance(kind, str) else kind)
        if types is None and values is not None:
            types = frozenset(of for of, _ in values)
        elif types is not None and "integer" in types:
            types = types - {"integer"} | {"number"}
        named = one.get("properties", {}) if tags else {}
        several = {name: self.of(inner, depth, tags=False).values for name, inner in named.items()}
        told = {name: found for name, found in several.items() if found is not None}
        return _Facts(types, values, told, frozenset(one.get("required", ())))


def _both(one: _Facts, other: _Facts) -> _Facts:
    """Return what is known of values that two schemas have in common."""

    def met(a: frozenset[Any] | None, b: frozenset[Any] | None) -> frozenset[Any] | None:
        return b if a is None else a if b is None else a & b

    tags = {**one.tags, **other.tags}
    for name in one.tags.keys() & other.tags.keys():
        tags[name] = one.tags[name] & other.tags[name]
    types, values = met(one.types, other.types), met(one.values, other.values)
    return _Facts(types, values, tags, one.required | other.required)


def _either(several: list[_Facts]) -> _Facts:
    """Return what is known of values that one of several schemas has."""

    def joined(sets: list[frozenset[Any] | None]) -> frozenset[Any] | None:
        known = [one for one in sets if one is not None]
        return frozenset().union(*known) if len(known) == len(sets) else None

    names = set.intersection(*(set(one.tags) for one in several))
    return _Facts(
        joined([one.types for one in several]),
        joined([one.values for one in several]),
        {name: frozenset().union(*(one.tags[name] for one in several)) for name in names},
        frozenset.intersection(*(one.required for one in several)),
    )
