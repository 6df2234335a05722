"""What random requests ask for beside one answer: allowed sequences, n-best, best-of, contrast."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from everystep.engine import Contrast
from everystep.processors.allowed import AllowedSequences, AllowedSequencesLogitsProcessor
from everystep.processors.repetition import NoRepeatNGramLogitsProcessor
from everystep.stops.ends import EosToken
from everystep.strategies import Beam, BestOf, Sample
from everystep.testing.hash_function import HashFunction
from everystep.testing.hash_model import HashExecutor
from everystep.types import Request, Wants
from tests.judges.rules import Forbid, Residue

if TYPE_CHECKING:
    from tests.judges.dice import Dice


def widened(request: Request, function: HashFunction, draw: Dice) -> Request:
    """The request, perhaps with more to choose from."""
    strategy = request.strategy
    if isinstance(strategy, Sample) and request.drafter is None and draw.chance(0.4):
        request = _judged(request, draw)
    elif isinstance(strategy, Beam) and draw.chance(0.5):
        keeps = draw.between(1, 9)
        returns = draw.between(1, max(keeps, strategy.width))
        wider = replace(strategy, keeps=keeps, returns=returns, gathers=draw.chance(0.5))
        request = replace(request, strategy=wider)
    if draw.chance(0.12):
        request = _among(request, function, draw)
    elif draw.chance(0.12):
        request = _contrasted(request, function, draw)
    return request


def readable(request: Request) -> Request:
    """The request without an amateur, if that cannot read the prompt."""
    mixes = isinstance(request.readout, Contrast) and not request.prompt.plain
    return replace(request, readout=None) if mixes else request


def _judged(request: Request, draw: Dice) -> Request:
    width = draw.between(2, 5)
    by = draw.one_of("likelihood", "score", "majority", "majority")
    judge = None if by == "likelihood" else Residue(draw.between(2, 4), by == "majority")
    strategy = BestOf(width, draw.between(1, width), by, judge)
    wants = replace(request.wants, logprobs=0) if judge is None else Wants()
    return replace(request, strategy=strategy, wants=wants)


def _among(request: Request, function: HashFunction, draw: Dice) -> Request:
    """Along sequences that share beginnings, where an end token can end them."""
    ends = next((stop.ids for stop in request.stops if isinstance(stop, EosToken)), ())
    if not ends:
        return request
    size = function.vocab_size
    known: list[list[int]] = []
    for _ in range(draw.between(1, 12)):
        head = draw.one_of(*known)[: draw.between(0, 4)] if known else []
        tail = draw.ids(size, draw.between(1, 5)).tolist()
        known.append([*head, *(token for token in tail if token not in ends)] or [tail[0]])
    among = AllowedSequencesLogitsProcessor(AllowedSequences(known), tuple(ends))
    # What bans further tokens comes first, or nothing might be left.
    others = request.processors
    last = any(isinstance(one, Forbid) for one in others) or draw.chance(0.3)
    place = len(others) if last else _after_bans(others)
    return replace(request, processors=(*others[:place], among, *others[place:]))


def _after_bans(processors: tuple[object, ...]) -> int:
    bans = [i for i, one in enumerate(processors) if isinstance(one, NoRepeatNGramLogitsProcessor)]
    return bans[-1] + 1 if bans else 0


def _contrasted(request: Request, function: HashFunction, draw: Dice) -> Request:
    """With an amateur, where it can read the prompt and what it leaves is not banned."""
    bans = (Forbid, NoRepeatNGramLogitsProcessor)
    banned = any(isinstance(one, bans) for one in request.processors)
    if not request.prompt.plain or banned or request.readout is not None:
        return request
    opened = partial(HashExecutor, function.vocab_size, 3)
    readout = Contrast(opened, draw.one_of(0.05, 0.3), draw.one_of(0.5, 1.0))
    return replace(request, readout=readout)
