"""How a call chooses tokens: what `strategy` asks for (a name, which stands for fields or for a
class, or a value), and the strategy that all of its options come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from everystep.config import FIELDS, Effective
from everystep.config.installed import made
from everystep.config.kinds import FLAG, MOST_ROWS, ROWS, SIZE, is_integer, require
from everystep.config.named_strategies import is_named, unknown_strategy
from everystep.errors import RequestError, shown
from everystep.processors.guidance import HammingDiversityLogitsProcessor
from everystep.requests.options import Choosing
from everystep.strategies import (
    Beam,
    BestOf,
    ConstrainedBeam,
    Contrastive,
    DiverseBeam,
    Greedy,
    Sample,
    strategy_named,
    strategy_names,
)
from everystep.strategies.constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint
from everystep.types.protocols import Reads
from everystep.types.request import Strategy

_MEMBERS = ("width", "returns", "streams", "reads", "rounds", "pick", "select", "finish")
_OF_OURS = (
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "penalty_alpha"),
    *("num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "dola_layers"),
)


def read_strategy(strategy: object, options: object) -> Strategy | None:
    """Return the strategy of a call where it is none of the library's own.

    `strategy`: a name or a value; `options`: what a class of that name is made with. RequestError
    where it is no strategy; UnknownArgumentError for an unknown name.
    """
    named = isinstance(strategy, str) and is_named(strategy)
    if options is not None and (named or not isinstance(strategy, str)):
        raise RequestError(
            "strategy_options are for a strategy of another package, given by its name",
            got=f"strategy={shown(strategy)}",
            do="Pass what the library's own strategies read as arguments of the call",
        )
    if strategy is None or named:
        return None
    if not isinstance(strategy, str):
        return _required(strategy)
    return _made(strategy, {} if options is None else options)


def refuse_beside(effective: Effective, strategy: Strategy) -> None:
    """RequestError if the caller, who brings a strategy, set a field that says how another one
    chooses, or asks for drafts that it cannot be given."""
    for name in _OF_OURS:
        if name in effective.caller and effective[name] != FIELDS[name].default:
            raise RequestError(
                f"{name} belongs to the library's own strategies",
                wanted="strategy alone, or the fields alone",
                got=f"strategy and {name}={effective[name]!r}",
                do="Give the strategy an option of its own",
            )
    if effective.prompt_lookup_num_tokens is not None and not strategy.reads.alone:
        raise RequestError(
            "drafts are for strategies whose sequences choose one token each, by themselves",
            wanted="a strategy with Reads(alone=True)",
            got=f"prompt_lookup_num_tokens={effective.prompt_lookup_num_tokens}",
            do="Leave prompt_lookup_num_tokens out",
        )


def strategy_of(e: Effective, choosing: Choosing, ends: int, most: int) -> Strategy:
    """Return what the call brings, or the configuration names: the one place that makes strategies
    of the library.

    `ends`: how many tokens end a sequence; `most`: the most new tokens that a row can get.
    RequestError where no strategy does what is asked for.
    """
    if choosing.strategy is not None:  # what the model's configuration says is not about it
        return choosing.strategy
    width, returns = int(e.num_beams or 1), int(e.num_return_sequences or 1)
    if width > 1:
        return _beams_of(e, ends, choosing.n_best, width, returns, most)
    if choosing.best_of is not None:
        return choosing.best_of
    if not e.do_sample and (e.penalty_alpha or 0) > 0 and (e.top_k or 0) > 1:
        return Contrastive(int(e.top_k), float(e.penalty_alpha))
    return Sample(returns) if e.do_sample else Greedy()


def require_candidates(top_k: int, vocabulary: int) -> None:
    """Refuse a contrastive search among more candidates than there are tokens, or rows."""
    most = min(vocabulary, MOST_ROWS)
    if top_k > most:
        raise RequestError(
            "contrastive search feeds each of its top_k candidates",
            wanted=f"at most {most}, of {vocabulary} tokens",
            got=f"top_k={top_k}",
            do="Lower top_k; 4 to 10 are usual",
        )


def require_known(name: str) -> None:
    """UnknownArgumentError, which lists every name, if no strategy has this one."""
    known = strategy_names()
    if not is_named(name) and name not in known:
        raise unknown_strategy(name, known)


def _made(name: str, options: object) -> Strategy:
    """The strategy of this name with these options."""
    require_known(name)
    if not isinstance(options, Mapping):
        wanted, got = "a mapping of names to values", shown(options)
        raise RequestError("strategy_options is of another kind", wanted=wanted, got=got)
    kind = strategy_named(name)
    return _required(made("strategy", name, kind, options, given="strategy_options"))


def _require_members(value: Any) -> None:
    """RequestError where what the strategy says of itself cannot be."""
    for name in ("width", "returns", "rounds"):
        SIZE.checked(getattr(value, name), f"{name} of the strategy")
    require(isinstance(value.reads, Reads), "reads of the strategy", "Reads", value.reads)
    most = f"at most its width, {value.width}"
    require(value.returns <= value.width, "returns of the strategy", most, value.returns)
    if value.rounds > 1:
        require(hasattr(value, "turn"), "rounds of the strategy", "1, or a method turn", "neither")


def _required(value: Any) -> Strategy:
    """The value; RequestError unless it is a strategy, which is frozen."""
    missing = [name for name in _MEMBERS if not hasattr(value, name)]
    if "streams" not in missing:
        FLAG.checked(value.streams, "streams of the strategy")
    if not missing and not value.streams and not hasattr(value, "rivals"):
        missing = ["rivals, as it does not stream"]
    if isinstance(value, type) or missing:
        raise RequestError(
            "this is no strategy",
            wanted=f"a name, or a value with {', '.join(_MEMBERS)}",
            got=f"{shown(value)}, without {', '.join(missing)}"
            if missing
            else f"the class {shown(value)}",
            do="Pass strategy=MyStrategy()",
        )
    _require_members(value)
    try:
        hash(value)
    except TypeError as error:
        do = "Make its class a frozen dataclass"
        raise RequestError("a strategy must never change", got=error, do=do) from error
    return cast(Strategy, value)


@dataclass(frozen=True)
class Judge:
    """A caller's function, asked about the text of an answer, or about its ids, as a tuple, where
    there is no tokenizer."""

    function: Callable[[Any], Any]
    tokenizer: Any = None

    def __call__(self, ids: np.ndarray) -> Any:
        plain = ids.tolist()
        if self.tokenizer is None:
            return self.function(tuple(plain))
        return self.function(str(self.tokenizer.decode(plain, skip_special_tokens=True)))


def read_best_of(
    count: object, majority: object, scorer: object, effective: Effective, tokenizer: object
) -> BestOf | None:
    """Return the strategy that `best_of`, `majority` and `scorer` ask for, or None."""
    functions = {"majority": majority, "scorer": scorer}
    named = {name: function for name, function in functions.items() if function is not None}
    if count is None and not named:
        return None
    if count is None:
        what = f"{next(iter(named))} chooses among samples, and best_of does not say of how many"
        raise RequestError(what, wanted="best_of with it", got="none", do="Pass best_of=8, say")
    returns = int(effective.num_return_sequences or 1)
    if not isinstance(count, int) or not is_integer(count) or not returns <= count <= MOST_ROWS:
        wanted = f"a number from {returns}, as many as are returned, to {MOST_ROWS}"
        raise RequestError("best_of is impossible", wanted=wanted, got=shown(count))
    if len(named) == 2 or not all(map(callable, named.values())):
        raise RequestError(
            "majority and scorer are two ways to choose" if len(named) == 2 else
            f"{next(iter(named))} is no function",
            wanted="majority=a function that finds the answer in a text, or scorer=a function that "
            "rates it",
            got=", ".join(map(shown, named.values())),
            do="Pass one function",
        )  # fmt: skip
    _require_samples(effective)
    if callable(majority):
        return BestOf(count, returns, "majority", Judge(majority, tokenizer))
    if callable(scorer):
        return BestOf(count, returns, "score", Judge(scorer, tokenizer))
    return BestOf(count, returns)


def _require_samples(e: Effective) -> None:
    """RequestError unless samples are drawn, one token after another."""
    for name, wrong, do in (
        ("do_sample", not e.do_sample, "Set do_sample=True: samples that are equal need no choice"),
        ("num_beams", (e.num_beams or 1) > 1, "Leave num_beams out, or set n_best instead"),
        (
            "prompt_lookup_num_tokens",
            e.prompt_lookup_num_tokens is not None,
            "Leave one of the two out: the samples of best_of end together",
        ),
    ):
        if wrong:
            what = f"best_of does not go with {name}={e[name]}"
            raise RequestError(what, wanted="plain samples", got=shown(e[name]), do=do)


def read_n_best(count: Any, effective: Effective) -> int | None:
    """Return how many of the hypotheses of a search are kept and returned; None: as the
    configuration says."""
    if count is None:
        return None
    count = ROWS.checked(count, "n_best")
    if (effective.num_beams or 1) == 1:
        raise RequestError(
            "n_best is about the hypotheses of a search",
            wanted="num_beams above 1 with it",
            got="num_beams=1",
            do="Set num_beams, or best_of with do_sample=True",
        )
    returns = effective.num_return_sequences or 1
    if returns not in (1, count):
        raise RequestError(
            "n_best and num_return_sequences ask for different numbers",
            wanted="one of the two",
            got=f"n_best={count}, num_return_sequences={returns}",
            do="Leave num_return_sequences out",
        )
    return int(count)


_METHODS = ("advance", "does_advance", "update", "reset", "remaining", "copy")


def _beams_of(
    e: Effective, ends: int, n_best: int | None, width: int, returns: int, most: int
) -> Strategy:
    """Return the search of several hypotheses that the configuration names."""
    groups = int(e.num_beam_groups or 1)
    constrained = e.constraints is not None or e.force_words_ids is not None
    if n_best and (constrained or groups > 1):
        raise RequestError(
            "n_best is not kept by groups of beams, nor by constrained ones",
            wanted="n_best with num_beams alone",
            got=f"n_best={n_best}",
            do="Set num_return_sequences instead",
        )
    returns = n_best or returns
    shared = (width, returns, float(e.length_penalty), e.early_stopping, ends, most)
    if constrained:
        return ConstrainedBeam(*shared, _constraints(e.constraints, e.force_words_ids))
    if groups > 1:
        return DiverseBeam(*shared, groups)
    return Beam(*shared, sampled=bool(e.do_sample), keeps=n_best or 0)


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


def require_groups(processors: Sequence[object], groups: int) -> None:
    """Refuse a processor that looks at groups of beams where there are none."""
    given = any(type(one) is HammingDiversityLogitsProcessor for one in processors)
    if given and groups == 1:
        raise RequestError(
            "HammingDiversityLogitsProcessor has no effect without groups of beams",
            wanted="num_beam_groups above 1, and diversity_penalty",
            do="Set them, or leave the processor out",
        )


def require_known_words(constraints: Sequence[Constraint], vocabulary: int) -> None:
    """RequestError if words that must occur have ids beyond the vocabulary."""
    for one in constraints:
        ids = getattr(one, "token_ids", ())
        flat = [token for word in ids for token in (word if isinstance(word, list) else [word])]
        if max(flat, default=0) >= vocabulary:
            raise RequestError(
                "a word that must occur has an id beyond the vocabulary",
                wanted=f"0 to {vocabulary - 1}",
                got=max(flat),
                do="Check that tokenizer and model belong together",
            )
