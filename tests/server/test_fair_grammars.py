"""Grammars that take long to compile hold up those of their own key, and no other's for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

from everystep.drivers.engine_thread import FairReaders
from everystep.processors.grammars import trials as module
from everystep.processors.grammars.trials import GrammarTrials, TrialBounds
from everystep.server.access import Keys, digest_of
from everystep.server.application import FrontSettings
from everystep.server.asking import Caller
from everystep.server.host import HostedModel
from everystep.server.link import ThreadMooring
from tests.processors.test_grammar_trials import ENDLESS, OWN
from tests.server.serving import LIMITS, TOKENIZER, Served, served, tiny
from tests.server.test_fair_lanes import RUNS, bearer

PATIENCE = 60


class Work:
    """Things that are read until they are let go, and in which order they were begun."""

    def __init__(self, readers: FairReaders) -> None:
        self._readers = readers
        self.begun: list[str] = []
        self._goes: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def bring(self, owner: str | None, name: str) -> Future[str]:
        self._goes[name] = threading.Event()
        return self._readers.submit(owner, self._read, name)

    def _read(self, name: str) -> str:
        with self._changed:
            self.begun.append(name)
            self._changed.notify_all()
        assert self._goes[name].wait(PATIENCE)
        return name

    def end(self, *names: str) -> None:
        for name in names:
            self._goes[name].set()

    def await_begun(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, PATIENCE)
        return self.begun


@pytest.fixture
def work() -> Iterator[Work]:
    readers = FairReaders(4, "test")
    yield Work(readers)
    readers.shutdown(cancel=True)


def test_an_owner_has_half_of_the_threads(work: Work) -> None:
    own = [work.bring("a", f"a{number}") for number in range(9)]
    assert work.await_begun(2) == ["a0", "a1"]
    other = work.bring("b", "b0")
    assert work.await_begun(3) == ["a0", "a1", "b0"], "though nine of another's came first"
    work.end("b0")
    assert other.result(PATIENCE) == "b0" and work.begun == ["a0", "a1", "b0"]
    work.end(*(f"a{number}" for number in range(9)))
    assert [one.result(PATIENCE) for one in own] == [f"a{number}" for number in range(9)]
    assert work.begun[3:5] == ["a2", "a3"]


def test_owners_take_turns_and_each_keeps_its_order(work: Work) -> None:
    names = [f"{owner}{number}" for owner in "abc" for number in range(4)]
    for name in names:
        work.bring(name[0], name)
    assert work.await_begun(4) == ["a0", "a1", "b0", "b1"]
    work.end("a0")
    assert work.await_begun(5)[4:] == ["c0"], "who has no thread"
    work.end("b0")
    assert work.await_begun(6)[5:] == ["a2"], "and then who has waited longest for one"
    work.end("a1")
    assert work.await_begun(7)[6:] == ["b2"]
    work.end(*names)
    assert sorted(work.await_begun(12)) == names
    assert [one for one in work.begun if one[0] == "c"] == ["c0", "c1", "c2", "c3"]


def test_without_owners_all_threads_are_used(work: Work) -> None:
    found = [work.bring(None, str(number)) for number in range(5)]
    assert work.await_begun(4) == ["0", "1", "2", "3"]
    work.end(*map(str, range(5)))
    assert [one.result(PATIENCE) for one in found] == [*map(str, range(5))]


def test_errors_are_handed_on_and_the_end_leaves_nobody_waiting() -> None:
    readers = FairReaders(2, "test")

    def failing() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        readers.submit("a", failing).result(PATIENCE)
    for cancel in (True, False):
        readers, goes = FairReaders(2, "test"), threading.Event()
        begun, waiting = (readers.submit("a", goes.wait, PATIENCE) for _ in range(2))
        readers.shutdown(cancel=cancel)
        goes.set()
        assert begun.result(PATIENCE)
        if cancel:
            with pytest.raises(CancelledError):
                waiting.result(PATIENCE)
        else:
            assert waiting.result(PATIENCE)


def test_what_was_left_does_not_pile_up(work: Work) -> None:
    """A client that asks and goes away, again and again, while its first two are read."""
    readers = work._readers
    for number in range(2):
        work.bring("a", f"a{number}")
    work.await_begun(2)
    gone: list[int] = []
    for number in range(50):
        readers.submit("a", gone.append, number, left=lambda: True)
        readers.submit("a", gone.append, number).cancel()
    assert readers.waiting <= 1
    last = readers.submit("a", gone.append, 50)
    work.end("a0", "a1")
    assert last.result(PATIENCE) is None and gone == [50] and readers.waiting == 0


def test_who_came_first_has_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before a thread that comes back with its next grammar at once."""
    goes, asked = threading.Semaphore(0), list[str]()

    class Held:
        def __init__(self, vocabulary: Any, _: Any) -> None:
            self.vocabulary = vocabulary

        def ask(self, question: Any, _: float) -> Any:
            asked.append(question[1])
            assert goes.acquire(timeout=PATIENCE)
            return {"text": question[1]}

        def is_ours(self) -> bool:
            return True

        def end(self) -> int:
            return 0

    monkeypatch.setattr(module, "_TrialProcess", Held)
    trials = GrammarTrials(TrialBounds(processes=1))

    def read(*names: str) -> None:
        for name in names:
            trials.read("regex", name, OWN)

    def waiting(count: int) -> None:
        late = time.monotonic() + PATIENCE
        while len(trials._line) + len(asked) < count:
            assert time.monotonic() < late
            time.sleep(0.001)

    with ThreadPoolExecutor(3) as pool:
        whole = [pool.submit(read, "a0", "a1", "a2")]
        waiting(1)
        whole.append(pool.submit(read, "b0"))
        waiting(2)
        whole.append(pool.submit(read, "c0"))
        waiting(3)
        for _ in range(5):
            goes.release()
        for one in whole:
            one.result(PATIENCE)
    assert asked == ["a0", "b0", "c0", "a1", "a2"]


