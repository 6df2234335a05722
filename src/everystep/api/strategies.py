"""How a call chooses tokens: what `strategy` asks for (a name, which stands for fields or for a
class, or a value), and the strategy that all of its options come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from everystep.api.searches import beams_of, require_groups
from everystep.config import FIELDS, Effective
from everystep.config.kinds import FLAG, SIZE, require
from everystep.config.named import is_named, unknown_strategy, with_named
from everystep.errors import RequestError, shown
from everystep.strategies import Contrastive, Greedy, Sample, strategy_named, strategy_names
from everystep.types.protocols import Reads, Strategy

if TYPE_CHECKING:
    from everystep.api.options import Options

_MEMBERS = ("width", "returns", "streams", "reads", "rounds", "pick", "select", "finish")
_OF_OURS = (
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "penalty_alpha"),
    *("num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "dola_layers"),
)


def read_strategy(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Strategy | None]:
    """The keywords of a call with those that its `strategy` stands for, and the strategy where it
    is none of the library's own.

    It is a name or a value; `strategy_options`: what a class of that name is made with.
    RequestError where the strategy contradicts a keyword, or is none; UnknownArgumentError for an
    unknown name.
    """
    strategy, options = given.get("strategy"), given.get("strategy_options")
    if options is not None and not _takes_options(strategy):
        raise RequestError(
            "strategy_options are for a strategy of another package, given by its name",
            got=f"strategy={shown(strategy)}",
            do="Pass what the library's own strategies read as arguments of the call",
        )
    if strategy is None:
        return given, None
    if not isinstance(strategy, str):
        return given, _required(strategy)
    if is_named(strategy):
        return with_named(strategy, given), None
    return given, _made(strategy, {} if options is None else options)


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


def strategy_of(options: Options, most: int) -> Strategy:
    """What the call brings, or the configuration names: the one place that makes strategies of the
    library.

    `most`: the most new tokens that a row can get. RequestError where no strategy does what the
    options ask for.
    """
    e = options.effective
    require_groups(options)
    if options.strategy is not None:  # what the model's configuration says is not about it
        return options.strategy
    width, returns = int(e.num_beams or 1), int(e.num_return_sequences or 1)
    if width > 1:
        return beams_of(options, width, returns, most)
    if options.best_of is not None:
        return options.best_of
    if not e.do_sample and (e.penalty_alpha or 0) > 0 and (e.top_k or 0) > 1:
        return Contrastive(int(e.top_k), float(e.penalty_alpha))
    return Sample(returns) if e.do_sample else Greedy()


def require_known(name: str) -> None:
    """UnknownArgumentError, which lists every name, if no strategy has this one."""
    known = strategy_names()
    if not is_named(name) and name not in known:
        raise unknown_strategy(name, known)


def _takes_options(strategy: Any) -> bool:
    return isinstance(strategy, str) and not is_named(strategy)


def _made(name: str, options: Any) -> Strategy:
    """The strategy of this name with these options."""
    require_known(name)
    if not isinstance(options, Mapping):
        wanted, got = "a mapping of names to values", shown(options)
        raise RequestError("strategy_options is of another kind", wanted=wanted, got=got)
    kind = strategy_named(name)
    try:
        made = kind(**options)
    except TypeError as error:
        raise RequestError(
            f"the strategy {name!r} cannot be made with these options",
            wanted="the fields of its class",
            got=error,
            do="Pass others as strategy_options",
        ) from error
    return _required(made)


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
