"""A front over replicas that die wherever they can; no Ray is needed, and no chance."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everystep.cli.serve import require_replicas
from everystep.errors import RequestError
from everystep.server.batch_lines import BatchLine
from everystep.server.batch_run import rows_of_lines
from everystep.server.engine_process import EngineOrders
from everystep.server.inside import InnerReply
from everystep.server.link import EngineGone, Mooring
from everystep.server.messages import (
    OF_ENGINE,
    WINDOW,
    Ask,
    Begun,
    Failed,
    HearAsk,
    Over,
    Quit,
    Ready,
    ReplicaState,
    RowNews,
    ScoreAsk,
    Taken,
    Tokens,
    frame,
    read_frame,
)
from everystep.server.ray.board import ReplicaBoard
from everystep.server.ray.fan import ReplicaFan, ReplicaGone, Replicas, session_of
from everystep.server.ray.orders import replica_orders, sharing
from everystep.server.ray.parts import gathered, packed_part, read_part
from everystep.server.ray.replica import EngineReplica
from everystep.server.settings import ServeSettings
from tests.server.serving import Served, chunks_of, joined, served

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 12, "ignore_eos": True}


async def started(folder: str, merge_seconds: float) -> EngineReplica:
    """A replica of this process, as Ray Serve would start it."""
    one = EngineReplica.__new__(EngineReplica)
    orders = EngineOrders({"tiny": folder}, threads=1, max_rows=16)
    await one.__init__(orders, merge_seconds, 0.0)  # type: ignore[misc,func-returns-value]
    return one


class MortalReplicas(Replicas):
    """One replica, of which it can be said when it dies.

    `lives`: after how many parts each further answer is cut, as long as there are numbers.
    `silent`: its death is the end of the iterator and no error.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.lives: list[int] = []
        self.silent = False
        self.asked = self.left = 0
        self.replicas = 2
        self.sessions: list[str | None] = []

    async def start(self) -> None:
        self._one = await started(self._folder, 0.0)

    async def facts(self) -> Ready:
        return msgspec.msgpack.decode(await self._one.facts(), type=Ready)

    async def follow(self, asked: bytes, session: str | None) -> AsyncGenerator[bytes, None]:
        self.asked += 1
        self.sessions.append(session)
        most = self.lives.pop(0) if self.lives else 1 << 30
        parts = self._one.follow(asked)
        try:
            if most == 0:
                raise ReplicaGone("dead")
            number = 0
            async for part in parts:
                for single in read_part(part):
                    rows = single.rows if hasattr(single, "rows") else None
                    for news in rows if isinstance(rows, list) else [single]:
                        yield packed_part([news])
                        number += 1
                        if number == most and not self.silent:
                            raise ReplicaGone("dead")
                        if number == most:
                            return
        finally:
            self.left += 1
            await parts.aclose()

    async def count(self) -> int:
        return self.replicas

    async def state(self, session: str) -> ReplicaState:
        """As many seem to be there as are said to be: a session's last figure says which."""
        own = msgspec.msgpack.decode(await self._one.state(), type=ReplicaState)
        return msgspec.structs.replace(own, process=int(session[-1]) % self.replicas)

    async def close(self) -> None:
        await self._one._link.close()


class FanMooring(Mooring):
    """A fan in a thread."""

    def __init__(self, replicas: MortalReplicas) -> None:
        self._replicas = replicas

    def start(self) -> socket.socket:
        ours, theirs = socket.socketpair()

        async def work() -> None:
            await self._replicas.start()
            try:
                fan = ReplicaFan(self._replicas, 4, beat=0.01, pause=0.001, look=0.02)
                await fan.serve(theirs)
            finally:
                await self._replicas.close()

        self._thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
        self._thread.start()
        return ours

    def end(self) -> None:
        self._thread.join()

    def kill(self) -> None:
        raise AssertionError("a fan does not hang")


@pytest.fixture(scope="module")
def replicas(folder: Path) -> MortalReplicas:
    return MortalReplicas(str(folder))


@pytest.fixture(scope="module")
def front(replicas: MortalReplicas) -> Iterator[Served]:
    with served(FanMooring(replicas)) as one:
        yield one


def streamed(front: Served, **body: Any) -> str:
    answer = front.post("/v1/completions", stream=True, **body)
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("more", [{}, {"temperature": 1, "seed": 3, "n": 2}, {"num_beams": 3}])
def test_a_stream_is_whole_wherever_its_replica_dies(
    front: Served, replicas: MortalReplicas, more: dict[str, Any], silent: bool
) -> None:
    replicas.silent = silent
    wanted = [c["text"] for c in front.completion(**LONG, **more)["choices"]]
    for at in range(28 if more.get("n") else 15):
        replicas.lives = [at]
        chunks = chunks_of(streamed(front, **LONG, **more))
        assert [joined(chunks, index) for index in range(len(wanted))] == wanted, at
    replicas.lives = []
    replicas.silent = False