def test_a_flow_is_of_a_key_and_tells_nothing_of_it() -> None:
    keys = (Caller("a"), Caller("b"), Caller("a", background=True))
    assert len({one.flow for one in keys}) == 3 and Caller().flow is None
    assert Caller("a").flow == Caller("a").flow
    assert Caller("a").flow != "a"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    trials = GrammarTrials(TrialBounds(seconds=0.2))
    settings = FrontSettings(keys=Keys([digest_of("a"), digest_of("b")]))
    mooring = ThreadMooring(
        lambda: {"tiny": HostedModel(tiny(), TOKENIZER, LIMITS, trials=trials)}, LIMITS
    )
    with served(mooring, settings) as one:
        yield one
    trials.close()


@pytest.mark.parametrize("path", ["/v1/completions", RUNS])
def test_a_key_with_many_slow_grammars_keeps_no_other_waiting(server: Served, path: str) -> None:
    """At most those that are tried when it comes are over before another key's grammar is."""
    over: list[str] = []

    def ask(key: str, grammar: str) -> int:
        body = {"prompt": "hello", "max_tokens": 3, "grammar": grammar}
        answer = server.client.post(path, json=body, headers=bearer(key))
        over.append(key)
        return answer.status_code

    assert ask("b", 'start: "a" | "b"') == 200, "the processes are there"
    with ThreadPoolExecutor(12) as pool:
        slow = [pool.submit(ask, "a", f"{ENDLESS}\n// {path} {number}") for number in range(8)]
        late = time.monotonic() + PATIENCE
        while server.front.link.running + server.front.link.waiting < 8:
            assert time.monotonic() < late
            time.sleep(0.001)
        so_far = len(over)
        assert ask("b", 'start: "b" | "c"' + f"\n// {path}") == 200
        since = over.index("b", 1) - so_far
        assert [one.result(PATIENCE) for one in slow] == [400] * 8
    assert since <= 3, over
    assert over.count("a") == 8
