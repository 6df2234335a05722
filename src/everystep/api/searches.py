"""Searches of several hypotheses, out of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everystep.errors import RequestError, shown
from everystep.processors.guidance import HammingDiversityLogitsProcessor
from everystep.strategies import Beam, ConstrainedBeam, DiverseBeam
from everystep.strategies.constraints import (
    Constraint,
    DisjunctiveConstraint,
    PhrasalConstraint,
)
from everystep.types.protocols import Strategy

if TYPE_CHECKING:
    from everystep.api.options import Options

_METHODS = ("advance", "does_advance", "update", "reset", "remaining", "copy")


def beams_of(options: Options, width: int, returns: int, most: int) -> Strategy:
    """The search of several hypotheses that the configuration names.

    `most`: the most new tokens that a row can get.
    """
    e, eos = options.effective, len(options.eos)
    groups, sampled = int(e.num_beam_groups or 1), bool(e.do_sample)
    constrained = e.constraints is not None or e.force_words_ids is not None
    if options.n_best and (constrained or groups > 1):
        raise RequestError(
            "n_best is not kept by groups of beams, nor by constrained ones",
            wanted="n_best with num_beams alone",
            got=f"n_best={options.n_best}",
            do="Set num_return_sequences instead",
        )
    returns = options.n_best or returns
    shared = (width, returns, float(e.length_penalty), e.early_stopping, eos, most)
    if constrained:
        return ConstrainedBeam(*shared, _constraints(e.constraints, e.force_words_ids))
    if groups > 1:
        return DiverseBeam(*shared, groups)
    return Beam(*shared, sampled=sampled, keeps=options.n_best or 0)


def _constraints(given: Any, words: Any) -> tuple[Constraint, ...]:
    """The caller's objects, and one for each word or list of words; RequestError without any."""
    found: list[Any] = [*(given or ())]
    for one in found:
        missing = [name for name in _METHODS if not callable(getattr(one, name, None))]
        if missing or not hasattr(one, "seqlen"):
            raise RequestError(
                "constraints holds something else",
                wanted="objects of classes that derive from everystep.Constraint",
                got=shown(one),
                do="Pass PhrasalConstraint(ids), or set force_words_ids",
            )
    for word in words or ():
        several = isinstance(word[0], list | tuple)
        found.append(DisjunctiveConstraint(word) if several else PhrasalConstraint(word))
    if not found:
        raise RequestError(
            "constraints is empty", wanted="at least one constraint", do="Leave constraints out"
        )
    return tuple(found)


def require_groups(options: Options) -> None:
    """RequestError if a processor is given that looks at groups of beams where there are none."""
    given = any(type(one) is HammingDiversityLogitsProcessor for one in options.processors)
    if given and int(options.effective.num_beam_groups or 1) == 1:
        raise RequestError(
            "HammingDiversityLogitsProcessor has no effect without groups of beams",
            wanted="num_beam_groups above 1, and diversity_penalty",
            do="Set them, or leave the processor out",
        )


def require_known_words(strategy: Strategy, vocabulary: int) -> None:
    """RequestError if words that must occur have ids beyond the vocabulary."""
    for one in strategy.constraints if isinstance(strategy, ConstrainedBeam) else ():
        ids = getattr(one, "token_ids", ())
        flat = [token for word in ids for token in (word if isinstance(word, list) else [word])]
        if max(flat, default=0) >= vocabulary:
            raise RequestError(
                "a word that must occur has an id beyond the vocabulary",
                wanted=f"0 to {vocabulary - 1}",
                got=max(flat),
                do="Check that tokenizer and model belong together",
            )
