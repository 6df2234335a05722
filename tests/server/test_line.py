"""Who is next, who is refused, and how much each key has had: by counts, on a clock of its own."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from everystep.errors import CapacityError, OversizeError, RequestError
from everystep.server.access import Keys, digest_of, read_keys
from everystep.server.application import FrontSettings
from everystep.server.line import LinePlace, WaitingLine
from everystep.server.link import EngineLink, QueueLimits
from everystep.server.messages import Ask
from everystep.server.quotas import Quota, QuotaBook, QuotaError, read_key_quotas
from everystep.server.settings import ServeSettings
from tests.server.serving import Served, in_thread, served
from tests.server.test_strangers import HELLO, LONG, idle


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lined(book: QuotaBook | None = None) -> tuple[WaitingLine, Clock]:
    clock = Clock()
    return WaitingLine(book, clock), clock


def order(line: WaitingLine, rows: int = 1, made: int = 0) -> list[int]:
    """Everybody who waits, in the order in which they begin, each over before the next."""
    found: list[int] = []
    while begun := line.begin(rows):
        for number in begun:
            found.append(number)
            line.leave(number, made)
    return found


# --- the line -------------------------------------------------------------------------------------


def test_of_one_key_a_lower_number_comes_first_and_age_counts() -> None:
    line, clock = lined()
    for number, priority in enumerate((0, 5, -3, 0)):
        line.enter(number, LinePlace(priority=priority))
        clock.now += 1
    clock.now += 40
    line.enter(4, LinePlace(priority=-3))
    assert order(line) == [2, 0, 3, 1, 4], "what came 40 s later does not go before old ones"


def test_nothing_waits_for_ever_behind_a_stream_of_lower_numbers() -> None:
    line, clock = lined()
    line.enter(0, LinePlace(priority=100))
    for number in range(1, 2000):
        line.enter(number, LinePlace(priority=-100))
        begun = line.begin(1)
        for one in begun:
            line.leave(one)
        if 0 in begun:
            break
        clock.now += 1
    assert number <= 1010, "200 steps of priority are worth 1000 seconds"


def test_keys_have_shares_of_tokens_and_not_of_requests() -> None:
    line, _ = lined(QuotaBook(own={"c": Quota(weight=2)}))
    sizes = {"a": 100, "b": 10, "c": 50}
    for number in range(3000):
        owner = "abc"[number % 3]
        line.enter(number, LinePlace(owner, positions=sizes[owner] // 2, tokens=sizes[owner] // 2))
    had: Counter[str] = Counter()
    for _ in range(300):
        (number, *others) = line.begin(1)
        owner = "abc"[number % 3]
        had[owner] += sizes[owner]
        for one in (number, *others):
            if one != number:
                had["abc"[one % 3]] += sizes["abc"[one % 3]]
            line.leave(one, sizes["abc"[one % 3]] // 2)
    assert abs(had["a"] - had["b"]) <= 200 and abs(had["c"] - 2 * had["a"]) <= 400, had


def test_a_key_that_sends_a_thousand_does_not_keep_one_waiting() -> None:
    line, _ = lined()
    for number in range(1000):
        line.enter(number, LinePlace("a", positions=10, tokens=10))
    first = line.begin(4)
    line.enter(1000, LinePlace("b", positions=10, tokens=10))
    for number in first:
        line.leave(number, 10)
    assert 1000 in line.begin(4)[:2]


def test_whoever_was_away_has_saved_nothing_up() -> None:
    line, _ = lined()
    for number in range(100):
        line.enter(number, LinePlace("a", positions=10))
    assert len(order(line)) == 100
    for number in range(100, 200):
        line.enter(number, LinePlace("b" if number % 2 else "a", positions=10))
    begun = order(line)
    in_ten = Counter("b" if number % 2 else "a" for number in begun[:10])
    assert in_ten == {"a": 5, "b": 5}


def test_what_was_not_made_is_given_back() -> None:
    line, _ = lined()
    for number in range(400):
        owner = "ab"[number % 2]
        line.enter(number, LinePlace(owner, tokens=1000 if owner == "a" else 10))
    begun = order(line, made=10)  # those of `a` asked for much, and got as little
    halves = Counter(number % 2 for number in begun[:200])
    assert abs(halves[0] - halves[1]) <= 4, halves


def test_what_nobody_waits_for_comes_last_and_leaves_rows_free() -> None:
    line, clock = lined()
    for number in range(20):
        line.enter(number, LinePlace("a", background=True))
    assert len(line.begin(8)) == 6, "a quarter of the rows is left"
    line.enter(20, LinePlace("a"))
    line.enter(21, LinePlace("b"))
    assert line.begin(8) == [20, 21]
    for number in (0, 20, 21):
        line.leave(number)
    for number in range(22, 26):
        line.enter(number, LinePlace("b"))
    assert set(line.begin(8)) == {22, 23, 24, 25, 6}, "people first, then one of the others"
    clock.now += 100
    line.enter(40, LinePlace("a"))
    line.leave(1)
    line.leave(22)
    assert 7 in line.begin(8), "what has waited long is like everything else"


def test_rows_of_a_key_and_of_the_engine_are_not_exceeded() -> None:
    rng = random.Random(3)
    book = QuotaBook(own={"a": Quota(rows=3)})
    line, _ = lined(book)
    places = {
        number: LinePlace("ab"[number % 2], rows=rng.randint(1, 3), positions=rng.randint(1, 50))
        for number in range(300)
    }
    for number, place in places.items():
        line.enter(number, place)
    running: set[int] = set()
    done: list[int] = []
    while len(done) < len(places):
        running |= {*line.begin(8)}
        assert sum(places[n].rows for n in running if places[n].owner == "a") <= 3
        assert sum(places[n].rows for n in running) < 8 + 2 + 3
        assert len(running) > 0
        one = rng.choice(sorted(running))
        running.remove(one)
        done.append(one)
        line.leave(one)
    assert sorted(done) == sorted(places) and line.rows == 0 and len(line) == 0


# --- quotas ---------------------------------------------------------------------------------------


def test_tokens_of_a_minute() -> None:
    clock = Clock()
    book = QuotaBook(Quota(tokens_per_minute=600), clock=clock)
    book.require_tokens("a", 600)
    book.use_tokens("a", 600)
    with pytest.raises(QuotaError) as raised:
        book.require_tokens("a", 100)
    assert raised.value.seconds == 10
    book.require_tokens("b", 600)
    clock.now += 10
    book.require_tokens("a", 100)
    book.use_tokens("a", 700)  # what was made goes below nothing, and is missing later
    clock.now += 60
    with pytest.raises(QuotaError):
        book.require_tokens("a", 1)
    clock.now += 60
    book.require_tokens("a", 600)
    with pytest.raises(OversizeError, match="in a minute"):
        book.require_tokens("a", 601)


def test_requests_at_once_and_rows() -> None:
    book = QuotaBook(own={"a": Quota(requests=2, rows=4)})
    with book.request("a"), book.request("a"):
        with pytest.raises(QuotaError), book.request("a"):
            pass
        with book.request("b"), book.request("b"), book.request("b"):
            pass
    with book.request("a"):
        pass
    book.require_rows("a", 4)
    with pytest.raises(OversizeError):
        book.require_rows("a", 5)


def test_quotas_stand_in_files_of_keys_and_in_settings(tmp_path: Path) -> None:
    one, two = digest_of("one"), digest_of("two")
    file = tmp_path / "keys"
    file.write_text(
        f"{one}  name=alice requests=4 weight=0.5 # hers\n# none\n{two.upper()}  name=bob\n"
    )
    assert read_keys(file) == [one, two]
    assert read_key_quotas(file)[one] == ("alice", Quota(requests=4, weight=0.5))
    settings = ServeSettings(
        key_files=[str(file)],
        api_keys=["three"],
        quota=Quota(rows=7),
        quotas={"bob": Quota(rows=2), digest_of("three"): Quota(requests=1)},
    )
    book = settings.book()
    assert book.of(one) == Quota(requests=4, weight=0.5) and book.of(two) == Quota(rows=2)
    assert book.of(digest_of("three")) == Quota(requests=1) and book.of("x") == Quota(rows=7)
    with pytest.raises(RequestError, match="a key that there is not"):
        ServeSettings(quotas={"carol": Quota()}).book()
    for words in ("request=4", "requests=four", "weight"):
        file.write_text(f"{one} {words}\n")
        with pytest.raises(RequestError, match="line 1"):
            read_key_quotas(file)


# --- on a server ----------------------------------------------------------------------------------


def statuses(server: Served, count: int, key: str, **body: Any) -> Counter[int]:
    """How often so many requests at once were answered how."""
    found: list[int] = []

    def ask() -> None:
        headers = {"Authorization": f"Bearer {key}"}
        answer = server.client.post("/v1/completions", json=body, headers=headers)
        found.append(answer.status_code)
        assert answer.status_code == 200 or int(answer.headers["retry-after"]) >= 1

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return Counter(found)


def test_quotas_over_http() -> None:
    settings = FrontSettings(keys=Keys([digest_of(key) for key in "abc"]))
    book = QuotaBook(
        own={
            digest_of("a"): Quota(requests=3, rows=2),
            digest_of("b"): Quota(tokens_per_minute=200),
        }
    )
    with served(settings=settings, book=book) as server:
        found = statuses(server, 12, "a", **{**LONG, "max_tokens": 200})
        assert found[200] >= 3 and found[429] >= 1 and found.total() == 12
        assert statuses(server, 12, "c", **HELLO) == {200: 12}
        wide = {"json": {**HELLO, "n": 3}, "headers": {"Authorization": "Bearer a"}}
        answer = server.client.post("/v1/completions", **wide)
        assert answer.status_code == 400 and "than this key may use" in answer.text
        assert statuses(server, 1, "b", **{**LONG, "max_tokens": 300}) == {200: 1}
        assert statuses(server, 3, "b", **HELLO) == {429: 3}, "its minute is used up"
        long = {"json": {**HELLO, "prompt": [7] * 300}, "headers": {"Authorization": "Bearer b"}}
        assert server.client.post("/v1/completions", **long).status_code == 400
        assert idle(server)


def test_what_can_never_fit_is_refused_at_once(server: Served) -> None:
    for body in ({"n": 17}, {"num_beams": 40}, {"best_of": 17, "do_sample": True}):
        answer = server.post("/v1/completions", **HELLO, **body)
        assert answer.status_code == 400 and "more rows than the engine has" in answer.text, body
    answer = server.post("/v1/completions", **HELLO, priority=101)
    assert answer.status_code == 400 and "priority is impossible" in answer.text


def test_the_line_is_bounded_by_ids_of_prompts_too() -> None:
    async def refusals() -> list[str]:
        link = EngineLink(in_thread(), QueueLimits(requests=5, positions=100))
        await link.start()
        said: list[str] = []

        async def follow(number: int, size: int) -> None:
            ask = Ask(number, "tiny", [7] * size, {"max_new_tokens": 400, "eos_token_id": None})
            async for _ in link.follow(ask, LinePlace(positions=size, tokens=400, rows=16)):
                pass

        tasks = []
        for number, size in enumerate((10, 10, 10, 60)):
            tasks.append(asyncio.create_task(follow(number, size)))
            await asyncio.sleep(0)
        # Two have begun, for one has all rows and the next may be read; 70 ids wait.
        for size, more in ((31, 1), (20, 1), (1, 5)):
            try:
                link.require_room(size, more)
                said.append("")
            except CapacityError as error:
                said.append(str(error).partition(";")[0])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert link.waiting == link.running == 0
        await link.close()
        return said

    found = asyncio.run(refusals())
    assert found[0] == "too many prompts wait" and found[2] == "too many requests wait"
    assert found[1] == ""


def test_an_engine_that_is_full_of_one_key_takes_another_next() -> None:
    """On a real engine: who has begun when, by the order in which requests are over."""
    settings = FrontSettings(keys=Keys([digest_of(key) for key in "ab"]))
    with served(settings=settings) as server:
        over: list[str] = []

        def ask(key: str) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            body = {**LONG, "max_tokens": 40}
            answer = server.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            over.append(key)

        many = [threading.Thread(target=ask, args="a") for _ in range(80)]
        for one in many:
            one.start()
        link = server.front.link
        while link.waiting < 20 and len(over) < 40:
            pass
        few = [threading.Thread(target=ask, args="b") for _ in range(4)]
        for one in few:
            one.start()
        for one in (*many, *few):
            one.join()
        assert over.count("b") == 4
        assert over[-10:].count("b") == 0, "the few do not come after the many"
        assert idle(server)
