"""Requests by the thousand in virtual time: none lost, wrong, doubled or left behind."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from random import Random
from typing import Any

import msgspec
import pytest

from everystep.drivers.driver import Driver
from everystep.drivers.engine_thread import Submission
from everystep.server.application import Front
from everystep.server.exchange import Exchange, WireForm
from everystep.server.host import EngineHost
from everystep.server.hosted_runs import HostedRuns
from everystep.server.line import WaitingLine
from everystep.server.link import Asking, EngineLink
from everystep.server.messages import Ask, Leave, RowNews
from everystep.server.quotas import QuotaBook
from tests.server import simulation
from tests.server.simulation import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RUNS,
    SCORE,
    Client,
    World,
    Wrong,
)

REQUESTS = 500
"""Requests of a world."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Engines die by the thousand here, and each death is a line of the log."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def lived(seeds: range) -> Counter[str]:
    """How requests of these worlds were answered, all of them rightly."""
    fates: Counter[str] = Counter()
    for seed in seeds:
        fates += World(seed, REQUESTS).run()
    return fates


def test_ten_thousand_requests() -> None:
    fates = lived(range(20))
    assert sum(fates[one] for one in fates if not one.startswith("/")) == 10_000
    assert fates["answered"] + fates["streamed"] > 5_000, fates
    for path in (COMPLETIONS, CHAT, SCORE, EMBEDDINGS, RUNS):
        assert fates[path] > 50, fates
    rare = ("left", "slow reader", "refused 429", "refused 408", "refused 500", "refused 503")
    assert all(fates[one] for one in (*rare, "error in a stream")), fates


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100))
def test_a_million_requests(part: int) -> None:
    first = 1000 + 20 * part
    fates = lived(range(first, first + 20))
    assert sum(fates[one] for one in fates if not one.startswith("/")) == 10_000


@pytest.mark.parametrize("seed", [1014, 1033, 1105, 1590, 2138])
def test_worlds_in_which_something_was_wrong_once(seed: int) -> None:
    """Told of an end by a fault and asked again after a death; asked just before a death was
    noticed; left before what it asked of a run had begun."""
    World(seed, REQUESTS).run()


def test_a_fork_that_nobody_waits_for_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, left = simulation.ask, []

    async def hasty(
        world: World, client: Client, path: str | None = None, method: str = "POST"
    ) -> None:
        if path is not None and path.endswith("/fork"):
            client.leaves_after = world.chance.random() * 0.02
        await ask(world, client, path, method)
        left.append(client.left and path is not None and path.endswith("/fork"))

    def opened(chance: Random, shelf: int, number: int, keys: list[str]) -> Client:
        runs = [one for one in simulation.questions(shelf) if one.path == RUNS]
        one = chance.choice(runs)
        key = chance.choice(keys) if keys else None
        return Client(number, one, {**one.body}, key, None, None, 0.0, 0.0, 1)

    monkeypatch.setattr(simulation, "ask", hasty)
    monkeypatch.setattr(simulation, "drawn", opened)
    for seed in (7, 8):
        World(seed, 100).run()
    assert sum(left) > 20


def test_a_world_is_replayed_from_its_seed() -> None:
    worlds = [World(seed, 150) for seed in (5, 5, 6)]
    for one in worlds:
        one.run()
    once, again, other = (one.transcript.hexdigest() for one in worlds)
    assert once == again != other


# --- mistakes that it has to notice ---------------------------------------------------------------


def _tell_twice(patch: pytest.MonkeyPatch) -> None:
    tell = Asking.tell

    def twice(self: Asking, message: Any) -> None:
        tell(self, message)
        if isinstance(message, RowNews) and message.index == 0 and message.kind is None:
            tell(self, message)

    patch.setattr(Asking, "tell", twice)


def _tell_again_after_a_death(patch: pytest.MonkeyPatch) -> None:
    def all_of_it(self: Asking, message: Any) -> None:
        self.news.put_nowait(message)

    patch.setattr(Asking, "tell", all_of_it)


def _lose_a_message(patch: pytest.MonkeyPatch) -> None:
    tell, count = Asking.tell, iter(range(10**9))

    def most(self: Asking, message: Any) -> None:
        if next(count) % 400 != 399:
            tell(self, message)

    patch.setattr(Asking, "tell", most)


def _never_say_who_left(patch: pytest.MonkeyPatch) -> None:
    send = EngineLink._send

    def silent(self: EngineLink, message: Any) -> None:
        if not isinstance(message, Leave):
            send(self, message)

    patch.setattr(EngineLink, "_send", silent)


def _free_no_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Submission, "leave", lambda self: None)


def _end_in_silence(patch: pytest.MonkeyPatch) -> None:
    def silent(self: EngineLink, text: str, *, always: bool) -> None:
        for id, one in list(self._asking.items()):
            if always or one.is_lost():
                del self._asking[id]
                self._leave_line(one, one.made)

    patch.setattr(EngineLink, "_fail_all", silent)


