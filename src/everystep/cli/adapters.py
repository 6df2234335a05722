"""`--adapter` and `--steer`: what a command changes of its model, in folders and in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.errors import RequestError

AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]DIR[@WEIGHT]",
        help="Run the model with the adapter in DIR, so much of it. Repeatable: a mix.",
        rich_help_panel="Model",
    ),
]

SteerOption = Annotated[
    Path | None,
    typer.Option(
        "--steer",
        metavar="FILE.safetensors",
        help="Add the vectors in FILE after layers; a vector's name is the number of its layer.",
        rich_help_panel="Model",
    ),
]


@dataclass(frozen=True)
class AskedAdapter:
    """An adapter in a folder, its name and how much of it a command runs with."""

    name: str
    folder: Path
    weight: float


def asked_adapters(texts: Sequence[str] | None) -> tuple[AskedAdapter, ...]:
    """Return what was asked for, in this order; RequestError for what cannot be read, and for two
    of one name."""
    found = tuple(map(_read, texts or ()))
    names = [one.name for one in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RequestError(
            "--adapter gives two adapters one name",
            got=repr(twice[0]),
            do="Write NAME=DIR, with a name for each",
        )
    return found


def named_adapters(texts: Sequence[str] | None) -> dict[str, str]:
    """Return the folders of adapters that are asked for by their names; RequestError for a weight,
    which belongs to who asks."""
    asked = asked_adapters(texts)
    if whole := next((one for one in asked if one.weight != 1), None):
        raise RequestError(
            "--adapter has a weight, and who asks for an adapter says how much of it",
            wanted="DIR or NAME=DIR",
            got=f"{whole.folder}@{whole.weight:g}",
            do="Leave the weight out, and send it: {'adapters': {NAME: WEIGHT}}",
        )
    return {one.name: str(one.folder) for one in asked}


def with_adapters(model: Any, asked: Sequence[AskedAdapter]) -> dict[str, Any]:
    """Load them into a model, and return the arguments of a call that runs with them."""
    for one in asked:
        model.load_adapter(one.folder, one.name)
    return {"adapters": {one.name: one.weight for one in asked}} if asked else {}


def asked_steering(file: Path | None) -> dict[str, Any]:
    """Return the argument of a call that is steered by the vectors in a file; none without one."""
    if file is None:
        return {}
    from everystep.adapters import read_vectors  # imports torch, which others do without

    return {"steer": read_vectors(file)}


def _read(text: str) -> AskedAdapter:
    """Return the adapter of NAME=DIR@WEIGHT; a folder that is there may have either sign in its
    name."""
    name, rest, weight = "", text, 1.0
    if not Path(rest).is_dir() and "=" in rest:
        name, _, rest = rest.partition("=")
    if not Path(rest).is_dir() and "@" in rest:
        rest, _, number = rest.rpartition("@")
        try:
            weight = float(number)
        except ValueError:
            weight = float("nan")
    folder = Path(rest)
    if not rest or weight != weight:
        wanted = "a folder, as DIR, NAME=DIR or NAME=DIR@0.5"
        raise RequestError("--adapter cannot be read", wanted=wanted, got=repr(text))
    return AskedAdapter(name or folder.resolve().name, folder, weight)