def test_an_ask_that_replicas_die_with_is_given_up(front: Served, replicas: MortalReplicas) -> None:
    replicas.lives = [5, 5, 5]
    text = streamed(front, **LONG)
    assert "the replica died while it worked on this" in text and "[DONE]" not in text
    assert replicas.lives == [5], "a third one is not risked"
    replicas.lives = []


def test_what_a_clock_ends_fails_and_says_so(front: Served, replicas: MortalReplicas) -> None:
    replicas.lives = [5]
    text = streamed(front, **LONG, timeout=600)
    assert '"error"' in text and "[DONE]" not in text
    assert replicas.lives == []


def test_replicas_that_die_before_they_begin_are_no_fault_of_an_ask(
    front: Served, replicas: MortalReplicas
) -> None:
    replicas.lives = [0, 0, 0]
    assert front.completion(**LONG, timeout=600)["choices"]
    replicas.lives = [0] * 20
    answer = front.post("/v1/completions", **LONG)
    assert answer.status_code == 503 and len(replicas.lives) == 12, "nor is that without end"
    replicas.lives = []


def test_scores_are_asked_again(front: Served, replicas: MortalReplicas) -> None:
    wanted = front.post("/v1/everystep/score", texts=["hello the"]).json()
    replicas.lives = [0]
    assert front.post("/v1/everystep/score", texts=["hello the"]).json() == wanted


def test_whoever_leaves_ends_the_work(front: Served, replicas: MortalReplicas) -> None:
    began = replicas.left
    body = {**LONG, "max_tokens": 4000, "stream": True}
    with front.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
    deadline = time.monotonic() + 10
    while replicas.left == began and time.monotonic() < deadline:
        time.sleep(0.005)
    assert replicas.left == began + 1


def test_runs_in_hands_are_refused(front: Served) -> None:
    answer = front.post("/v1/everystep/runs", prompt="hello")
    assert answer.status_code == 400 and "has replicas" in answer.json()["error"]["message"]


def test_rows_are_those_of_all_replicas(front: Served, replicas: MortalReplicas) -> None:
    link = front.front.link
    for count, rows in ((5, 80), (0, 16), (2, 32)):
        replicas.replicas = count
        deadline = time.monotonic() + 10
        while link.replicas != count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert (link.replicas, link.rows) == (count, rows), "none is as one that is awaited"
    load = front.client.get("/v1/everystep/load").json()
    assert load["replicas"] == 2 and load["replica_deaths"] == link.replica_deaths > 0


def test_replicas_say_how_they_are(front: Served, replicas: MortalReplicas) -> None:
    replicas.replicas = 3
    shown = told(front, 3)
    for _ in range(2):
        front.completion(prompt="hello the " * 20, max_tokens=2, ignore_eos=True)
    after = told(front, 3)
    for before, now in zip(shown["data"], after["data"], strict=True):
        assert now["models"] == {"tiny": now["models"]["tiny"]} and now["rows"] == 16
        assert now["age_seconds"] > before["age_seconds"] >= 0 == now["engine_restarts"]
        assert now["generated_tokens"] == before["generated_tokens"] + 4
        read = now["prompt_tokens"] - before["prompt_tokens"]
        held = now["cached_tokens"] - before["cached_tokens"]
        assert read / 3 < held < read / 2, "all but the last id of the second prompt"
    assert [one["process"] for one in after["data"]] == [0, 1, 2] and after["has_replicas"]
    replicas.replicas = 2
    assert [one["process"] for one in told(front, 2)["data"]] == [0, 1]


def told(front: Served, count: int) -> Any:
    """What is said of so many replicas, after another look at them."""
    moment = time.monotonic()
    while time.monotonic() < moment + 10:
        found = front.client.get("/v1/everystep/replicas").json()
        if len(found["data"]) == found["replicas"] == count and time.monotonic() > moment + 0.3:
            return found
        time.sleep(0.005)
    raise AssertionError(found)


def test_an_engine_alone_has_no_replicas_to_show(server: Served) -> None:
    found = server.client.get("/v1/everystep/replicas").json()
    assert found == {"has_replicas": False, "replicas": 1, "replica_deaths": 0, "data": []}


