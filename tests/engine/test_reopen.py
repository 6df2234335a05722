"""Groups that are forked, and groups whose ids are changed: equal to who fed everything anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from everystep.draws import SeededDraws
from everystep.engine import Beginning, Continuous, Engine, Turns, audit
from everystep.stops.ends import MaxLength
from everystep.strategies import Contrastive
from everystep.testing.hash_model import HashExecutor
from everystep.types import Group, Prompt, Request
from tests.judges.drive import hash_executor, result
from tests.judges.mixes import Mix, random_mix

SEEDS = range(40)


def engine_of(mix: Mix) -> Engine:
    return Engine(hash_executor(mix), Continuous(token_budget=64, max_rows=64))


def finished(engine: Engine, group: Group) -> object:
    while group in engine.scheduler.groups and not group.finished:
        engine.step()
        audit(engine)
    return result(group)


def single(request: Request) -> bool:
    return request.strategy.streams and request.strategy.returns == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fork_ends_like_the_one_it_was_made_from(seed: int) -> None:
    mix = random_mix(seed)
    for request in mix.requests[:2]:
        engine = engine_of(mix)
        expected = finished(engine, engine.submit(request))
        for steps in (0, 1, 3, 6):
            engine = engine_of(mix)
            group = engine.submit(request)
            for _ in range(steps):
                engine.step()
            if not group.live:
                break
            twin = engine.fork(group, replace(request, request_id="twin"))
            audit(engine)
            assert finished(engine, twin) == expected
            assert finished(engine, group) == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kept", [0, 1, 4])
def test_what_is_replaced_equals_what_is_fed_anew(seed: int, kept: int) -> None:
    """Some of the ids stay, others follow, and nothing is known of how they came to stand there;
    there is room for more of them, which hooks see."""
    mix = random_mix(seed)
    request = next((one for one in mix.requests if single(one)), None)
    if request is None:
        return
    request = replace(request, max_length=request.max_length + 20, linger=True, keeps=True)
    engine = engine_of(mix)
    group = engine.submit(request)
    while len(_generated(engine, group)) < 5 and not group.finished:
        engine.step()
    if not group.live:
        return
    own = _generated(engine, group)[:kept]
    tokens = np.concatenate([own, np.arange(3) % mix.vocab_size])
    anew = engine_of(mix)
    request = replace(request, max_length=request.max_length + 7)
    other = anew.submit(replace(request, request_id="other"))
    anew.replace(other, other.request, Beginning(tokens))
    fed = engine.counts.fed
    engine.replace(group, request, Beginning(tokens))
    audit(engine)
    assert finished(engine, group) == finished(anew, other)
    assert engine.counts.fed - fed <= anew.counts.fed
    engine.cancel(group)
    audit(engine)
    assert engine.executor.audit() == {}


def _generated(engine: Engine, group: Group) -> np.ndarray:
    if not group.live or group.live[0].line < 0:
        return np.empty(0, np.int64)
    one = group.live[0]
    settled = slice(one.request.prompt_visible, one.visible - one.provisional)
    return engine.table.data[one.line, settled].copy()


def test_only_what_follows_is_fed_again() -> None:
    mix = next(m for m in map(random_mix, SEEDS) if any(_plain(r) for r in m.requests))
    request = next(one for one in mix.requests if _plain(one))
    engine = engine_of(mix)
    group = engine.submit(replace(request, keeps=True, linger=True))
    while not group.finished:
        engine.step()
    own = _generated(engine, group)
    fed = engine.counts.fed
    engine.replace(group, group.request, Beginning(np.append(own, [1, 2, 3])))
    engine.step()
    assert engine.counts.fed - fed == 4  # the last token of its own had not been fed either


@pytest.mark.parametrize("pad", [0, 3])
def test_what_was_known_of_hidden_states_is_kept_too(pad: int) -> None:
    """Visible ids and positions are counted apart where a prompt has pads."""
    prompt = Prompt(ids=np.arange(9) % 5 + 1)
    request = Request(
        "r", prompt, Contrastive(3, 0.6), SeededDraws(1), stops=(MaxLength(9 + pad + 12),),
        pad_prefix=pad, max_length=9 + pad + 12, linger=True, keeps=True,
    )  # fmt: skip
    engine, anew = (Engine(HashExecutor(23), Continuous(64, max_rows=64)) for _ in range(2))
    group = engine.submit(request)
    while len(_generated(engine, group)) < 9:
        engine.step()
    own = _generated(engine, group)
    tokens = np.append(own[:6], [1, 2])
    other = anew.submit(replace(request, request_id="other"))
    anew.replace(other, other.request, Beginning(tokens))
    fed = engine.counts.fed
    engine.replace(group, request, Beginning(tokens))
    engine.step()
    assert engine.counts.fed - fed <= len(tokens) - 6 + 1
    assert finished(engine, group) == finished(anew, other)


def _plain(request: Request) -> bool:
    return (
        single(request)
        and request.strategy.width == 1
        and not (request.companions or request.drafter)
    )


def test_only_the_group_whose_turn_it_is_goes_on() -> None:
    mix = random_mix(1)
    engine = Engine(hash_executor(mix), Turns())
    groups = [engine.submit(one) for one in mix.requests[:2]]
    engine.step()
    assert engine.counts.fed == 0
    turns = engine.scheduler
    assert isinstance(turns, Turns)
    turns.turn = groups[1]
    while groups[1].live:
        engine.step()
    assert groups[0].live and not groups[0].opened
    audit(engine)
