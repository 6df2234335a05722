"""Strategies by name: what each name says of the configuration, one entry per strategy.

`strategy="beam"` in a call and `--strategy beam` on the command line stand for these fields. A
further strategy of the library is a further entry; those of other packages are found by the
registry of `strategies/base.py`, and need none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from everystep.config.fields import FIELDS
from everystep.errors import RequestError, UnknownArgumentError, nearest

SEARCHES = {
    "num_beams": 1,
    "num_beam_groups": None,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "dola_layers": None,
}
"""The fields that make a choice another one than greedy decoding or sampling, without effect."""


@dataclass(frozen=True)
class NamedStrategy:
    """`usual`: values of keywords that a call may set otherwise, fields most of them. `sets`: those
    that make it this strategy, beside whatever would make it another one and is not in `usual`.
    `needs`: at least one of these must be said with the name; an error names the first."""

    usual: Mapping[str, Any] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def fixed(self) -> dict[str, Any]:
        """Every keyword that a call cannot set otherwise."""
        plain = {name: value for name, value in SEARCHES.items() if name not in self.usual}
        return {**plain, **self.sets}


NAMED: Mapping[str, NamedStrategy] = {
    "greedy": NamedStrategy(sets={"do_sample": False}),
    "sample": NamedStrategy(sets={"do_sample": True, "best_of": None}),
    "best_of": NamedStrategy({"best_of": 4}, {"do_sample": True}),
    "beam": NamedStrategy({"num_beams": 4}, {"do_sample": False}),
    "beam_sample": NamedStrategy({"num_beams": 4}, {"do_sample": True}),
    "diverse_beam": NamedStrategy(
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, {"do_sample": False}
    ),
    "constrained_beam": NamedStrategy(
        {"num_beams": 4, "constraints": None, "force_words_ids": None},
        {"do_sample": False},
        needs=("force_words_ids", "constraints"),
    ),
    "dola": NamedStrategy({"dola_layers": "low"}),
    "contrastive": NamedStrategy({"penalty_alpha": 0.6, "top_k": 4}, {"do_sample": False}),
    # These go beside greedy decoding and sampling alike.
    "guided": NamedStrategy({"guidance_scale": 1.5, "num_beams": 1}),
    "lookup": NamedStrategy({"prompt_lookup_num_tokens": 10}),
    "assisted": NamedStrategy({"assistant_model": None}, needs=("assistant_model",)),
    # A quarter of the 32 layers of the models that were trained to be left early (LayerSkip).
    "early_exit": NamedStrategy({"assistant_early_exit": 8}),
}


def is_named(name: str) -> bool:
    """Return whether the table has the name, spelled with hyphens or underscores."""
    return _spelled(name) in NAMED


def with_named(name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with `said` that names this strategy.

    Raise RequestError where one of them makes the strategy another one, or where one is missing.
    """
    named = NAMED[_spelled(name)]
    fixed = named.fixed
    for wrong in (n for n, value in fixed.items() if _differs(n, said.get(n), value)):
        raise RequestError(
            f"{wrong} contradicts the strategy {name!r}",
            wanted=f"no {wrong}" if fixed[wrong] is None else f"{wrong}={fixed[wrong]!r} with it",
            got=f"{wrong}={said[wrong]!r}",
            do="Leave one of the two out",
        )
    if named.needs and all(said.get(one) is None for one in named.needs):
        raise RequestError(
            f"the strategy {name!r} needs more than its name",
            wanted=f"{named.needs[0]} with it",
            do="Say it too, or choose another strategy",
        )
    decided = {*fixed, *named.usual}
    own = {n: value for n, value in said.items() if value is not None or n not in decided}
    return {**fixed, **named.usual, **own}


def unknown_strategy(name: str, known: Collection[str]) -> UnknownArgumentError:
    """Return the error about a name that neither the table nor the registry (`known`) has."""
    every = sorted({*NAMED, *known})
    near = nearest(_spelled(name), every)
    return UnknownArgumentError(
        f"no strategy is called {name!r}",
        wanted=", ".join(every),
        do=f"Perhaps you meant {near}" if near else "Install the package that has it",
    )


def _differs(name: str, said: Any, fixed: Any) -> bool:
    """Return whether a call asks for another value than the strategy has; None is without effect,
    and so are the default and 0 beside it."""
    if said is None or said == fixed:
        return False
    default = FIELDS[name].default if name in FIELDS else None
    return fixed is not None or (bool(said) and said != default)


def _spelled(name: str) -> str:
    return name.replace("-", "_")
