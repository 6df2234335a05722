"""`--adapter` and `--steer`: what a command changes of its model, in folders and in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.errors import RequestError

_MIX, _NAMED = "[NAME=]DIR[@WEIGHT]", "[NAME=]DIR"
_adapter = partial(typer.Option, "--adapter")
_of_model = partial(_adapter, rich_help_panel="Model")

AdapterOption = Annotated[
    list[str] | None,
    _of_model(
        metavar=_MIX,
        help="Run the model with the adapter in DIR, so much of it. Repeatable: a mix.",
    ),
]
ServedAdapters = Annotated[
    list[str] | None,
    _adapter(metavar=_NAMED, help="Serve an adapter as a model. Repeatable."),
]
TrainedAdapter = Annotated[
    list[str] | None,
    _of_model(metavar=_NAMED, help="Go on training the adapter in DIR, in the place of a new one."),
]
VerifiedAdapter = Annotated[
    list[str] | None, _adapter(metavar=_NAMED, help="Compare MODEL with the adapter in DIR.")
]
CheckedAdapters = Annotated[
    list[str] | None,
    _adapter(metavar=_NAMED, help="Check the adapter in DIR, and how MODEL runs it. Repeatable."),
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

WITHOUT_ADAPTERS: Mapping[str, str] = {
    "pull": "It fetches models; an adapter is used from its folder: everystep generate --adapter.",
    "models": "It lists and removes models; an adapter stays in its own folder.",
    "quantize": "In Python, es.export_gguf(model, tokenizer, target, adapters=[...]) writes a file"
    " with adapters in its weights; model.save_pretrained(folder, adapters=[...]) writes a model"
    " that this command takes.",
    "transcribe": "Models that listen take no adapters: put the adapter into the weights with PEFT,"
    " merge_and_unload(), save that, and name its folder with -m.",
    "info": "`everystep doctor MODEL --adapter DIR` says what DIR holds and how MODEL runs it.",
    "completion": "It runs no model; everystep generate --adapter does.",
}
"""The commands for which an adapter means nothing -> what is to be done instead."""


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
    asked = _whole(
        asked_adapters(texts),
        "and who asks for an adapter says how much of it",
        "Leave the weight out, and send it: {'adapters': {NAME: WEIGHT}}",
    )
    return {one.name: str(one.folder) for one in asked}


def checked_adapters(texts: Sequence[str] | None) -> tuple[AskedAdapter, ...]:
    """Return adapters that are looked at one by one; RequestError for a weight."""
    do = "Leave the weight out"
    return _whole(asked_adapters(texts), "and what is checked is the whole of it", do)


def one_adapter(texts: Sequence[str] | None, why: str, do: str) -> AskedAdapter | None:
    """Return the only adapter that is asked for, None for none; RequestError for a mix.

    `why`: what one adapter alone is taken for. `do`: what is done with several.
    """
    asked = _whole(asked_adapters(texts), f"and {why}", do)
    if len(asked) > 1:
        got = ", ".join(one.name for one in asked)
        raise RequestError(f"--adapter gives a mix, and {why}", wanted="DIR", got=got, do=do)
    return asked[0] if asked else None


def _whole(asked: tuple[AskedAdapter, ...], why: str, do: str) -> tuple[AskedAdapter, ...]:
    """Return the same; RequestError where one of them has a weight."""
    if part := next((one for one in asked if one.weight != 1), None):
        wanted, got = "DIR or NAME=DIR", f"{part.folder}@{part.weight:g}"
        raise RequestError(f"--adapter has a weight, {why}", wanted=wanted, got=got, do=do)
    return asked


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
