"""What holds for one call: the value of every field and where it comes from.

Call before passed configuration before checkpoint before default; a chat has defaults of its own,
which come before the others where nothing else says a value. A None in the call is said on
purpose: it turns off `top_k` and `max_length`, and gives any other field its default back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from everystep.config.chat_defaults import ChatDefaults
from everystep.config.fields import FIELDS, META, PER_ROW, unknown_name
from everystep.config.generation import GenerationConfig
from everystep.config.rules import judge
from everystep.errors import RequestError

Source = Literal["call", "config", "checkpoint", "chat", "default"]


@dataclass(frozen=True, repr=False)
class Effective(Mapping[str, Any]):
    """Every field's value, by attribute or key, and its source.

    `notices`: warnings for the caller about values that have no effect. `caller`: the fields that
    the caller set, in the call or in a configuration that did not come out of a file.
    """

    values_by_name: Mapping[str, Any]
    sources: Mapping[str, Source]
    notices: tuple[str, ...] = ()
    caller: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        # Copying looks attributes up before there are any.
        if name in self.__dict__.get("values_by_name", ()):
            return self.values_by_name[name]
        raise AttributeError(f"no field is called {name!r}")

    def __getitem__(self, name: str) -> Any:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def __repr__(self) -> str:
        said = (
            f"{name}={self[name]!r} ({source})"
            for name, source in self.sources.items()
            if source != "default"
        )
        return f"Effective({', '.join(said)}; everything else by default)"

    def source(self, name: str) -> Source:
        """Return who gave the field its value."""
        return self.sources[name]

    def noting(self, *notices: str) -> Effective:
        """Return the same with these warnings for the caller too."""
        return replace(self, notices=(*self.notices, *notices)) if notices else self

    def replaced(self, source: Source, **values: Any) -> Effective:
        """Return the same with other values, such as those that depend on the prompt."""
        for name in values:
            if name not in FIELDS:
                raise unknown_name(name, "no field is called")
        return replace(
            self,
            values_by_name={**self.values_by_name, **values},
            sources={**self.sources, **dict.fromkeys(values, source)},
        )


def for_rows(effective: Effective, rows: int) -> list[Effective]:
    """Return the values for each row of a call, one object for all where no field has one per row.

    Raise RequestError if a field has values for another number of rows.
    """
    lists = {n: effective[n] for n in PER_ROW if isinstance(effective[n], list)}
    for name, values in lists.items():
        if len(values) != rows:
            raise RequestError(
                f"{name} does not fit the rows of the call",
                wanted=f"one value, or {rows} of them",
                got=f"{len(values)} values",
                do=f"Give {name} one value per row of the prompt",
            )
    if not lists:
        return [effective] * rows
    return [
        effective.replaced("call", **{name: values[row] for name, values in lists.items()})
        for row in range(rows)
    ]


_DEFAULTS = {name: field.default for name, field in FIELDS.items() if name not in META}
_BY_DEFAULT: dict[str, Source] = dict.fromkeys(_DEFAULTS, "default")


def merge_configs(
    call: Mapping[str, Any],
    passed: object = None,
    checkpoint: GenerationConfig | None = None,
    chat: ChatDefaults | None = None,
    *,
    chosen: bool = False,
) -> Effective:
    """Return the values that hold for a call with the keywords `call`.

    `chat`: the defaults of a conversation, None for any other prompt; `chosen`: something beside
    the fields says how its tokens are chosen.

    Raise UnknownArgumentError for a keyword that is not a field, and RequestError for values that
    cannot be, that nothing can be generated with, or that the caller set and that contradict each
    other.
    """
    own = None if passed is None else GenerationConfig.of(passed)
    values, sources = dict(_DEFAULTS), dict(_BY_DEFAULT)
    layers: list[tuple[Source, GenerationConfig | None]]
    layers = [("checkpoint", checkpoint), ("config", own)]
    for source, config in layers:
        for name, value in () if config is None else config.said():
            values[name], sources[name] = value, source
    for name, value in call.items():
        if name not in values:
            raise unknown_name(name, "generate() knows no argument")
        values[name] = FIELDS[name].neutral if value is None else FIELDS[name].read(value)
        sources[name] = "call"
    given = {name for name, value in call.items() if value is not None}
    if chat is not None:
        said = [n for n in sources if sources[n] != "default" and call.get(n, n) is not None]
        asked = {*call} | ({*own.caller_set} if own else set())
        limited = not asked.isdisjoint(("max_new_tokens", "max_length"))
        for name, value in chat.fields(said, chosen=chosen, limited=limited).items():
            values[name], sources[name] = value, "chat"
    caller = given | ({*own.caller_set} - {*call} if own else set())
    return Effective(values, sources, judge(values, caller), frozenset(caller))
