"""Likelihoods, vectors and runs wait in everybody's line: shares, quotas, bounds, deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from everystep.server import host
from everystep.server.access import Keys, digest_of
from everystep.server.application import FrontSettings
from everystep.server.hosted_runs import HostedRuns
from everystep.server.line import LinePlace, WaitingLine
from everystep.server.link import QueueLimits
from everystep.server.quotas import Quota, QuotaBook
from tests.server.serving import Served, served
from tests.server.test_line import lined
from tests.server.test_strangers import idle

SCORE, EMBED, RUNS = "/v1/everystep/score", "/v1/embeddings", "/v1/everystep/runs"
PATIENCE = 60


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


@contextmanager
def keyed(book: QuotaBook | None = None, queue: QueueLimits | None = None) -> Iterator[Served]:
    settings = FrontSettings(keys=Keys([digest_of("a"), digest_of("b")]))
    with served(settings=settings, book=book, queue=queue) as one:
        yield one


class Held:
    """Scoring that waits until it is let go, and who was scored in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes = threading.Event(), threading.Event()
        self.order: list[int] = []
        score = host.score_texts

        def held(model: Any, tokenizer: Any, rows: Any, **more: Any) -> Any:
            self.order += [row[0] for row in rows]
            self.begun.set()
            assert self.goes.wait(PATIENCE)
            return score(model, tokenizer, rows, **more)

        monkeypatch.setattr(host, "score_texts", held)


def until_waiting(server: Served, count: int) -> None:
    late = time.monotonic() + PATIENCE
    while server.front.link.waiting < count:
        assert time.monotonic() < late
        time.sleep(0.01)


# --- the line -------------------------------------------------------------------------------------


def test_a_lane_is_bounded_and_one_key_has_half_of_it() -> None:
    line, _ = lined()
    for number in range(20):
        line.enter(number, LinePlace("a", positions=5, rows=0, lane="run"))
    assert line.begin(4) == [0, 1, 2, 3]
    for number in range(20, 40):
        line.enter(number, LinePlace("bcd"[number % 3], positions=5, rows=0, lane="run"))
    begun = line.begin(4)
    assert len(begun) == 4 and all(number >= 20 for number in begun)
    line.leave(0)
    assert len(line.begin(4)) == 1


def test_lanes_take_no_rows_and_keep_no_prompt_waiting() -> None:
    line, _ = lined(QuotaBook(Quota(rows=1)))
    for number in range(9):
        line.enter(number, LinePlace("a", rows=0, lane="score"))
    assert line.begin(1) == [0] and line.rows == 0
    line.enter(9, LinePlace("a"))
    line.enter(10, LinePlace("a"))
    assert line.begin(1) == [9], "not behind those of its key that wait for the lane"
    line.leave(9)
    assert line.begin(1) == [10]


def test_what_is_scored_counts_in_the_shares_of_prompts() -> None:
    line, _ = lined()
    for number in range(400):
        lane = "score" if number % 2 else ""
        place = LinePlace("ab"[number % 2], positions=50, rows=0 if lane else 1, lane=lane)
        line.enter(number, place)
    had = {"a": 0, "b": 0}
    begun: list[int] = []
    while sum(had.values()) < 100:
        begun += line.begin(1)
        line.leave(number := begun.pop(0))
        had["ab"[number % 2]] += 1
    assert set(line._counters) == {(False, "a"), (False, "b")}
    owners = LinePlace("b", lane="score").flow, LinePlace("b").flow
    assert owners[0] == owners[1], "a key is charged once for all that it asks"


def test_tokens_of_a_lane_are_taken_from_the_quota() -> None:
    clock = [0.0]
    book = QuotaBook(Quota(tokens_per_minute=100), clock=lambda: clock[0])
    line = WaitingLine(book, lambda: clock[0])
    line.enter(0, LinePlace("a", positions=60, rows=0, lane="score"))
    line.begin(1)
    line.leave(0, 0)
    with pytest.raises(Exception, match="this key has used its tokens"):
        book.require_tokens("a", 60)


# --- scores ---------------------------------------------------------------------------------------


def test_scores_of_keys_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with keyed() as server, ThreadPoolExecutor(16) as pool:
        held = Held(monkeypatch)

        def ask(key: str, number: int) -> Future[Any]:
            body = {"texts": [[number, 7, 8, 9]]}
            return pool.submit(server.client.post, SCORE, json=body, headers=bearer(key))

        asked = [ask("a", 10)]
        assert held.begun.wait(PATIENCE)
        for number in range(11, 17):
            asked.append(ask("a", number))
            until_waiting(server, number - 10)
        asked.append(ask("b", 100))
        while server.front.link.running < 2:
            time.sleep(0.01)
        held.goes.set()
        assert [one.result().status_code for one in asked] == [200] * len(asked)
        assert held.order[:2] == [10, 100] and sorted(held.order) == [*range(10, 17), 100]
        assert idle(server)


