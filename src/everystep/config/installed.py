"""Classes of installed packages, found by name: strategies, processors and hooks of one's own.

A package names its class in a group of entry points, so whoever installs packages decides what
there is. A name with settings is data, which a request, a saved run and the command line may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from everystep.errors import (
    NOBODYS,
    EverystepError,
    RequestError,
    UnknownArgumentError,
    nearest,
    shown,
)

__all__ = ["HOOKS", "PROCESSORS", "STRATEGIES", "EntryGroup", "made", "split_name"]

_PARTS = ("name", "options")


@dataclass(frozen=True, slots=True)
class EntryGroup:
    """A group of entry points, each a class, or a function that makes an object.

    `noun`: what such an object is called. `keyword`: the one of `generate` that takes it.
    """

    group: str
    noun: str
    keyword: str

    def names(self) -> tuple[str, ...]:
        """Return the names that installed packages have in the group."""
        return tuple(sorted({one.name for one in entry_points(group=self.group)}))

    def loaded(self, name: str) -> list[type]:
        """Return what stands under the name, of every package that has it.

        Raise RequestError where a package cannot be imported.
        """
        return [self._load(one) for one in entry_points(group=self.group, name=name)]

    def require_known(self, names: Iterable[str]) -> None:
        """Raise UnknownArgumentError, which lists every name, unless a package has each of these.

        No package is imported for it.
        """
        known = self.names()
        for name in names:
            if name not in known:
                raise self._unknown(name, known)

    def replaced(self, listed: Sequence[object]) -> list[object]:
        """Return the list with an object in the place of each name, the others as they are.

        Raise UnknownArgumentError for a name that no package has, RequestError for one that two
        have, or whose object cannot be made.
        """
        if not any(map(_is_named, listed)):
            return [*listed]
        found = entry_points(group=self.group)  # once, as it looks through all that is installed
        made_ones: list[object] = []
        for place, one in enumerate(listed):
            if not _is_named(one):
                made_ones.append(one)
                continue
            name, options = split_name(one, f"{self.keyword}[{place}]")
            kinds = list(dict.fromkeys(map(self._load, found.select(name=name))))
            if not kinds:
                raise self._unknown(name, sorted(found.names))
            if len(kinds) > 1:
                raise RequestError(
                    f"{self.keyword} names {name!r}, as which several packages have a {self.noun}",
                    got=" and ".join(kind.__module__ for kind in kinds),
                    do="Remove one of the packages",
                )
            made_ones.append(made(self.noun, name, kinds[0], options))
        return made_ones

    def _load(self, one: EntryPoint) -> type:
        """Return what an entry point stands for; RequestError where it cannot be had."""
        try:
            kind: type = one.load()
        except NOBODYS:
            raise
        except Exception as error:  # whatever a package's own code makes of being imported
            raise RequestError(
                f"the {self.noun} {one.name!r} is installed, but cannot be imported",
                wanted=one.value,
                got=f"{type(error).__name__}: {error}",
                do="Repair its package, or remove it",
            ) from error
        return kind

    def _unknown(self, name: str, known: Sequence[str]) -> UnknownArgumentError:
        """Return the error about a name that no package has."""
        near = nearest(name, known)
        return UnknownArgumentError(
            f"{self.keyword} names a {self.noun} that there is not: {name[:80]!r}",
            wanted=", ".join(known) or "a name of an installed package, and none has one",
            do=f"Perhaps you meant {near}" if near else "Install the package that has it",
        )


STRATEGIES = EntryGroup("everystep.strategies", "strategy", "strategy")
PROCESSORS = EntryGroup("everystep.processors", "processor", "logits_processor")
HOOKS = EntryGroup("everystep.hooks", "hook", "hooks")


def _is_named(one: object) -> bool:
    """Return whether an element of a list stands for an object, and is none itself."""
    return isinstance(one, str) or (isinstance(one, Mapping) and not callable(one))


def split_name(one: object, where: str) -> tuple[str, Mapping[str, object]]:
    """Return the name and the options of "name", or of {"name": ..., "options": {...}}.

    Raise RequestError for anything else; it calls it `where`.
    """
    given = {"name": one} if isinstance(one, str) else one
    surplus = [name for name in given if name not in _PARTS] if isinstance(given, Mapping) else []
    if surplus:
        near = nearest(str(surplus[0]), _PARTS)
        raise UnknownArgumentError(
            f"{where} has an unknown part, {shown(surplus[0])[:80]}",
            wanted="name and options",
            do=f"Perhaps you meant {near}" if near else "Leave it out",
        )
    name = given.get("name") if isinstance(given, Mapping) else None
    options = (given.get("options") or {}) if isinstance(given, Mapping) else None
    if not isinstance(name, str) or not isinstance(options, Mapping):
        wanted = 'a name, or {"name": ..., "options": {...}}'
        raise RequestError(f"{where} is impossible", wanted=wanted, got=shown(one)[:80])
    return name, options


def made(
    noun: str,
    name: str,
    kind: Callable[..., object],
    options: Mapping[str, object],
    *,
    given: str = "options",
) -> object:
    """Return the object of a class with these options, which a caller passed as `given`.

    Raise RequestError where it cannot be made with them.
    """
    try:
        return kind(**options)
    except (*NOBODYS, EverystepError):
        raise
    except Exception as error:  # whatever the class makes of them
        raise RequestError(
            f"the {noun} {name!r} cannot be made with these options",
            wanted="the arguments of its class",
            got=error,
            do=f"Pass others as {given}",
        ) from error