class Fleet:
    """Replicas that are asked how they are: a session is one's by its number, and `mute` ones say
    nothing."""

    def __init__(self, count: int) -> None:
        self.names = list(range(count))
        self.mute: set[int] = set()
        self.asked = self.now = 0
        self.board = ReplicaBoard(self.ask, 0.01, lambda: float(self.now))

    async def ask(self, session: str) -> ReplicaState:
        self.asked += 1
        name = self.names[int(session.split()[-1]) * 7 % len(self.names)]
        if name in self.mute:
            await asyncio.sleep(60)
        return ReplicaState("here", name, 0.0, {}, 0, 0, 4)

    def look(self) -> list[tuple[int, float]]:
        """The replicas that a look at all of them knows, with the seconds of their silence."""
        self.asked = 0
        asyncio.run(self.board.look(len(self.names)))
        return [(one.process, one.silent_seconds) for one in self.board.states]


def test_replicas_are_found_by_sessions_and_asked_again_by_them() -> None:
    fleet = Fleet(40)
    looks = 0
    while len(fleet.look()) < 40:
        looks += 1
        assert fleet.asked <= 40 + 32 and looks < 20, "a look has an end"
    assert [one for one, _ in fleet.look()] == fleet.names and fleet.asked == 40
    fleet.names[3] = 99  # one has died, and another one has its sessions
    assert [one for one, _ in fleet.look()] == sorted(fleet.names) and fleet.asked == 40
    del fleet.names[5:]
    assert len(fleet.look()) == 5


def test_a_replica_that_says_nothing_is_shown_for_a_while() -> None:
    fleet = Fleet(3)
    while len(fleet.look()) < 3:
        pass
    fleet.mute = {1}
    for seconds, shown in ((4, True), (14, True), (15, False)):
        fleet.now = seconds
        found = dict(fleet.look())
        assert found == {0: 0.0, 2: 0.0, **({1: float(seconds)} if shown else {})}
    fleet.mute = set()
    assert len(fleet.look()) == 3


def test_asks_that_can_share_rows_have_a_session_in_common(
    front: Served, replicas: MortalReplicas
) -> None:
    def session(prompt: list[int], first: int = 4, **keywords: Any) -> str | None:
        return session_of(Ask(1, "tiny", prompt, {"seed": len(prompt), **keywords}), first)

    own = session([1, 2, 3, 4, 5])
    assert own == session([1, 2, 3, 4, 9, 9]) != session([1, 2, 3, 5])
    others = [session([1, 2, 3, 4], cache_salt="x"), session([1, 2, 3, 4], adapter_names="a")]
    assert len({own, *others}) == 3
    assert session([1, 2, 3, 4], first=0) is None
    assert session_of(ScoreAsk(1, "tiny", [[1]], None, 0), 4) is None
    assert session_of(HearAsk(1, "tiny", b"", {}), 4) is None
    del replicas.sessions[:]
    for last in (7, 8):
        front.completion(prompt=[4, 4, 4, 4, last], max_tokens=1)
    assert len(replicas.sessions) == 2 and len({*replicas.sessions}) == 1


async def parts_of(news: Callable[[], AsyncGenerator[Any, None]], seconds: float) -> list[Any]:
    return [part async for part in gathered(news(), seconds)]


class Endless(Replicas):
    """One replica whose answers have no end."""

    def __init__(self) -> None:
        self.given = 0

    async def facts(self) -> Ready:
        return Ready([], 4, 1)

    async def follow(self, asked: bytes, session: str | None) -> AsyncGenerator[bytes, None]:
        while True:
            await asyncio.sleep(0)
            self.given += 1
            yield packed_part([RowNews(1, 0, self.given)])

    async def count(self) -> int:
        return 1

    async def state(self, session: str) -> ReplicaState:
        return ReplicaState("here", 1, 0.0, {}, 0, 0, 4)


def test_no_more_is_taken_from_a_replica_than_the_reader_has_room_for() -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair()
        replicas = Endless()
        serving = asyncio.create_task(ReplicaFan(replicas, 0).serve(theirs))
        reader, writer = await asyncio.open_connection(sock=ours)
        got = 0

        async def read() -> None:
            nonlocal got
            while (body := await read_frame(reader)) is not None:
                message = OF_ENGINE.decode(body)
                got += len(message.rows) if isinstance(message, Tokens) else 0

        reading = asyncio.create_task(read())
        writer.write(frame(Ask(1, "tiny", [5], {}, streams=True)))
        for more in (0, 100, 1):
            if more:
                writer.write(frame(Taken(1, more)))
            expected = got + (more or WINDOW)
            while got < expected:
                await asyncio.sleep(0)
            for _ in range(1000):  # nothing follows
                await asyncio.sleep(0)
            assert got == replicas.given == expected
        writer.write(frame(Quit()))
        await serving
        writer.close()
        await reading

    asyncio.run(work())


