"""Embeddings on the wire: texts come in, and a vector of each goes out."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from everystep.errors import UnsupportedError
from everystep.server.answering import Head, Usage
from everystep.server.asking import Addressee, Caller, Wanted, read_inputs
from everystep.server.fields import Json
from everystep.server.messages import Begun, Over


def read_embeddings(given: Mapping[str, Json], to: Addressee, caller: Caller) -> Wanted:
    """Return what a body of /v1/embeddings asks for."""
    if given.get("dimensions") is not None:
        raise UnsupportedError(
            "dimensions cannot be chosen: no model here was trained to have its first ones alone",
            do="Leave dimensions out",
        )
    keywords: dict[str, Json] = {"max_new_tokens": 1, "seed": 0}
    if to.adapter is not None:
        keywords["adapter_names"] = to.adapter
    if (salt := caller.salt(None)) is not None:
        keywords["cache_salt"] = salt
    if (timeout := given.get("timeout")) is not None:
        keywords["timeout"] = timeout
    pools = given.get("pooling", "mean")
    return read_inputs(given, given["input"], to, keywords, pools)


class WholeEmbeddings:
    """The vectors of a request's inputs, in their order."""

    def __init__(self, wanted: Wanted, head: Head) -> None:
        self._wanted, self._head = wanted, head
        self._vectors: dict[int, np.ndarray] = {}
        self.usage = Usage()

    def begin(self, number: int, message: Begun) -> None:
        """Note nothing: there is no text."""

    def end(self, number: int, message: Over) -> None:
        """Take the vector of an input in."""
        (one,) = message.results
        vector = np.frombuffer(one.vector or b"", dtype="<f4")
        if self._wanted.said.get("normalize", True):
            length = math.sqrt(float(np.square(vector, dtype=np.float64).sum()))
            vector = (vector / (length or 1.0)).astype("<f4")
        self._vectors[number] = vector
        self.usage.prompt += one.prompt_tokens

    def shown(self) -> dict[str, Json]:
        """Return the vectors, as lists of numbers or in base64."""
        packed = self._wanted.said.get("encoding_format") == "base64"

        def shown(vector: np.ndarray) -> Any:
            return base64.b64encode(vector.tobytes()).decode() if packed else vector.tolist()

        usage = {"prompt_tokens": self.usage.prompt, "total_tokens": self.usage.prompt}
        vectors = sorted(self._vectors.items())
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": number, "embedding": shown(vector)}
                for number, vector in vectors
            ],
            "model": self._head.model,
            "pooling": self._wanted.pools,
            "usage": usage,
        }
