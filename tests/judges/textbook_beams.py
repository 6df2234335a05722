"""Diverse and constrained beams as in their textbooks: no cache, no batch, no engine.

Sources: Vijayakumar et al. 2016 for groups; Post and Vilar 2018 and Hu et al. 2019 for banks of
constraints; the rules of ending are those of transformers' `BeamHypotheses`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from everystep.processors.allowed import AllowedSequencesLogitsProcessor
from everystep.processors.grammars.mask import GrammarMask
from everystep.strategies.classic import BankedBeams
from everystep.strategies.constrained import ConstrainedBeam
from everystep.strategies.constraint_list import ConstraintListState
from tests.judges.prefix import NEVER, Hypothesis, Prefix, is_found


@dataclass
class Running:
    """One search: its beams and their scores, and what it has finished."""

    beams: list[list[int]]
    scores: list[float]
    finished: list[Hypothesis] = field(default_factory=list)
    over: bool = False
    best: float = 0.0  # of the last step's candidates


def banked_beams(prefix: Prefix, strategy: BankedBeams) -> list[Hypothesis]:
    """The `returns` best hypotheses of all searches; of equals the last of the last search."""
    size = strategy.width // strategy.rounds
    searches = [
        Running([[] for _ in range(size)], [0.0] + [NEVER] * (size - 1))
        for _ in range(strategy.rounds)
    ]
    cut = False
    while not cut and not all(search.over for search in searches):
        chosen: list[int] | None = None
        ended = any(search.finished for search in searches)
        before = [tokens for search in searches for tokens in search.beams]
        open_ones = [search for search in searches if not search.over]
        for search in searches:
            if search.over:
                rest = [*search.beams[0], prefix.request.pad_token]
                search.beams, search.scores = [rest] * size, [0.0] * size
            else:
                cut |= _step(prefix, strategy, search, chosen)
            chosen = (chosen or []) + [tokens[-1] for tokens in search.beams]
        if not ended and max(search.best for search in open_ones) == -torch.inf:
            found = [Hypothesis(tuple(tokens), 0.0, "error") for tokens in before]
            return found[: strategy.returns]
    for search in searches:
        if not search.over:
            pairs = list(zip(search.beams, search.scores, strict=True))
            whole = [pair for pair in pairs if _fulfilled(prefix, strategy, pair[0])]
            if len(whole) < strategy.returns:
                whole += [pair for pair in pairs if not _fulfilled(prefix, strategy, pair[0])]
            for tokens, score in whole:
                reason = prefix.reason(tokens) or "length"
                _finish(strategy, search, tokens, score, reason, len(tokens))
    power = strategy.length_penalty
    every = [one for search in searches for one in search.finished]
    every = [one for one in every if is_found(one.score * len(one.tokens) ** power)]
    ranked = sorted(enumerate(every), key=lambda pair: (pair[1].score, pair[0]), reverse=True)
    missing = [Hypothesis((), NEVER, "length")] * strategy.returns
    return ([one for _, one in ranked] + missing)[: strategy.returns]


def _step(prefix: Prefix, strategy: BankedBeams, search: Running, chosen: list[int] | None) -> bool:
    """One step of a search; `chosen`: what earlier ones go on with. Whether a limit is reached."""
    size = len(search.beams)
    scores = torch.stack([prefix.scores_beside(tokens, chosen) for tokens in search.beams])
    total = scores + torch.tensor(search.scores)[:, None]
    best = torch.topk(total.flatten(), max(2, 1 + strategy.eos_count) * size)
    going: list[tuple[list[int], float]] = []
    beyond: list[tuple[list[int], float]] = []
    cut = False
    length = len(search.beams[0]) + 1
    for rank, (score, flat) in enumerate(zip(*map(torch.Tensor.tolist, best), strict=True)):
        beam, token = divmod(flat, total.shape[1])
        tokens = [*search.beams[beam], token]
        reason = prefix.reason(tokens)
        cut |= reason in ("length", "time")
        if reason in (None, "length", "time"):
            going.append((tokens, score))
            continue
        beyond.append((tokens, score + NEVER))
        if rank < size and _fulfilled(prefix, strategy, tokens):
            _finish(strategy, search, tokens, score, str(reason), length)
    going = [*going[:size], *beyond][:size]
    if isinstance(strategy, ConstrainedBeam):
        going = _from_banks(prefix, strategy, search.beams, total, going)
    search.beams, search.scores = [pair[0] for pair in going], [pair[1] for pair in going]
    search.best = best.values[0].item()
    search.over = _settled(strategy, search, search.best, length)
    if not cut and not search.over and not any(is_found(score) for score in search.scores):
        search.over = True  # nothing goes on
        for tokens, score in beyond:
            if not _fulfilled(prefix, strategy, tokens):
                reason = str(prefix.reason(tokens))
                _finish(strategy, search, tokens, score - NEVER, reason, length)
    return cut


def _progress(prefix: Prefix, strategy: BankedBeams, tokens: list[int]) -> ConstraintListState:
    """How far the constraints are, read from the first id of the prompt on."""
    assert isinstance(strategy, ConstrainedBeam), "other searches have no constraints"
    ids = prefix.request.prompt.ids
    state = ConstraintListState(strategy.constraints)
    state.reset([*([] if ids is None else ids.tolist()), *tokens])
    return state


def _fulfilled(prefix: Prefix, strategy: BankedBeams, tokens: list[int]) -> bool:
    constrained = isinstance(strategy, ConstrainedBeam)
    return not constrained or _progress(prefix, strategy, tokens).completed


def _from_banks(
    prefix: Prefix,
    strategy: BankedBeams,
    beams: list[list[int]],
    total: torch.Tensor,
    going: list[tuple[list[int], float]],
) -> list[tuple[list[int], float]]:
    """The beams from which every bank gives one in turn, the highest first."""
    offers = list(going)
    followed = (GrammarMask, AllowedSequencesLogitsProcessor)
    follows = any(isinstance(one, followed) for one in prefix.request.processors)
    for beam, row in zip(beams, total.tolist(), strict=True):
        state = _progress(prefix, strategy, beam)
        for token in () if state.completed else state.advance() or ():
            tokens = [*beam, token]
            limits = prefix.reason(tokens) in (None, "length", "time")
            crowds = follows and row[token] == -torch.inf
            if limits and not crowds and tokens not in [known for known, _ in offers]:
                offers.append((tokens, row[token]))
    if len(offers) == len(going):
        return going
    banks = torch.tensor([_progress(prefix, strategy, tokens).get_bank() for tokens, _ in offers])
    rated = banks * 100 + torch.tensor([score for _, score in offers])
    rank = rated.sort(descending=True, stable=True).indices.tolist()
    # Of scores so low that they outweigh a bank, a bank has several stretches.
    turns: list[int] = []
    for place, offer in enumerate(rank):
        alike = place > 0 and banks[offer] == banks[rank[place - 1]]
        turns.append(turns[-1] + 1 if alike else 0)
    chosen = sorted(range(len(rank)), key=lambda place: turns[place])  # stable
    return [offers[rank[place]] for place in chosen[: len(going)]]


def _finish(
    strategy: BankedBeams,
    search: Running,
    tokens: list[int],
    score: float,
    reason: str,
    length: int,
) -> None:
    """One more finished hypothesis, of which only as many are kept as there are beams."""
    own = Hypothesis(tuple(tokens), score / length**strategy.length_penalty, reason)
    if len(search.finished) == len(search.beams):
        worst = min(search.finished, key=lambda one: one.score)
        if own.score <= worst.score:
            return
        search.finished.remove(worst)
    search.finished.append(own)


def _settled(strategy: BankedBeams, search: Running, best: float, length: int) -> bool:
    """Whether the search has enough, and expects nothing better."""
    if len(search.finished) < len(search.beams):
        return False
    if strategy.early_stopping == "never" and strategy.length_penalty > 0:
        length = strategy.max_new
    attainable = best / length**strategy.length_penalty
    worst = min(one.score for one in search.finished)
    return strategy.early_stopping is True or worst >= attainable
