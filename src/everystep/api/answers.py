"""Several answers to one prompt: how many hypotheses a search keeps, and of how many samples the
best is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from everystep.config import Effective
from everystep.config.kinds import is_integer
from everystep.errors import RequestError, shown
from everystep.strategies import BestOf


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


def read_best_of(given: Mapping[str, Any], effective: Effective, tokenizer: Any) -> BestOf | None:
    """The strategy that `best_of`, `majority` and `scorer` ask for, or None."""
    count, returns = given.get("best_of"), int(effective.num_return_sequences or 1)
    named = [name for name in ("majority", "scorer") if given.get(name) is not None]
    if count is None:
        if named:
            what = f"{named[0]} chooses among samples, and best_of does not say of how many"
            raise RequestError(what, wanted="best_of with it", got="none", do="Pass best_of=8, say")
        return None
    if not is_integer(count) or count < returns:
        wanted = f"a number of at least {returns}, as many as are returned"
        raise RequestError("best_of is impossible", wanted=wanted, got=shown(count))
    if len(named) == 2 or not all(callable(given[name]) for name in named):
        raise RequestError(
            "majority and scorer are two ways to choose" if len(named) == 2 else
            f"{named[0]} is no function",
            wanted="majority=a function that finds the answer in a text, or scorer=a function that "
            "rates it",
            got=", ".join(shown(given[name]) for name in named),
            do="Pass one function",
        )  # fmt: skip
    _require_samples(effective)
    if not named:
        return BestOf(int(count), returns)
    by = "majority" if named == ["majority"] else "score"
    return BestOf(int(count), returns, by, Judge(given[named[0]], tokenizer))  # type: ignore[arg-type]


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


def read_n_best(given: Mapping[str, Any], effective: Effective) -> int | None:
    """How many of the hypotheses of a search are kept and returned; None: as the configuration
    says."""
    count = given.get("n_best")
    if count is None:
        return None
    if not is_integer(count) or count < 1:
        raise RequestError("n_best is impossible", wanted="a number above 0", got=shown(count))
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
