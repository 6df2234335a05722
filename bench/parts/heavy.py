"""What a neighbour's stream waits for while something heavy is asked, in steps of its own."""

from __future__ import annotations

import base64
import http.client
import io
import json
import random
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_CALM = 50  # events of the stream before and after
_TOKENS = 200  # of each answer that it streams
_WORDS = "sun sea wind rain moon snow sand tide fog ice hail dew "


@dataclass(frozen=True)
class HeavyAsk:
    """Something that is much to read: its name, the route and the body."""

    name: str
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class HeavyFigures:
    """What became of a heavy ask, and of the stream beside it.

    `steps`: those of the stream meanwhile. `longest`: the longest time between two of its tokens
    meanwhile, as a multiple of the usual one. `alone`: the longest of as many, fifty at least,
    after it.
    """

    name: str
    status: int
    seconds: float
    steps: int
    longest: float
    alone: float


def heavy_asks() -> list[HeavyAsk]:
    """4 MB of text, 100,000 ids, a schema of 200 kB, and a picture of 30 megapixels."""
    drawn = random.Random(7)
    values = [f"{drawn.getrandbits(64):016x}" for _ in range(9_500)]
    prompt = "/v1/completions"
    asks = [
        HeavyAsk("4 MB of text", prompt, {"prompt": _WORDS * (4_000_000 // len(_WORDS))}),
        HeavyAsk("100,000 ids", prompt, {"prompt": [100 + n % 900 for n in range(100_000)]}),
        HeavyAsk("a schema of 200 kB", prompt, {"prompt": "a", "schema": {"enum": values}}),
    ]
    try:
        from PIL import Image
    except ImportError:
        return asks
    file = io.BytesIO()
    Image.new("RGB", (6_000, 5_000), (200, 30, 90)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": parts}]
    picture = HeavyAsk("a picture of 30 MP", "/v1/chat/completions", {"messages": messages})
    return [*asks, picture]


class _Stream:
    """A stream that is read, again and again, and when its tokens came."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model, self._stop = port, model, False
        self.moments: list[list[float]] = [[]]
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stop:
            asked = {"model": self._model, "prompt": "the sea", "max_tokens": _TOKENS}
            body = json.dumps({**asked, "ignore_eos": True, "stream": True})
            connection = http.client.HTTPConnection("127.0.0.1", self._port)
            connection.request("POST", "/v1/completions", body, {"Content-Type": _JSON})
            for line in connection.getresponse():
                if self._stop:
                    break
                if line.startswith(b"data: {"):
                    self.moments[-1].append(time.perf_counter())
            connection.close()
            self.moments.append([])

    def wait(self, further: int) -> None:
        """Return after so many further tokens."""
        most = self.count + further
        while self.count < most and self._thread.is_alive():
            time.sleep(0.005)

    @property
    def count(self) -> int:
        """The tokens until now."""
        return sum(map(len, self.moments))

    def gaps(self, since: float, until: float) -> list[float]:
        """The seconds between tokens of an answer, of those between two moments."""
        pairs = (pair for answer in self.moments for pair in pairwise(answer))
        return [late - early for early, late in pairs if late > since and early < until]

    def leave(self) -> None:
        """Read no more."""
        self._stop = True
        self._thread.join()


_JSON = "application/json"


def beside(port: int, model: str, ask: HeavyAsk) -> HeavyFigures:
    """Ask something heavy of a server while a stream of it is read."""
    stream = _Stream(port, model)
    stream.wait(_CALM)
    body = json.dumps({"model": model, "max_tokens": 1, **ask.body})
    before, sent = stream.count, time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", ask.path, body, {"Content-Type": _JSON})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    answered, steps = time.perf_counter(), stream.count - before
    stream.wait(max(_CALM, steps))
    stream.leave()
    usual = statistics.median(stream.gaps(0.0, sent))
    longest = max(stream.gaps(sent, answered), default=0.0) / usual
    after = stream.gaps(answered, time.perf_counter())[: max(_CALM, steps)]
    alone = max(after) / usual
    return HeavyFigures(ask.name, answer.status, answered - sent, steps, longest, alone)
