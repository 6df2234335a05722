"""What callers pass that is no configuration: objects, functions, names, checked for their kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everystep.errors import ModelClassError, RequestError, shown
from everystep.models import Model
from everystep.types.protocols import Hook


def require(name: str, value: Any, *methods: str) -> Any:
    """The value, which is None or has the methods (`__call__` among them); RequestError if not."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if value is None or not missing:
        return value
    wanted = "a function" if methods == ("__call__",) else f"an object with {', '.join(methods)}"
    raise RequestError(
        f"{name} is of another kind",
        wanted=wanted,
        got=shown(value),
        do=f"Pass such an object as {name}, or leave it out",
    )


def require_core(core: object) -> None:
    """ModelClassError unless it is a model of this library, before it is given its defaults."""
    if not isinstance(core, Model):
        raise ModelClassError(
            "this object is not a model that can generate",
            wanted="a models.Model",
            got=type(core).__name__,
            do="Use everystep.load_model",
        )


def read_functions(name: str, value: Any) -> tuple[Any, ...]:
    """The functions in a list argument, none without it; RequestError for anything else."""
    if value is None:
        return ()
    listed = isinstance(value, (list, tuple))
    if listed and all(callable(one) for one in value):
        return tuple(value)
    strangers = [one for one in value if not callable(one)] if listed else [value]
    raise RequestError(
        f"{name} is not a list of functions",
        wanted="a list of callables of (input_ids, scores)",
        got=shown(strangers[0]),
        do=f"Pass {name}=[...] with an object that can be called",
    )


def read_text(name: str, value: object) -> str | None:
    """The value, which is None or a text; RequestError if not."""
    if value is None or isinstance(value, str):
        return value
    raise RequestError(f"{name} is of another kind", wanted="a text", got=shown(value))


def read_hooks(value: Any) -> tuple[Hook, ...]:
    """The hooks in a list argument, none without it; RequestError for anything else."""
    listed = [] if value is None else value
    several = isinstance(listed, (list, tuple))
    strangers = [one for one in listed if not _is_hook(one)] if several else [value]
    if strangers:
        raise RequestError(
            "hooks is not a list of hooks",
            wanted="a list of objects of classes that derive from everystep.Hook",
            got=shown(strangers[0]),
            do="Pass hooks=[MyHook()]",
        )
    return tuple(listed)


def read_adapters(value: Any, known: Sequence[str]) -> Any:
    """The value; RequestError if it names an adapter that the model does not have."""
    names = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    if strangers := [one for one in names if isinstance(one, str) and one not in known]:
        raise RequestError(
            "adapter_names has one that the model does not have",
            wanted=", ".join(known) or "none",
            got=shown(strangers[0]),
            do="Load it with model.load_adapter first",
        )
    return value


def _is_hook(value: object) -> bool:
    members = ("on_prompt", "before_step", "after_step")
    named = all(isinstance(getattr(value, name, None), tuple) for name in ("gives", "reads"))
    callables = all(callable(getattr(value, name, None)) for name in members)
    return named and callables and not isinstance(value, type)