def test_a_full_line_refuses_scores_vectors_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with keyed(queue=QueueLimits(requests=1)) as server, ThreadPoolExecutor(4) as pool:
        held = Held(monkeypatch)
        post, body = server.client.post, {"texts": [[5, 6, 7]]}
        first = pool.submit(post, SCORE, json=body, headers=bearer("a"))
        assert held.begun.wait(PATIENCE)
        second = pool.submit(post, SCORE, json=body, headers=bearer("a"))
        until_waiting(server, 1)
        asks: list[tuple[str, Any]] = [
            (SCORE, body),
            (EMBED, {"input": "hello"}),
            (RUNS, {"prompt": "hello"}),
        ]
        for path, asked in asks:
            answer = post(path, json=asked, headers=bearer("b"))
            assert answer.status_code == 429 and "retry-after" in answer.headers, path
        held.goes.set()
        assert first.result().status_code == second.result().status_code == 200
        assert post(RUNS, json={"prompt": "hello"}, headers=bearer("b")).status_code == 200
        assert post(EMBED, json={"input": "hello"}, headers=bearer("b")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (SCORE, {"texts": [[5] * 60]}),
        (EMBED, {"input": [[5] * 60]}),
        (RUNS, {"prompt": [5] * 60}),
    ],
)
def test_each_uses_the_tokens_of_its_key(path: str, body: Any) -> None:
    with keyed(QuotaBook(Quota(tokens_per_minute=100))) as server:
        post = server.client.post
        assert post(path, json=body, headers=bearer("a")).status_code == 200
        refused = post(path, json=body, headers=bearer("a"))
        assert refused.status_code == 429 and "used its tokens" in refused.text
        assert post(path, json=body, headers=bearer("b")).status_code == 200


def test_a_deadline_ends_a_score_and_an_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:
        held = Held(monkeypatch)
        answer = server.post(SCORE, texts=[[5, 6, 7]], timeout=0.1)
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline"
        held.goes.set()
        assert idle(server)
        answer = server.post(EMBED, input=[[5] * 3_000] * 8, timeout=0.001)
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline"
        assert idle(server)
        assert server.post(EMBED, input="hello", timeout=60, priority=-1).status_code == 200


def test_rows_are_scored_no_more_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:
        held = Held(monkeypatch)
        texts = [[5, 6, 7]] * (3 * host._SCORED_AT_ONCE)
        assert server.post(SCORE, texts=texts, timeout=0.2).status_code == 408
        held.goes.set()
        assert idle(server)
        server.post(SCORE, texts=[[9, 6]])
        assert len(held.order) == host._SCORED_AT_ONCE + 1


def test_rows_that_are_scored_in_parts_are_as_likely_as_alone() -> None:
    with served() as server:
        texts = [[5 + number % 9, 6, 7, 8 + number % 5] for number in range(70)]
        together = server.post(SCORE, texts=texts).json()["data"]
        for number in (0, 31, 32, 69):
            (alone,) = server.post(SCORE, texts=[texts[number]]).json()["data"]
            assert alone == together[number]


# --- runs -----------------------------------------------------------------------------------------


def test_runs_of_a_key_leave_a_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with keyed() as server, ThreadPoolExecutor(8) as pool:
        post = server.client.post

        def opened(key: str) -> str:
            body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
            return str(post(RUNS, json=body, headers=bearer(key)).json()["id"])

        own, other = [opened("a") for _ in range(6)], opened("b")
        goes, begun, following = threading.Event(), [], HostedRuns._next

        def held(self: HostedRuns, parts: Any) -> Any:
            begun.append(parts)
            assert goes.wait(PATIENCE)
            return following(self, parts)

        monkeypatch.setattr(HostedRuns, "_next", held)
        asked = [
            pool.submit(post, f"{RUNS}/{one}/result", json={}, headers=bearer("a")) for one in own
        ]
        until_waiting(server, 2)
        assert server.front.link.running == 4
        step = pool.submit(post, f"{RUNS}/{other}/step", json={}, headers=bearer("b"))
        while server.front.link.running < 5:
            time.sleep(0.01)
        goes.set()
        assert step.result().status_code == 200
        assert [one.result().status_code for one in asked] == [200] * 6
        assert idle(server)


def test_steps_of_runs_use_the_tokens_of_their_key() -> None:
    with keyed(QuotaBook(Quota(tokens_per_minute=60))) as server:
        post = server.client.post
        body = {"prompt": [5] * 5, "max_tokens": 200, "ignore_eos": True}
        one = post(RUNS, json=body, headers=bearer("a")).json()["id"]
        step = f"{RUNS}/{one}/step"
        assert post(step, json={"steps": 100}, headers=bearer("a")).status_code == 200
        refused = post(RUNS, json=body, headers=bearer("a"))
        assert refused.status_code == 429 and "used its tokens" in refused.text
