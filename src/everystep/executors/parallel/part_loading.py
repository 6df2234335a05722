"""Loading a model in parts: each process reads its own, and none ever holds the whole."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

from everystep.errors import RequestError, UnsupportedError
from everystep.executors.parallel.crew import Crew
from everystep.executors.parallel.group import RankGroup, file_store
from everystep.executors.parallel.parallel_executor import agree
from everystep.executors.parallel.rank_server import RankServer
from everystep.executors.process import loading
from everystep.files.model_folder import open_folder
from everystep.files.sources import Launched, launched
from everystep.models import Model, build_model
from everystep.models.load import require_split
from everystep.models.quantised_folder import folder_format

_LED = "led"


def load_parts(
    folder: Path, dtype: torch.dtype | None, count: int, patience: float
) -> tuple[Model, Crew]:
    """Return the first process's part of the model in a folder, and the crew that it leads.

    The others are children of this process; under torchrun they are those that it has started, in
    which this call serves the first and ends with SystemExit. `patience`: the seconds after which a
    process that does not answer is taken for lost. Raise UnsupportedError for a model that cannot
    lie in so many parts, before anything is read or started.
    """
    config = open_folder(folder).config
    if folder_format(config) is not None:
        raise UnsupportedError(
            "weights that are quantised do not lie in parts",
            wanted="a folder with weights of floats",
            do="Load it without parallel",
        )
    require_split(config, count)
    ranks = launched()
    if ranks is None:
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        threads = torch.get_num_threads()
        orders = {"folder": str(folder.absolute()), "dtype": name, "threads": threads}
        crew = Crew.of_children(count, patience, orders)
    else:
        crew = Crew(_met(ranks, folder, dtype, count, patience), None)
    try:
        model = load_part(folder, dtype, crew.group)
        crew.ready()
        agree(crew, model)
    except BaseException:
        crew.close()
        raise
    return model, crew


@loading()
def load_part(folder: Path, dtype: torch.dtype | None, group: RankGroup) -> Model:
    """Return a process's part of the model in a folder."""
    found = open_folder(folder)
    return build_model(found.config, found.weights(), dtype=dtype, split=group)


def _met(
    ranks: Launched, folder: Path, dtype: torch.dtype | None, count: int, patience: float
) -> RankGroup:
    """Return the group of processes that were started together to the first; serve it in the
    others, and end them."""
    if ranks.count != count:
        raise RequestError(
            "parallel is not the number of processes that were started together",
            wanted=f"parallel={ranks.count}",
            got=f"parallel={count}",
            do="Start as many as the model is to have parts",
        )
    store, _, _ = next(rendezvous("env://"))
    own = None if ranks.number else patience
    group = RankGroup(ranks.number, count, store, own, here=ranks.is_local)
    if ranks.number:
        serve(group, folder, dtype)
        sys.exit(0)
    if group.noted(_LED) is not None:
        raise UnsupportedError(
            "processes that were started together hold parts of one model, and hold some already",
            do="Load the other model without parallel, or in another run",
        )
    group.note(_LED, "1")
    return group


def serve(
    group: RankGroup,
    folder: Path,
    dtype: torch.dtype | None,
    meeting: int = 1,
    parent: int | None = None,
) -> None:
    """Load a part, and take the steps of the first process until it is over."""
    group.meeting = meeting
    try:
        model = load_part(folder, dtype, group)
    except Exception as error:
        group.fail(error)
        raise
    RankServer(group, model, parent).serve(meeting)


def main() -> None:
    """Serve the process that has started this one, with the orders on the standard input."""
    orders: dict[str, Any] = json.loads(sys.stdin.read())
    torch.set_num_threads(orders["threads"])
    dtype = None if orders["dtype"] is None else getattr(torch, orders["dtype"])
    place, parent = Path(orders["store"]), orders["parent"]
    group = RankGroup(orders["number"], orders["count"], file_store(place), None, here=True)
    try:
        serve(group, Path(orders["folder"]), dtype, orders["meeting"], parent)
    finally:
        if os.getppid() != parent:  # which was killed, and leaves this to the others
            shutil.rmtree(place.parent, ignore_errors=True)
