"""Keywords of `generate` between the front and the engine, where JSON has them in another form.

Steering is vectors by layer, or the name of those that the operator has. The front judges it and
packs its numbers as bytes, and the engine reads these where it reads prompts.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError, nearest, shown
from everystep.server.fields import MOST_STEERED, Json
from everystep.server.messages import ModelFacts

PackedSteering = dict[str, bytes] | str
"""Vectors by layer, float64 with the least byte first, or a name of the operator's."""
Vectors = Mapping[int, Tensor]


def packed_steering(asked: Json, facts: ModelFacts) -> PackedSteering:
    """Return what a request is to be steered by, as it goes to the engine.

    UnsupportedError for a model that cannot be steered, UnknownArgumentError for a name that the
    operator has not given, RequestError for what are no vectors after its layers.
    """
    if not facts.layers:
        what = f"steer adds to the layers of a decoder, and {facts.name} is none"
        raise UnsupportedError(what, do="Leave steer out")
    if isinstance(asked, str):
        if asked in facts.steering:
            return asked
        near = nearest(asked, facts.steering)
        raise UnknownArgumentError(
            f"steer names vectors that there are not: {asked[:80]!r}",
            wanted=", ".join(facts.steering[:8]) or "vectors by layer, as none have a name here",
            do=f"Perhaps you meant {near}" if near else "Send vectors, or a name that there is",
        )
    return {layer: _packed(layer, vector, facts) for layer, vector in asked.items()}


def _packed(layer: str, vector: Json, facts: ModelFacts) -> bytes:
    """Return one vector's bytes."""
    wanted = f"0 to {facts.layers - 1}, as a text"
    if not re.fullmatch(r"0|[1-9]\d{0,5}", layer) or int(layer) >= facts.layers:
        what = "steer names a layer that the model does not have"
        raise RequestError(what, wanted=wanted, got=layer[:40])
    if not isinstance(vector, list) or len(vector) != facts.width:
        got = f"{len(vector)} of them" if isinstance(vector, list) else shown(vector)[:40]
        wanted = f"{facts.width} numbers, as many as its hidden states have"
        raise RequestError(f"steer[{layer}] does not fit the model", wanted=wanted, got=got)
    for place, one in enumerate(vector):
        if type(one) not in (int, float) or not _is_finite(one):
            what, got = f"steer[{layer}][{place}] is impossible", shown(one)[:40]
            raise RequestError(what, wanted="a finite number", got=got)
    return np.frombuffer(array("d", vector), np.float64).astype("<f8").tobytes()


def _is_finite(number: float) -> bool:
    """Return whether a number of JSON is one of those that float64 has."""
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer of hundreds of digits
        return False


def unpacked_steering(sent: Any, named: Mapping[str, Vectors]) -> Vectors | None:
    """Return the vectors that a packed one stands for, None for none."""
    if sent is None or isinstance(sent, str):
        return None if sent is None else named[sent]
    return {
        int(layer): torch.from_numpy(np.frombuffer(data, "<f8").astype(np.float64))
        for layer, data in sent.items()
    }


def as_keywords(sent: Mapping[str, object], named: Mapping[str, Vectors]) -> dict[str, object]:
    """Return keywords as `generate` takes them; `named`: what the operator steers by."""
    given = dict(sent)
    bias = given.get("logit_bias")
    if isinstance(bias, dict):
        given["logit_bias"] = {int(key): value for key, value in bias.items()}
    if (steer := given.get("steer")) is not None:
        given["steer"] = unpacked_steering(steer, named)
    return given


def require_bounded(steer: object) -> None:
    """Raise RequestError for vectors of a saved run that are more than a request may bring."""
    numbers = sum(map(len, steer.values())) if isinstance(steer, dict) else MOST_STEERED + 1
    if numbers > MOST_STEERED:
        what = "the saved run is steered by more than a request may bring"
        raise RequestError(what, wanted=f"{MOST_STEERED} numbers at most, by layer")