def test_tokens_are_gathered_and_the_end_is_not_kept_waiting() -> None:
    async def quick() -> AsyncGenerator[Any, None]:
        yield Begun(1, [])
        for number in range(50):
            yield RowNews(1, 0, number)
        yield Over(1, [])

    async def slow() -> AsyncGenerator[Any, None]:
        yield 0
        await asyncio.sleep(0.05)
        yield 1

    async def broken() -> AsyncGenerator[Any, None]:
        yield 0
        raise EngineGone("x")

    parts = asyncio.run(parts_of(quick, 3600.0))
    assert sum(map(len, parts)) == 52 and len(parts) <= 3
    assert asyncio.run(parts_of(slow, 0.001)) == [[0], [1]]
    with pytest.raises(EngineGone):
        asyncio.run(parts_of(broken, 3600.0))


def test_a_replica_gathers_for_as_long_as_it_is_told(folder: Path) -> None:
    """What comes first is a part, and the answer is over before the time for another one is."""

    async def work() -> tuple[list[Any], list[list[Any]]]:
        one = await started(str(folder), 3600.0)
        more = {"max_new_tokens": 40, "min_new_tokens": 40, "seed": 1}
        ask = Ask(1, "tiny", [5, 6, 7], more, streams=True)
        single = [news async for news in one._link.follow(ask)]
        parts = [read_part(part) async for part in one.follow(msgspec.msgpack.encode(ask))]
        await one._link.close()
        return single, parts

    single, parts = asyncio.run(work())
    messages = [message for part in parts for message in part]
    tokens = [m for message in messages if isinstance(message, Tokens) for m in message.rows]
    alike = [(one.index, one.token, one.kind) for one in single if isinstance(one, RowNews)]
    assert [(one.index, one.token, one.kind) for one in tokens] == alike and len(alike) == 40
    begun, over = messages[0], messages[-1]
    assert isinstance(begun, Begun) and isinstance(over, Over)
    assert [one.tokens for one in over.results] == [[token for _, token, _ in alike]]
    assert len(parts) <= 2 < len(single)
    assert sum(isinstance(message, Begun | Over) for message in messages) == 2


def test_a_part_has_its_tokens_in_one_message_before_the_end() -> None:
    rows = [RowNews(1, 0, 5), RowNews(1, 1, 6)]
    begun, tokens, over = read_part(packed_part([rows[0], Begun(1, []), Over(1, []), rows[1]]))
    assert isinstance(begun, Begun) and isinstance(over, Over)
    assert tokens.rows == rows  # type: ignore[union-attr]
    assert read_part(packed_part([Failed(1, 400, "no")])) == [Failed(1, 400, "no")]
    with pytest.raises(msgspec.DecodeError):
        read_part(b"\x91\xa3abc")


def test_replicas_of_one_machine_share_its_processors() -> None:
    settings = ServeSettings(model="m", replicas=1, max_replicas=10_000, deadline=90)
    orders = replica_orders(settings)
    assert (orders.replicas, orders.most, orders.engine.threads) == (1, 10_000, 1)
    assert orders.drain_seconds == 90, "a deadline that can be longer than a drain is waited for"
    assert orders.load == 16
    elsewhere = msgspec.structs.replace(settings, ray_address="auto", max_replicas=None)
    assert replica_orders(elsewhere).engine.threads == 1
    assert sharing(msgspec.structs.replace(settings, threads=7), 2).threads == 7


def test_options_of_replicas_need_replicas() -> None:
    for given in ((None, "auto", None), (None, None, 3)):
        with pytest.raises(RequestError, match="there are none"):
            require_replicas(*given)
    with pytest.raises(RequestError, match="at least 4"):
        require_replicas(4, None, 3)
    require_replicas(None, None)


def test_lines_that_nobody_judged_have_rows_and_nothing_is_raised() -> None:
    def line(**said: Any) -> bytes:
        known = {"custom_id": "a", "method": "POST", "url": "/tokenize", "body": {}}
        return msgspec.json.encode({**known, **said})

    async def ask(one: BatchLine) -> InnerReply:
        if one.custom_id == "raises":
            raise OSError("a path that nobody is to see")
        return InnerReply(200, "x", {"said": one.custom_id})

    lines = [line(), line().decode(), None, b"{", b"[" * 100_000, line(custom_id="raises")]
    lines += [line(method="GET"), line(url="/v1/batches"), line(body={"stream": True})]
    found = asyncio.run(rows_of_lines(lines, ("/tokenize",), ask, lambda: 2))
    rows = [msgspec.json.decode(row) for row in found]
    assert [row["response"]["status_code"] for row in rows if row["response"]] == [200, 200, 400]
    codes = [row["error"]["code"] for row in rows if row["error"]]
    assert codes == ["invalid_json_line"] * 3 + ["server_error"] + ["invalid_url"] * 2
    assert b"nobody is to see" not in b"".join(found)
    assert rows[2]["custom_id"] == "line-2" and rows[5]["custom_id"] == "raises"
