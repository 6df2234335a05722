"""What answers have to be: from the lines of a file as they stand there, and from a textbook's
model, that of transformers in float64 without a cache. Nothing of the inspector is used."""

from __future__ import annotations

import base64
import json
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everystep.text.pieces import byte_alphabet
from tests.cli.tiny_model import SPECIAL

END = 256
_NAMED = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


@dataclass(frozen=True)
class RawRecord:
    """The lines of a record in a file."""

    lines: list[dict[str, Any]]

    @classmethod
    def of(cls, file: Path) -> RawRecord:
        return cls([json.loads(line) for line in file.read_text().splitlines()])

    def about(self, run: str = "0") -> dict[str, Any]:
        return next(one for one in self.lines if one["type"] == "run" and one["run"] == run)

    def steps(self, run: str = "0") -> list[dict[str, Any]]:
        """Steps that chose something."""
        return [
            one
            for one in self.lines
            if one["type"] == "step" and one["run"] == run and one.get("rows")
        ]

    def tokens(self, index: int = 0, run: str = "0") -> list[int]:
        found: list[int] = []
        for one in self.lines:
            if one["type"] == "tokens" and one["run"] == run and one["index"] == index:
                found = [*found[: one["at"]], *one["ids"]]
        return found

    def row(self, at: int) -> dict[str, Any]:
        """The last row of sequence 0 that stands there."""
        rows = [row for step in self.steps() for row in step["rows"]]
        found: dict[str, Any] = [row for row in rows if (row["of"], row["at"]) == (0, at)][-1]
        return found

    def ends(self) -> list[dict[str, Any]]:
        return [one for one in self.lines if one["type"] == "end"]

    def spell(self, *ids: int) -> str:
        """The texts with marks, as anybody may see them."""
        texts: dict[str, Any] = {}
        for one in self.lines:
            texts |= one["texts"] if one["type"] == "spelling" else {}
        return "".join(shown_text(texts[str(id)]) for id in ids)


def shown_text(text: str | dict[str, str]) -> str:
    """A text, or its bytes, with marks."""
    if isinstance(text, dict):
        text = base64.b64decode(text["base64"]).decode(errors="backslashreplace")
    return "".join(
        _NAMED.get(one, f"‹U+{ord(one):04X}›" if unicodedata.category(one) in _HIDDEN else one)
        for one in text
    )


def texts_of_ids() -> list[str]:
    """The texts of the ids of `write_tiny_model`, with marks: bytes, then special tokens."""
    letters = {letter: byte for byte, letter in byte_alphabet().items()}
    known = [bytes([letters[letter]]) for letter in sorted(letters)]
    return [shown_text(one.decode(errors="backslashreplace")) for one in known] + [*SPECIAL]


