"""The speed of a model on this machine: its first token, and the tokens after it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from everystep.config import FIELDS, META
from everystep.errors import RequestError, shown
from everystep.streamers import BaseStreamer

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel


@dataclass(frozen=True)
class Speed:
    """Medians over several calls of `rows` prompts with `positions` tokens each.

    `first`: seconds until the first tokens were there; `rest`: from then to the end, in which each
    row got `tokens` more.
    """

    rows: int
    positions: int
    tokens: int
    first: float
    rest: float


class _FirstToken(BaseStreamer):
    """A clock that notes the time at which the first token of a call is reported."""

    at: float | None = None

    def on_event(self, event: object) -> None:
        if self.at is None:
            self.at = time.perf_counter()

    def put(self, value: object) -> None:
        """Ignore the prompt."""

    def end(self) -> None:
        """Ignore the end, which whoever called sees."""


def measure_speed(
    model: LanguageModel,
    *,
    rows: int = 1,
    positions: int = 512,
    tokens: int = 64,
    repeats: int = 5,
    adapters: Mapping[str, float] | None = None,
) -> Speed:
    """Return the speed of greedy decoding after prompts of random ids, which no token ends early.

    A call before the others is not counted. `adapters`: what each row runs with, as of `generate`.
    RequestError for counts below 1.
    """
    counts = {"rows": rows, "positions": positions, "tokens": tokens, "repeats": repeats}
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise RequestError(f"{name} is impossible", wanted="1 or more", got=shown(value))
    draws = torch.Generator().manual_seed(rows * 1000 + positions)
    ids = torch.randint(model.vocab_size, (rows, positions), generator=draws).to(model.device)
    options = {**_greedy_without_end(model), "max_new_tokens": tokens + 1}
    options |= {"adapters": adapters} if adapters else {}
    run = partial(model.generate, ids, attention_mask=torch.ones_like(ids), **options)
    taken = [_seconds(run) for _ in range(repeats + 1)][1:]
    first, rest = (statistics.median(column) for column in zip(*taken, strict=True))
    return Speed(rows, positions, tokens, first, rest)


def _seconds(run: Callable[..., object]) -> tuple[float, float]:
    """Return the seconds of a call to its first tokens, and from there to the end."""
    clock = _FirstToken()
    begin = time.perf_counter()
    run(streamer=clock)
    end = time.perf_counter()
    first = end if clock.at is None else clock.at
    return first - begin, end - first


def _greedy_without_end(model: LanguageModel) -> dict[str, Any]:
    """Return options with which nothing in the model's own configuration changes a token, and no
    token ends a row."""
    own = model.generation_config.to_diff_dict()
    begins = ("bos_token_id", "decoder_start_token_id")
    plain = {name: None for name in own if name in FIELDS and name not in (*META, *begins)}
    return {**plain, "eos_token_id": None, "do_sample": False, "pad_token_id": 0}
