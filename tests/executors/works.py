"""Random works for any executor on a decoder, and what a forward without a cache says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.models import Model
from everystep.models.dense import DenseContext
from everystep.nn.attention import RelativeBias, Rule, additive, probabilities, visible
from everystep.nn.network import State, StepInputs, Window
from everystep.types import Answer, Extra, Given, Past, StepOutput, Verb, Work

ROWS = 5


def ints(*values: int) -> np.ndarray:
    """(n,) int64."""
    return np.array(values, dtype=np.int64)


def one_feed(
    tokens: list[int], *, row: int = 0, start: int = 0, verbs: tuple[Verb, ...] = ()
) -> Work:
    """A work with a single feed that wants all its logits."""
    count = len(tokens)
    return Work(verbs, ints(row), ints(start), ints(count), ints(count), ints(*tokens))


def asking(work: Work, **wants: Any) -> Work:
    """The work, every feed of which brings or wants this too."""
    extras = {f: replace(work.extras.get(f, Extra()), **wants) for f in range(len(work.rows))}
    return replace(work, extras=extras)


def embedded(start: int, values: Tensor) -> Extra:
    """Embeddings (n, E) for positions of a feed from `start` on."""
    return Extra(inputs=(Given("embeds", start, values),))


def answer(output: StepOutput, feed: int = 0) -> Answer:
    """What a feed wanted."""
    return output.answers[feed]


def only_verbs(*verbs: Verb) -> Work:
    """A work without feeds."""
    return Work(verbs, ints(), ints(), ints(), ints(), ints())


@dataclass
class History:
    """Everything that a row has read: (T, E) embeddings at (T,) or (axes, T) position ids."""

    inputs: Tensor
    positions: Tensor

    def first(self, length: int) -> History:
        """Its first `length` positions."""
        return History(self.inputs[:length], self.positions[:length])

    def logits(self, model: Model) -> Tensor:
        """(T, V), by one forward over everything."""
        with torch.inference_mode():
            places = self.positions[..., None, :] if model.has_positions else None
            # Without a mask, jumps of the positions would be the seams of packed sequences.
            real = torch.ones(1, len(self.inputs), dtype=torch.int64)
            return model.forward(None, real, places, self.inputs[None])[0]

    def watched(self, model: Model) -> Watcher:
        """The same forward with everything that can be seen inside."""
        watcher = Watcher(DenseContext(model.network, 1, len(self.inputs), None))
        lengths = self.positions.amax().add(1).expand(len(self.inputs))
        with torch.inference_mode():
            hidden = model.network.forward(
                StepInputs(self.inputs, self.positions, lengths), watcher
            )
            watcher.layers[-1] = model.network.finish(hidden)
        return watcher


@dataclass
class Watcher:
    """A context of one row that notes (T, E) per layer, embeddings first, and (H, T, T) weights."""

    context: DenseContext
    layers: list[Tensor] = field(default_factory=list)
    attentions: list[Tensor] = field(default_factory=list)

    def attend(
        self, layer: int, q: Tensor, kv: Tensor, rule: Rule, bias: RelativeBias | None = None
    ) -> Tensor:
        keys = kv[:, 0].repeat_interleave(q.shape[1] // kv.shape[2], dim=1)
        places = torch.arange(len(q))
        mask = additive(visible(places, places, rule.window), q.dtype)
        scores = torch.einsum("thd,shd->hts", q, keys)
        self.attentions.append(probabilities(scores, rule, mask))
        return self.context.attend(layer, q, kv, rule, bias)

    def keep(self, hidden: Tensor) -> None:
        self.layers.append(hidden.clone())


def forgets(model: Model) -> bool:
    """Whether rows on torch operators drop what they hold, so that not every cut is possible."""
    stores = [one for layer in model.network.stores for one in layer]
    return any(isinstance(one, Window | State) for one in stores)


def both_hold(found: Past, wanted: Past, **tolerance: float) -> bool:
    """Whether two pasts agree in the positions of each layer that both have."""
    pairs = zip(found.layers, wanted.layers, strict=True)
    tensors = [(a, b) for one, other in pairs for a, b in zip(one, other, strict=True)]
    kept = [min(a.shape[1], b.shape[1]) for a, b in tensors]
    return found.length == wanted.length and all(
        torch.allclose(a[:, a.shape[1] - n :], b[:, b.shape[1] - n :], **tolerance)
        for (a, b), n in zip(tensors, kept, strict=True)
    )


def read(model: Model, ids: list[int]) -> History:
    """A row that has read ids."""
    return History(model.network.embed(torch.tensor(ids)), torch.arange(len(ids)))


@dataclass
class Wanderer:
    """Makes one random work after another, and remembers what every row has read.

    `longest`: about where rows are freed. `most`: positions of a feed. `anywhere`: rows are cut to
    any length, not only to what their last feed wanted logits of. `plain`: feeds are ids, and want
    the logits of their last one.
    """

    model: Model
    rng: np.random.Generator
    positions: bool
    longest: int = 40
    most: int = 7
    anywhere: bool = True
    plain: bool = False
    histories: dict[int, History] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)

    def work(self) -> Work:
        """Some verbs, then feeds for some rows; a row that is full is freed first."""
        verbs = tuple(self._verbs())
        live = [row for row in self.histories if self.rng.random() < 0.7]
        return self._feeds(verbs, [int(row) for row in self.rng.permutation(live)])

    def _verbs(self) -> Iterator[Verb]:
        for row, history in list(self.histories.items()):
            if len(history.positions) > self.longest - 8 or self.rng.random() < 0.1:
                del self.histories[row]
                yield Verb("free", row)
            elif self.rng.random() < 0.2:
                length = self._shorter(row, len(history.positions))
                self.histories[row] = history.first(length)
                yield Verb("truncate", row, length)
        for row in sorted(set(range(ROWS)) - set(self.histories)):
            if self.rng.random() < 0.5:
                yield self._open(row)

    def _shorter(self, row: int, length: int) -> int:
        if self.anywhere or self.rng.random() < 0.2:
            return int(self.rng.integers(0, length + 1)) if self.anywhere else 0
        return int(self.rng.integers(min(self.floors[row], length), length + 1))

    def _open(self, row: int) -> Verb:
        self.floors[row] = 0
        if self.histories and self.rng.random() < 0.5:
            source = int(self.rng.choice(list(self.histories)))
            self.histories[row] = replace(self.histories[source])
            self.floors[row] = self.floors[source]
            return Verb("fork", row, source)
        width = self.model.spec.width
        nothing = torch.empty(0, width, dtype=torch.float64)
        self.histories[row] = History(nothing, torch.empty(0, dtype=torch.int64))
        return Verb("allocate", row)

    def _feeds(self, verbs: tuple[Verb, ...], rows: list[int]) -> Work:
        starts = [len(self.histories[row].positions) for row in rows]
        counts = [int(self.rng.integers(1, self.most + 1)) for _ in rows]
        wanted = [1 if self.plain else int(self.rng.integers(0, n + 1)) for n in counts]
        for row, start, count, want in zip(rows, starts, counts, wanted, strict=True):
            self.floors[row] = start + count - want
        tokens, extras = [ints()], {}
        for f, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            ids, given, inputs = self._inputs(count)
            extra = Extra() if given is None else embedded(0, given)
            place = torch.arange(start, start + count)
            if self.positions:
                place = torch.from_numpy(self.rng.integers(0, 60, count))
                extra = replace(extra, positions=place)
            self._remember(row, inputs, place)
            tokens.append(ids)
            if given is not None or self.positions:
                extras[f] = extra
        return Work(
            verbs,
            ints(*rows),
            ints(*starts),
            ints(*counts),
            ints(*wanted),
            np.concatenate(tokens),
            extras,
        )

    def _inputs(self, count: int) -> tuple[np.ndarray, Tensor | None, Tensor]:
        """Ids, the embeddings that stand before them if any, and what the model reads."""
        ids = self.rng.integers(0, self.model.vocab_size, count)
        inputs = self.model.network.embed(torch.from_numpy(ids))
        if self.plain or self.rng.random() < 0.7:
            return ids, None, inputs
        own = int(self.rng.integers(1, count + 1))
        given = torch.from_numpy(self.rng.standard_normal((own, self.model.spec.width)))
        ids[:own] = -1
        return ids, given, torch.cat([given, inputs[own:]])

    def _remember(self, row: int, inputs: Tensor, positions: Tensor) -> None:
        old = self.histories[row]
        self.histories[row] = History(
            torch.cat([old.inputs, inputs]), torch.cat([old.positions, positions])
        )


def expected_logits(model: Model, work: Work, histories: dict[int, History]) -> Tensor:
    """(R, V) of the wanted positions, in feed order."""
    parts = [torch.empty(0, model.vocab_size, dtype=torch.float64)]
    for row, wanted in zip(work.rows.tolist(), work.logits.tolist(), strict=True):
        logits = histories[row].logits(model)
        parts.append(logits[len(logits) - wanted :])
    return torch.cat(parts)