@dataclass(frozen=True, eq=False)
class Textbook:
    """A model, and the prompt that its texts follow."""

    model: Any
    prompt: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path, prompt: Sequence[int]) -> Textbook:
        import transformers

        given = {"dtype": torch.float64, "attn_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **given)
        return cls(model.eval(), tuple(prompt))

    @cache  # noqa: B019 - as long as the tests of a file
    def logits(self, ids: tuple[int, ...]) -> Tensor:
        """(V,) after the prompt and these ids."""
        with torch.no_grad():
            found: Tensor = self.model(torch.tensor([[*self.prompt, *ids]])).logits[0, -1]
        return found

    def shares(self, ids: Sequence[int]) -> list[float]:
        """Of each id after those before it."""
        rows = [self.logits(tuple(ids[:at])).softmax(-1) for at in range(len(ids))]
        return [float(row[id]) for row, id in zip(rows, ids, strict=True)]

    def entropies(self, ids: Sequence[int]) -> list[float]:
        rows = [self.logits(tuple(ids[:at])) for at in range(len(ids))]
        return [entropy(row) for row in rows]

    def ranks(self, ids: Sequence[int]) -> list[int]:
        rows = [self.logits(tuple(ids[:at])) for at in range(len(ids))]
        return [int((row > row[id]).sum()) for row, id in zip(rows, ids, strict=True)]

    def sum(self, ids: Sequence[int]) -> float:
        """Of the log-probabilities."""
        return sum(map(math.log, self.shares(ids)))

    def penalised(self, ids: Sequence[int], penalty: float, least: int) -> Tensor:
        """(V,) scores with a repetition penalty and a least number of new tokens."""
        scores = self.logits(tuple(ids)).clone()
        for id in {*self.prompt, *ids}:
            scores[id] = scores[id] * penalty if scores[id] < 0 else scores[id] / penalty
        if len(ids) < least:
            scores[END] = -math.inf
        return scores

    def sampled(
        self,
        ids: Sequence[int],
        *,
        top_k: int | None,
        temperature: float,
        top_p: float,
        min_new_tokens: int = 0,
    ) -> Tensor:
        """(V,) scores that are sampled from."""
        scores = self.logits(tuple(ids)).clone()
        if len(ids) < min_new_tokens:
            scores[END] = -math.inf
        scores /= temperature
        order = scores.sort(descending=True).indices
        if top_k is not None:
            scores[order[top_k:]] = -math.inf
        before = 0.0  # the share of those that are likelier
        for id, share in zip(order.tolist(), scores.softmax(-1)[order].tolist(), strict=True):
            if before >= top_p:
                scores[id] = -math.inf
            before += share
        return scores

    def drawn(self, scores: Tensor, number: float) -> int:
        """The id in whose part of (0, 1) the number lies."""
        return int((scores.softmax(-1).cumsum(-1) < number).sum())

    def beams(self, width: int, steps: int) -> list[tuple[int, ...]]:
        """The live hypotheses after so many steps of a beam search, best first."""
        live: list[tuple[int, ...]] = [()]
        for _ in range(steps):
            ways = [way for way, _ in self.continued(live)]
            live = [way for way in ways if way[-1] != END][:width]
        return live

    def continued(self, live: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], float]]:
        """All hypotheses that are an id longer, with their sums, best first."""
        found = []
        for way in live:
            own = self.logits(way).log_softmax(-1) + self.sum(way)
            found += [((*way, id), score) for id, score in enumerate(own.tolist())]
        return sorted(found, key=lambda one: -one[1])

    def masked_loss(self, ids: Sequence[int], first: int, end: int) -> float:
        """By how much the ids are less likely where nobody reads these ids of the prompt, but each
        itself."""
        whole = [*self.prompt, *ids]
        seen = torch.ones(len(whole), len(whole)).tril().bool()
        seen[:, first:end] = False
        seen |= torch.eye(len(whole)).bool()
        mask = torch.where(seen, 0.0, -1e9).double()[None, None]
        given = {"attention_mask": mask, "position_ids": torch.arange(len(whole))[None]}
        with torch.no_grad():
            logits = self.model(torch.tensor([whole]), **given).logits[0]
        known = logits.log_softmax(-1)[len(self.prompt) - 1 : -1]
        return self.sum(ids) - sum(float(row[id]) for row, id in zip(known, ids, strict=True))

    def layers(self, ids: Sequence[int]) -> list[Tensor]:
        """(V,) what the head makes of the last state after each layer, the embeddings first."""
        inner = self.model.model
        with torch.no_grad():
            seen = inner(torch.tensor([[*self.prompt, *ids]]), output_hidden_states=True)
            states = [one[0, -1] for one in seen.hidden_states]
            own = [*(inner.norm(one) for one in states[:-1]), states[-1]]
            return [self.model.lm_head(one) for one in own]

    def looks(self, ids: Sequence[int]) -> Tensor:
        """(L, H, S) the weights of the last position."""
        given = torch.tensor([[*self.prompt, *ids]])
        with torch.no_grad():
            seen = self.model.model(given, output_attentions=True).attentions
        return torch.stack([one[0, :, -1] for one in seen])


def entropy(scores: Tensor) -> float:
    """In nats."""
    known = scores.log_softmax(-1)
    return -float((known.exp() * known).nan_to_num(0.0).sum())


def margin(scores: Tensor, id: int) -> float:
    """By how much an id is ahead of the best other one."""
    others = scores.clone()
    others[id] = -math.inf
    return float(scores[id] - others.max())


def repeated(ids: Sequence[int]) -> tuple[int, int, int, int] | None:
    """Size, count, first and second place of the longest part that stands there twice apart; of
    equally long ones, that whose second place comes first."""
    for size in range(min(32, len(ids) // 2), 1, -1):
        for again in range(size, len(ids) - size + 1):
            own = [*ids[again : again + size]]
            for first in range(again - size + 1):
                if [*ids[first : first + size]] == own:
                    return size, _times(ids, own), first, again
    return None


def _times(ids: Sequence[int], own: Sequence[int]) -> int:
    """How often it stands there, without overlaps."""
    count = at = 0
    while at <= len(ids) - len(own):
        same = [*ids[at : at + len(own)]] == [*own]
        count, at = count + same, at + (len(own) if same else 1)
    return count


@dataclass(frozen=True)
class Leaf:
    """A hypothesis that nobody continues: its ids, and what became of it."""

    ids: tuple[int, ...]
    fate: str  # the end, "live" or "dropped"
    step: int
    score: float | None


def leaves(raw: RawRecord) -> list[Leaf]:
    """All hypotheses of a search, by the children of its steps."""
    live: dict[int, tuple[int, ...]] = {0: ()}
    scores: dict[int, float | None] = {0: None}
    found = []
    for number, step in enumerate(raw.steps()):
        after, known = {}, {}
        for parent, index, ids, score, end in step["children"]:
            way = (*live.get(parent, ()), *ids)  # each group of diverse beams has a first one
            if end is None:
                after[index], known[index] = way, score
            else:
                found.append(Leaf(way, end, number, score))
        goes_on = {child[0] for child in step["children"]}
        found += [
            Leaf(way, "dropped", number, scores[of])
            for of, way in live.items()
            if of not in goes_on
        ]
        live, scores = after, known
    return [*found, *(Leaf(way, "live", -1, scores[of]) for of, way in live.items())]
