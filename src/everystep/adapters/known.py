"""The adapters of a model, by the names that requests ask for."""

from __future__ import annotations

from collections.abc import Mapping

from everystep.adapters.adapter import STEER
from everystep.adapters.peft_adapter import PeftAdapter
from everystep.errors import RequestError, shown
from everystep.models import Model

Adapters = Mapping[str, PeftAdapter]


def with_adapter(known: Adapters, name: str, adapter: PeftAdapter) -> Adapters:
    """Return these and one more; see `require_free`."""
    require_free(known, name)
    return {**known, name: adapter}


def require_free(known: Adapters, name: str) -> None:
    """Raise RequestError for a name that is taken or invalid."""
    if not isinstance(name, str) or not name or name in known or name.startswith(STEER):
        raise RequestError(
            "an adapter cannot have this name",
            wanted=f"a string, not the name of an adapter that is loaded, not {STEER}...",
            got=shown(name),
            do="Choose another, or call delete_adapter first",
        )


def without_adapter(known: Adapters, name: str) -> Adapters:
    """Return these but the one of this name; raise RequestError where there is none."""
    require_adapter(known, name)
    return {key: one for key, one in known.items() if key != name}


def let_follow(known: Adapters, model: Model) -> None:
    """Let them belong to a model that was moved or converted."""
    for one in known.values():
        one.follow(model)


def require_adapter(known: Adapters, name: str) -> PeftAdapter:
    """Return the adapter of this name; raise RequestError where there is none."""
    if not isinstance(name, str) or name not in known:
        do = "Call load_adapter first"
        raise RequestError("there is no such adapter", wanted=list(known), got=shown(name), do=do)
    return known[name]
