"""Further hypotheses of a beam search that is over: it goes on where it stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from everystep.api.hands import Rules, over
from everystep.config.kinds import is_integer
from everystep.engine import Known
from everystep.engine.decided import results_of
from everystep.errors import RequestError, shown
from everystep.nn.modes import inference_mode
from everystep.strategies import Beam
from everystep.types import Finished, Group, values_of

if TYPE_CHECKING:
    from everystep.api.run import Run
    from everystep.api.session import Generated


def complete(group: Group) -> list[Finished]:
    """Every hypothesis of a search that has ended by itself, best first."""
    _require_search(group)
    found = [one for one in group.done if one.serial >= 0]
    return sorted(found, key=lambda one: -one.score)


def more_of(run: Run, n: int) -> list[Generated]:
    """What `Run.more` says."""
    if not is_integer(n) or n < 1:
        raise RequestError("so many cannot be given", wanted="a number above 0", got=shown(n))
    _require_search(run._group)
    for _ in run:
        pass
    with run._hands.lock:
        group = run._group
        if not group.live:
            raise RequestError("the run was cancelled", do="Open it again")
        if not run._shown:
            run._shown = _serials(group)
        _widen(run, len(run._shown) + n)
        group = run._group
        fresh = [one for one in _ranked(group) if one.serial not in run._shown][:n]
        run._shown |= {one.serial for one in fresh}
        return run._session.generated_from(group, fresh)


def _widen(run: Run, keeps: int) -> None:
    """The run is that of a search that keeps so many hypotheses, and is over."""
    old, hands = run._group, run._hands
    asked = run._rules[-1][1].asked.changed({"n_best": keeps, "num_return_sequences": 1})
    call = asked.session(run.model, run.tokenizer).prepared(run._passed, 0)
    rules = Rules.of(asked, call, run._rules[0][1].first)
    request = rules.request(run.model, 0, hands.name())
    bank = cast(Beam, request.strategy).widened(old)
    with inference_mode():
        twin = hands.engine.fork(old, request, Known(bank, not bool(bank.open.any())))
    try:
        while not over(twin):
            hands.step(twin)
            if twin.error is not None:
                raise twin.error
    except BaseException:
        hands.drop(twin)
        raise
    with inference_mode():
        hands.engine.cancel(old)
    hands.mail.pop(request.request_id, None)
    run._group, run._rules = twin, [(0, rules)]
    run._reword()


def _require_search(group: Group) -> None:
    strategy = group.request.strategy
    if not isinstance(strategy, Beam):
        raise RequestError(
            "only a beam search has further hypotheses",
            wanted="a run with num_beams above 1, in one group",
            got=type(strategy).__name__,
            do="Open it with num_beams=4, say",
        )


def _ranked(group: Group) -> list[Finished]:
    found = results_of(group)
    return [one for one in found if one.serial >= 0]


def _serials(group: Group) -> frozenset[int]:
    return frozenset(one.serial for one in _ranked(group))


def first_of(group: Group) -> Any:
    """The one sequence of a group, live or done; None before it has any."""
    return next(iter([*group.live, *group.done]), None)


def known_of(group: Group) -> dict[str, Any]:
    """What that sequence remembers that ids cannot tell."""
    return values_of(getattr(first_of(group), "memo", {}))
