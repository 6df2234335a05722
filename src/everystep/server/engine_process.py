"""The program of the engine's process: loads the models that it is told, and answers one front.

Its only connection is a socket that it was started with. What it is to load comes as arguments, as
JSON; it reads no other.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import msgspec

from everystep.adapters import read_vectors
from everystep.api.load import load
from everystep.api.model import LanguageModel
from everystep.files.sources import resolve_source
from everystep.processors.grammars.trials import GrammarTrials
from everystep.server.host import EngineLimits, HostedModel, Loader, serve_connection
from everystep.server.interpreter import take_short_turns
from everystep.server.request_log import write_warnings
from everystep.sounds.features import WhisperFeatureExtractor


class EngineOrders(msgspec.Struct, frozen=True):
    """The orders of an engine: models by name, adapters and files of vectors of the first by name,
    and its limits."""

    models: dict[str, str]
    adapters: dict[str, str] = {}
    steer: dict[str, str] = {}
    quantize: str | None = "auto"
    cache_dtype: str | None = None
    offline: bool = False
    threads: int | None = None
    max_rows: int = 32
    token_budget: int = 1024
    max_positions: int | None = None

    def limits(self) -> EngineLimits:
        """Return the limits of its engines."""
        return EngineLimits(self.max_rows, self.token_budget, self.max_positions)


def hosted(orders: EngineOrders) -> dict[str, HostedModel]:
    """Return the models, loaded, with their adapters and vectors."""
    loader = model_loader(orders)
    return {name: loader(name) for name in orders.models}


def model_loader(orders: EngineOrders) -> Loader:
    """Return what loads a model by its name, the first one with the adapters and vectors."""
    trials, first = GrammarTrials(), next(iter(orders.models))

    def loaded(name: str) -> HostedModel:
        path, is_first = orders.models[name], name == first
        model, tokenizer = load(
            path,
            quantize=orders.quantize,  # type: ignore[arg-type]  # judged where it is used
            cache_dtype=orders.cache_dtype,  # type: ignore[arg-type]
            offline=orders.offline,
        )
        for adapter, folder in orders.adapters.items() if is_first else ():
            model.load_adapter(Path(folder), adapter)
        files = orders.steer if is_first else {}
        vectors = {own: read_vectors(Path(file)) for own, file in files.items()}
        known = _extractor(model, path), trials, vectors
        return HostedModel(model, tokenizer, orders.limits(), *known)

    return loaded


def _extractor(model: LanguageModel, path: str) -> WhisperFeatureExtractor | None:
    """Return what makes features of sounds, as the files of a model that listens say it."""
    if not model.listens:
        return None
    folder = resolve_source(path, offline=True)
    prepared = (folder / "preprocessor_config.json").is_file()
    return WhisperFeatureExtractor.from_pretrained(folder) if prepared else None


def main(descriptor: str, orders: str) -> None:
    """Serve the front at the other end of this descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's; it says when to end
    write_warnings()
    take_short_turns()
    read = msgspec.json.decode(orders, type=EngineOrders)
    if read.threads is not None:
        import torch

        torch.set_num_threads(read.threads)
    loader = model_loader(read)
    with socket.socket(fileno=int(descriptor)) as connection:
        models = {name: loader(name) for name in read.models}
        serve_connection(connection, models, read.limits(), loader)


if __name__ == "__main__":
    main(*sys.argv[1:])