def _mix_answers_up(patch: pytest.MonkeyPatch) -> None:
    follow = EngineLink.follow

    async def other(self: EngineLink, ask: Any, place: Any = None) -> AsyncGenerator[Any, None]:
        if isinstance(ask, Ask):
            count = getattr(self, "asked", 0) + 1
            last, self.asked, self.last = getattr(self, "last", ask), count, ask  # type: ignore[attr-defined]
            ask = msgspec.structs.replace(ask, prompt=last.prompt) if count % 50 == 0 else ask
        async for message in follow(self, ask, place):
            yield message

    patch.setattr(EngineLink, "follow", other)


def _keep_places_in_line(patch: pytest.MonkeyPatch) -> None:
    leave, count = WaitingLine.leave, iter(range(10**9))

    def most(self: WaitingLine, number: int, made: int = 0) -> None:
        if next(count) % 100 != 99:
            leave(self, number, made)

    patch.setattr(WaitingLine, "leave", most)


def _keep_rows_of_keys(patch: pytest.MonkeyPatch) -> None:
    use = QuotaBook.use_rows
    patch.setattr(QuotaBook, "use_rows", lambda self, owner, rows: use(self, owner, max(rows, 0)))


def _call_half_an_answer_whole(patch: pytest.MonkeyPatch) -> None:
    event = WireForm.event

    def done(self: WireForm, value: Any) -> bytes:
        return event(self, value) + (self.end if "error" in value else b"")

    patch.setattr(WireForm, "event", done)


def _forget_an_exchange(patch: pytest.MonkeyPatch) -> None:
    monkey, count = Exchange.stop_listening, iter(range(10**9))

    def most(self: Exchange) -> None:
        if next(count) % 100 != 99:
            monkey(self)

    patch.setattr(Exchange, "stop_listening", most)


def _drop_events(patch: pytest.MonkeyPatch) -> None:
    deliver, count = Driver._deliver, iter(range(10**9))

    def most(self: Driver) -> None:
        if len(self._reported) > 1 and next(count) % 20 == 19:
            self._reported = self._reported[1:]
        deliver(self)

    patch.setattr(Driver, "_deliver", most)


def _refuse_at_random(patch: pytest.MonkeyPatch) -> None:
    room, count = Front.require_room, iter(range(10**9))

    def moody(self: Front, positions: int, asks: int) -> None:
        if next(count) % 100 == 99:
            raise ZeroDivisionError
        room(self, positions, asks)

    patch.setattr(Front, "require_room", moody)


def _never_make_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineLink, "_take_note", lambda self, one: None)


def _keep_scores(patch: pytest.MonkeyPatch) -> None:
    told, count = EngineHost._told, iter(range(10**9))

    def most(self: EngineHost, id: int, message: Any) -> None:
        if next(count) % 3 != 2:
            told(self, id, message)

    patch.setattr(EngineHost, "_told", most)


def _mix_runs_up(patch: pytest.MonkeyPatch) -> None:
    of = HostedRuns._of

    def other(self: HostedRuns, ask: Any) -> Any:
        return next(iter(self._runs.values())) if ask.verb == "result" else of(self, ask)

    patch.setattr(HostedRuns, "_of", other)


def _always(mistake: Callable[[pytest.MonkeyPatch], None], said: str) -> Any:
    return pytest.param(mistake, said, id=mistake.__name__.strip("_"))


def _with_all(mistake: Callable[[pytest.MonkeyPatch], None], said: str) -> Any:
    return pytest.param(mistake, said, id=mistake.__name__.strip("_"), marks=pytest.mark.slow)


OTHER_ANSWER = r"in place of|is not of"
NO_ANSWER = r"was never answered"


# What a world that fails leaves is found when its loop has ended. A mistake counts as noticed by
# what it does alone: one that breaks something else would show nothing about it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        _always(_tell_again_after_a_death, OTHER_ANSWER),
        _always(_free_no_rows, r"left behind: .*'rows of engine 0'"),
        _always(_end_in_silence, NO_ANSWER),
        _with_all(_tell_twice, OTHER_ANSWER),
        _with_all(_lose_a_message, OTHER_ANSWER),
        _with_all(_never_say_who_left, r"left behind: .*'asks of the engine'"),
        _with_all(_mix_answers_up, OTHER_ANSWER),
        _with_all(_keep_places_in_line, r"left behind: .*'begun'"),
        _with_all(_keep_rows_of_keys, NO_ANSWER),
        _with_all(_call_half_an_answer_whole, r"something follows an error"),
        _with_all(_forget_an_exchange, r"left behind: .*Exchange\._listen"),
        _with_all(_drop_events, OTHER_ANSWER),
        _with_all(_refuse_at_random, r"an error without a cause: 500"),
        _with_all(_never_make_room, NO_ANSWER),
        _with_all(_keep_scores, NO_ANSWER),
        _always(_mix_runs_up, OTHER_ANSWER),
    ],
)
def test_a_mistake_is_noticed(
    mistake: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(Wrong, match=rf"replay with World\(\d+, 200\)\.run\(\).*({said})"):
        for seed in range(12):
            World(seed, 200).run()
