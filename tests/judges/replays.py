"""Whole runs chosen again from the numbers of a record: the textbook's searches, which read the
scores of each row in place of a model's, have to come to the recorded hypotheses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.records import RecordedRow, RecordedRun, read_record
from everystep.records.reader import RecordedChild
from everystep.strategies import Beam, BestOf, Contrastive
from everystep.strategies.classic import BankedBeams
from everystep.strategies.constrained import ConstrainedBeam
from everystep.testing.hash_function import HashFunction
from everystep.types import Request
from tests.judges.dice import EMBED_DIM
from tests.judges.mixes import Mix
from tests.judges.prefix import Hypothesis, Prefix, is_found
from tests.judges.textbook import told

Place = tuple[tuple[int, ...], int]  # ids after the prompt, and the search that they belong to
NATURAL = ("stop", "length", "criteria", "time")
CLOSE = 1e-4


@dataclass(frozen=True)
class Sampled:
    """A sample of best-of as it ended, with the surprise of each of its tokens."""

    tokens: tuple[int, ...]
    reason: str
    surprises: tuple[float, ...]


@dataclass(frozen=True)
class ReplayedPrefix(Prefix):
    """A prompt, the scores after which are those of recorded rows."""

    rows: Mapping[Place, RecordedRow] = field(default_factory=dict)

    def scores_beside(self, tokens: list[int], chosen: list[int] | None) -> Tensor:
        """(V,) what a row says of its candidates; of others, that they are not possible."""
        strategy = self.request.strategy
        size = strategy.width // strategy.rounds
        row = self.rows.get((tuple(tokens), len(chosen or ()) // size))
        if row is None:
            raise InvariantError("a record has no row after these ids", got=tokens)
        known = super().scores_beside(tokens, chosen)
        _require_equal(row, known)
        scores = torch.full_like(known, -torch.inf)
        if isinstance(strategy, ConstrainedBeam):  # a bank may take what no row has among its best
            scores = known.clone()
        if isinstance(strategy, Contrastive):  # whose probabilities are of all tokens
            scores = _spread(row, len(known))
        for id, value in zip(row.ids, row.scores, strict=True):
            scores[id] = -math.inf if value is None else value
        return scores


def _require_equal(row: RecordedRow, known: Tensor) -> None:
    """Raise InvariantError unless the scores of a row are those of the textbook."""
    for id, value in zip(row.ids, row.scores, strict=True):
        there = float(known[id])
        if not math.isclose(-math.inf if value is None else value, there, abs_tol=1e-5):
            raise InvariantError("a row's scores are others", wanted=there, got=value)


def _spread(row: RecordedRow, size: int) -> Tensor:
    """(V,) with what the total of a row has beyond its candidates, in equal parts."""
    own = [value for value in row.scores if value is not None]
    total = -math.inf if row.totals[1] is None else row.totals[1]
    top = max([*own, total])
    left = math.exp(total - top) - sum(math.exp(value - top) for value in own)
    others = size - len(row.ids)
    part = math.log(left / others) + top if others and left > 1e-6 else -math.inf
    return torch.full((size,), part)


def replay_whole(mix: Mix, file: Path) -> Counter[str]:
    """Choose again what was chosen; how many runs of each strategy had all to their ends."""
    function, seen = HashFunction(mix.vocab_size, EMBED_DIM), Counter[str]()
    requests = {request.request_id: request for request in mix.requests}
    for run in read_record(file).runs.values():
        request = requests[str(run.about["request"])]
        kind = type(request.strategy).__name__
        searches = isinstance(request.strategy, BankedBeams | Beam | Contrastive)
        if isinstance(request.strategy, BestOf):
            seen[f"{kind} by {request.strategy.by}"] += _judge_samples(request, run)
        elif searches and not getattr(request.strategy, "sampled", False):
            seen[kind] += _search_again(request, function, run)
    return seen


def _search_again(request: Request, function: HashFunction, run: RecordedRun) -> bool:
    """Whether a run came to its end, which is the textbook's from its numbers."""
    rows = _followed(request, run)
    if not run.ends or any(end.kind not in NATURAL for end in run.ends):
        return False
    found = told(ReplayedPrefix(request, function, rows=rows))
    _require_results(run, found)
    return True


def _require_results(run: RecordedRun, found: list[Hypothesis]) -> None:
    ends = {end.index: end.kind for end in run.ends}
    own = [(run.tokens.get(i, []), ends.get(i)) for i in range(len(found))]
    wanted = [([*one.tokens], one.reason) for one in found]
    if own != wanted:
        raise InvariantError("a record leads elsewhere", wanted=wanted, got=own)


def _followed(request: Request, run: RecordedRun) -> dict[Place, RecordedRow]:
    """The rows of a run by the ids that they follow; each child has what its row says."""
    size = request.strategy.width // request.strategy.rounds
    lines: dict[int, tuple[int, ...]] = dict.fromkeys(range(request.strategy.width), ())
    found: dict[Place, RecordedRow] = {}
    for step in run.steps:
        rows = {row.of: row for row in step.rows}
        for of, row in rows.items():
            found.setdefault((lines[of], of // size), row)
        twins = set[tuple[int, tuple[int, ...]]]()
        for child in step.children:
            if (child.parent, child.ids) not in twins:  # a forced id has all siblings
                _require_child(request, rows[child.parent], lines[child.parent], child)
            twins.add((child.parent, child.ids))
        live = [one for one in step.children if one.end is None]
        if live:
            lines = {one.index: (*lines[one.parent], *one.ids) for one in live}
    return found


def _require_child(
    request: Request, row: RecordedRow, before: tuple[int, ...], child: RecordedChild
) -> None:
    """Raise InvariantError unless a child's score follows from its row."""
    strategy, score = request.strategy, child.score
    scores = dict(zip(row.ids, row.scores, strict=True))
    if score is None or not child.ids:
        return
    (id,) = child.ids
    value = scores.get(id)
    if isinstance(strategy, Contrastive):
        if child.end is None:
            share = 0.0 if value is None else math.exp(value - (row.totals[1] or 0.0))
            _require_close(share, score)
        return
    closed = score == 0.0 and id == request.pad_token  # at rest beside others
    whole = (row.score or 0.0) + (-math.inf if value is None else value)
    if child.end is not None:
        whole /= (len(before) + 1) ** strategy.length_penalty  # type: ignore[attr-defined]
    if not closed and is_found(whole) and is_found(score):
        _require_close(whole, score)


def _require_close(wanted: float, got: float) -> None:
    if not math.isclose(wanted, got, rel_tol=CLOSE, abs_tol=1e-3):
        raise InvariantError("a child has another score", wanted=wanted, got=got)


# --- best of --------------------------------------------------------------------------------------


def _judge_samples(request: Request, run: RecordedRun) -> bool:
    """Whether a run came to its end: each token lies where its number fell, and the samples are
    judged again."""
    samples = _samples(request, run)
    kinds = [one.reason for one in samples]
    cut = [*NATURAL, *(["cancelled"] if request.strategy.by == "majority" else [])]  # type: ignore[attr-defined]
    whole = len(samples) == request.strategy.width and {*kinds} <= {*cut}
    if not whole or kinds.count("cancelled") == len(kinds):
        return False
    strategy: Any = request.strategy
    order = (
        _by_votes(strategy, samples) if strategy.by == "majority" else _by_rating(strategy, samples)
    )
    found = [Hypothesis(samples[i].tokens, 0.0, samples[i].reason) for i in order]
    _require_results(run, found[: strategy.returns])
    return True


def _samples(request: Request, run: RecordedRun) -> list[Sampled]:
    """The samples of a run by their numbers, each token of which was drawn."""
    open_ones = {i: Sampled((), "", ()) for i in range(request.strategy.width)}
    over: dict[int, Sampled] = {}
    for step in run.steps:
        rows = {row.of: row for row in step.rows}
        for child in step.children:
            before = open_ones.get(child.parent)
            if before is None or child.end == "error" or not child.ids:
                continue
            row = rows[child.parent]
            _require_drawn(row, child.ids[0])
            ids, known = (*before.tokens, *child.ids), (*before.surprises, row.surprise or 0.0)
            after = Sampled(ids, child.end or "", known)
            if child.end is None:
                open_ones[child.index] = after
            else:
                over[child.parent] = after
                del open_ones[child.parent]
    return [over[i] for i in sorted(over)]


def _require_drawn(row: RecordedRow, id: int) -> None:
    """Raise InvariantError unless the number that was drawn leads to this token."""
    scores = dict(zip(row.ids, row.scores, strict=True))
    draw, total = row.draw, row.totals[1] or 0.0
    if draw is None or row.chosen != id or scores.get(id) is None:
        raise InvariantError("nothing was drawn, or something else", wanted=row.chosen, got=id)
    below = sum(math.exp(v - total) for i, v in scores.items() if v is not None and i < id)
    above = sum(math.exp(v - total) for i, v in scores.items() if v is not None and i > id)
    fits = draw.low - CLOSE <= draw.number <= draw.high + CLOSE
    fits &= math.isclose(draw.high - draw.low, math.exp(scores[id] - total), abs_tol=CLOSE)  # type: ignore[operator]
    # Others that are possible are among the best of the row, or beside them.
    fits &= draw.low >= below - CLOSE and 1.0 - draw.high >= above - CLOSE
    if not fits:
        raise InvariantError("a draw leads elsewhere", wanted=(below, above), got=draw)


def _by_rating(strategy: BestOf, samples: list[Sampled]) -> list[int]:
    """The samples by mean log-probability, or by what their judge says."""
    ratings = [
        float(strategy.judge(np.array(one.tokens)))
        if strategy.judge is not None
        else -sum(one.surprises) / len(one.surprises)
        for one in samples
    ]
    return sorted(range(len(samples)), key=lambda i: -ratings[i])


def _by_votes(strategy: BestOf, samples: list[Sampled]) -> list[int]:
    """The samples by the votes for their answers; those that were cut off could change nothing."""
    assert strategy.judge is not None
    own = [
        None if one.reason == "cancelled" else strategy.judge(np.array(one.tokens))
        for one in samples
    ]
    votes = Counter(one for one in own if one is not None)
    first = {answer: own.index(answer) for answer in votes}
    order = sorted(
        range(len(samples)),
        key=lambda i: (
            samples[i].reason == "cancelled",
            -votes.get(own[i], 0),
            first.get(own[i], len(own)),
            i,
        ),
    )
    if cut := sum(one.reason == "cancelled" for one in samples):
        last = max(len(one.tokens) for one in samples)
        _require_certain(votes, cut)
        earlier = Counter(
            answer
            for one, answer in zip(samples, own, strict=True)
            if answer is not None and len(one.tokens) < last
        )
        late = sum(one.reason == "cancelled" or len(one.tokens) == last for one in samples)
        if _certain(earlier, late):
            raise InvariantError("a majority was certain earlier", got=earlier)
    return order


def _certain(votes: Counter[Any], going: int) -> bool:
    ranked = [*sorted(votes.values(), reverse=True), 0, 0]
    return bool(votes) and ranked[0] > ranked[1] + going


def _require_certain(votes: Counter[Any], going: int) -> None:
    if not _certain(votes, going):
        raise InvariantError("samples were cut off too early", wanted=votes, got=going)
