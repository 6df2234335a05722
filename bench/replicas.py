"""What do 100 and 10,000 replicas need, and where would they break? What does Ray cost?

    scripts/bench replicas [--replicas 100,10000] [--hours 1] [--out NAME]
                           [--costs] [--requests 200] [--streams 8] [--tokens 256] [--votes 2000]

First the costs of the parts are measured here: the ring that says which replica a session goes to,
the fan's work for a part of a stream, the front's for a request and for an event, and what the
controller tells each front. Then an hour of a fleet is simulated on a clock of its own: replicas
die and come back after a cold start, and sessions ask again and again. No Ray and no model is
needed. Last, the two are put together.

With --costs it starts a Ray cluster on this machine, and measures a request and an event on each of
five ways: an application that computes nothing on uvicorn and behind Ray's proxy, and a tiny model
by `everystep serve`, by `everystep serve --replicas 1`, and by the same application behind Ray's
proxy. Then two processes vote as synced forwards do. `--replicas ""` leaves the fleets out.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import itertools
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from parts import replica_ways as ways
from parts.load import OverHttp, load
from parts.report import options, write
from parts.votes import vote_costs

from everystep.server.answering import Head, StreamedAnswer
from everystep.server.asking import Addressee, Caller, FrontModel, read_completion
from everystep.server.exchange import OPENAI_FORM
from everystep.server.link import Asking
from everystep.server.messages import Ask, Begun, ModelFacts, RowNews, Tokens, frame
from everystep.server.ray.fan import session_of
from everystep.server.ray.parts import packed_part, read_part
from everystep.server.routes import COMPLETIONS
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

VNODES = 100
"""Places that a replica has on the ring, as Ray's router has them."""


class LivingRing:
    """The places of replicas on a ring; a session goes to the next one."""

    def __init__(self, replicas: Iterable[int]) -> None:
        self._places = sorted(pair for one in replicas for pair in self._of(one))

    @staticmethod
    def _of(replica: int) -> list[tuple[int, int]]:
        return [(place(f"{replica}:{number}"), replica) for number in range(VNODES)]

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self._places) // VNODES

    @property
    def size(self) -> int:
        """The bytes of its list, and of the pairs and numbers in it."""
        each = sys.getsizeof(self._places[0]) + sys.getsizeof(self._places[0][0])
        return sys.getsizeof(self._places) + each * len(self._places)

    def of(self, session: str) -> int:
        """Return the replica of a session."""
        return self.at(place(session))

    def at(self, where: int) -> int:
        """Return the replica after this place."""
        return self._places[bisect.bisect(self._places, (where, -1)) % len(self._places)][1]

    def add(self, replica: int) -> None:
        """Have a further replica."""
        for pair in self._of(replica):
            bisect.insort(self._places, pair)

    def remove(self, replica: int) -> None:
        """Have this replica no longer."""
        for pair in self._of(replica):
            del self._places[bisect.bisect_left(self._places, pair)]


def place(name: str) -> int:
    """Return where a name is on the ring."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class PartCosts:
    """Seconds of a core for each thing that the parts do, and bytes."""

    ring_seconds: float
    ring_bytes: int
    lookup_seconds: float
    request_seconds: float
    event_seconds: float
    part_seconds: float
    known_bytes: int


def seconds_of(call: Callable[[], object], times: int) -> float:
    """Return the median time of a call."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def measured(replicas: int) -> PartCosts:
    """Return what the parts cost here, with so many replicas."""
    names = list(range(replicas))
    ring = LivingRing(names)
    ask = Ask(1, "m", list(range(512)), {"seed": 1, "max_new_tokens": 256}, streams=True)
    # 25 ms of a stream at 200 tokens a second.
    part = packed_part([RowNews(1, 0, number, -1.0) for number in range(5)])

    def hand_on() -> None:
        asking = Asking(ask)
        for message in read_part(part):
            if isinstance(message, Tokens):
                rows = [msgspec.structs.replace(one, id=1) for one in message.rows]
                frame(Tokens([one for one in rows if asking.is_new(one)]))

    status = [
        {"id": f"EngineReplica#{one:08x}", "node": f"{one:040x}", "rows": 36} for one in names
    ]
    return PartCosts(
        ring_seconds=seconds_of(lambda: LivingRing(names), 3),
        ring_bytes=ring.size,
        lookup_seconds=seconds_of(lambda: ring.of("session"), 200),
        request_seconds=seconds_of(lambda: request_of_front(ask), 200),
        event_seconds=event_seconds(),
        part_seconds=seconds_of(hand_on, 200),
        known_bytes=len(msgspec.msgpack.encode(status)),
    )


def addressed() -> Addressee:
    """Return the addressee of a request for a tiny model."""
    model = tiny_llama(vocab_size=320)
    facts = ModelFacts("m", [], [2], 1 << 20, 320, "torch")
    return Addressee("m", "m", None, facts, FrontModel(tiny_tokenizer(320), model.chat_defaults))


TO = addressed()
BODY = {"prompt": "hello the and of " * 100, "max_tokens": 64, "temperature": 1, "stream": True}
SENT = msgspec.json.encode(BODY)


def request_of_front(ask: Ask) -> None:
    """What the front and the fan do for a request: fields, ids, keywords, session and message."""
    read = COMPLETIONS.read(msgspec.json.decode(SENT))
    read_completion(read, TO, Caller())
    session_of(ask, 32)
    msgspec.msgpack.encode(ask)


def event_seconds() -> float:
    """Return what the front does for a token of a stream: its text, the event, and a write."""
    wanted = read_completion(COMPLETIONS.read(msgspec.json.decode(SENT)), TO, Caller())
    answer = StreamedAnswer(wanted, Head("cmpl-1", "m"))
    answer.begin(0, Begun(1, []))
    ours, theirs = socket.socketpair()
    tokens = iter(range(10**9))

    def event() -> None:
        for chunk in answer.row(0, RowNews(1, 0, 100 + next(tokens) % 200)):
            ours.send(OPENAI_FORM.event(chunk))
            theirs.recv(1 << 16)

    with ours, theirs:
        return seconds_of(event, 2000)


@dataclass(frozen=True)
class FleetPlan:
    """A fleet: replicas, the rows and speed of each, how long they live and start, and its load.

    `life_hours`: the mean between two deaths of a replica. `cold_seconds`: until another one takes
    asks. `rate`: requests that a replica gets in a second; `answer_seconds`: that one takes.
    `turns_seconds`: between two turns of a session.
    """

    replicas: int
    life_hours: float = 24.0 * 7
    cold_seconds: float = 60.0
    rate: float = 1.5
    answer_seconds: float = 8.0
    turn_seconds: float = 40.0
    sessions: int = 20_000
    hours: float = 1.0

    @property
    def at_work(self) -> float:
        """Requests under way in a replica, by Little's law."""
        return self.rate * self.answer_seconds


@dataclass
class FleetFigures:
    """What happened to a fleet.

    `begun`: requests; `repeated`: of these asked again; `given_up`: those that two replicas died
    with. `turns`, `moved`: turns of the sessions that are followed, and those that met another
    replica than the turn before. `least`: replicas at once.
    """

    begun: int = 0
    repeated: int = 0
    given_up: int = 0
    repeated_seconds: float = 0.0
    deaths: int = 0
    turns: int = 0
    moved: int = 0
    least: int = 0


def simulate(plan: FleetPlan, seed: int = 0) -> FleetFigures:
    """Return what happens to a fleet, event by event, on a clock of its own.

    Sessions are a sample; what is asked again is counted at each death, for all requests that the
    replica has then.
    """
    chance = random.Random(seed)
    end = plan.hours * 3600
    ring = LivingRing(range(plan.replicas))
    found = FleetFigures(least=plan.replicas)
    events: list[tuple[float, int, str, int]] = []
    names, numbers = itertools.count(plan.replicas), itertools.count()

    def at(moment: float, kind: str, who: int) -> None:
        heapq.heappush(events, (moment, next(numbers), kind, who))

    def life() -> float:
        return chance.expovariate(1 / (plan.life_hours * 3600))

    for one in range(plan.replicas):
        at(life(), "death", one)
    for one in range(plan.sessions):
        at(chance.random() * plan.turn_seconds, "turn", one)
    last: dict[int, int] = {}
    sessions = [place(f"session {one}") for one in range(plan.sessions)]
    while events and events[0][0] < end:
        now, _, kind, who = heapq.heappop(events)
        if kind == "death":
            ring.remove(who)
            found.deaths += 1
            found.least = min(found.least, ring.replicas)
            _lose(plan, found, chance)
            at(now + plan.cold_seconds, "birth", next(names))  # another name, so other places
        elif kind == "birth":
            ring.add(who)
            at(now + life(), "death", who)
        else:
            replica = ring.at(sessions[who])
            found.turns += 1
            found.moved += last.get(who, replica) != replica
            last[who] = replica
            at(now + plan.turn_seconds * (0.5 + chance.random()), "turn", who)
    found.begun = round(plan.replicas * plan.rate * end)
    return found


def _lose(plan: FleetPlan, found: FleetFigures, chance: random.Random) -> None:
    """Ask again what the replica had: each request is somewhere in its answer. It is given up where
    its second replica dies too, before the answer is whole."""
    count = int(plan.at_work) + (chance.random() < plan.at_work % 1)
    second = plan.answer_seconds / (plan.life_hours * 3600)
    for _ in range(count):
        found.repeated += 1
        found.repeated_seconds += chance.random() * plan.answer_seconds
        found.given_up += chance.random() < second


def fronts_of(plan: FleetPlan, costs: PartCosts, tokens_per_second: float, merged: float) -> float:
    """Return how many cores of fronts, and of their fans, the fleet needs: each request is read,
    and each part handed on and written."""
    requests = plan.replicas * plan.rate
    parts = plan.replicas * plan.at_work * min(tokens_per_second, 1 / merged)
    tokens = plan.replicas * plan.at_work * tokens_per_second
    events = tokens * costs.event_seconds + parts * costs.part_seconds
    return requests * (costs.request_seconds + costs.lookup_seconds) + events


def figures_of(count: int, hours: float) -> dict[str, float]:
    """Return what a fleet of so many replicas needs, and what happens to it, by name."""
    costs, plan = measured(count), FleetPlan(count, hours=hours)
    found = simulate(plan)
    cores = fronts_of(plan, costs, 25.0, 0.025)
    return {
        "prompts at work": plan.replicas * plan.at_work,
        "front: us for a request": costs.request_seconds * 1e6,
        "front: us for an event": costs.event_seconds * 1e6,
        "fan: us for a part": costs.part_seconds * 1e6,
        "cores of fronts and fans": cores,
        "ring: ms to build": costs.ring_seconds * 1e3,
        "ring: MiB": costs.ring_bytes / 2**20,
        "ring: us to ask": costs.lookup_seconds * 1e6,
        "controller: KiB told to a front at a change": costs.known_bytes / 1024,
        "deaths": found.deaths,
        "replicas at once, at least": found.least,
        "rings: s of a core, of all fronts": found.deaths * 2 * costs.ring_seconds * max(1, cores),
        "requests": found.begun,
        "asked again": found.repeated,
        "given up": found.given_up,
        "computed again: s of rows": found.repeated_seconds,
        "turns that met another replica": found.moved / max(1, found.turns),
    }


# --- what Ray costs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class WayCosts:
    """Costs of a way to a replica: milliseconds from a request to the event of its only token, one
    after another on a connection, the median and the least; microseconds of an event while all
    streams are told, and milliseconds between two events of a stream, the median and the 99th of
    100."""

    request_ms: float
    least_request_ms: float
    event_us: float
    gap_ms: float
    gap_p99_ms: float


def way_costs(target: OverHttp, requests: int, streams: int, tokens: int) -> WayCosts:
    """Return what a way costs that is open."""
    load(target, [["hello"]] * streams, tokens)  # who is asked first imports and compiles
    single = [one.first for one in load(target, [["hello"] * requests], 1).answers]
    found = load(target, [["hello"]] * streams, tokens)
    gaps = sorted(gap for one in found.answers for gap in one.gaps)
    return WayCosts(
        statistics.median(single) * 1e3,
        min(single) * 1e3,
        found.seconds / (streams * tokens) * 1e6,
        statistics.median(gaps) * 1e3,
        gaps[int(len(gaps) * 0.99)] * 1e3,
    )


def opened_ways(folder: Path) -> Iterator[tuple[str, AbstractContextManager[OverHttp]]]:
    """Yield each way by its name; Ray runs until the last one is over."""
    yield "nothing, on uvicorn", ways.on_uvicorn()
    yield "everystep serve", ways.on_serve(folder)
    with ways.ray_with_proxy(folder) as (address, port):
        yield "nothing, behind Ray's proxy", ways.behind_proxy(ways.bare_application, port)
        more = ("--replicas", "1", "--ray-address", address)
        yield "everystep serve --replicas 1", ways.on_serve(folder, *more)
        yield "everystep behind Ray's proxy", ways.behind_proxy(ways.own_application, port)


def costs_of_ray(requests: int, streams: int, tokens: int) -> dict[str, dict[str, float]]:
    """Return the costs of every way, and print them."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as made:
        for name, way in opened_ways(ways.model_folder(Path(made))):
            with way as target:
                found[name] = asdict(way_costs(target, requests, streams, tokens))
            line = "".join(f"  {key} {value:.3g}" for key, value in found[name].items())
            print(f"{name:30}{line}", flush=True)
    return found


def main() -> None:
    """A line for each figure, and a dated file."""
    parser = options(__doc__ or "", threads=1)
    parser.add_argument("--replicas", default="100,10000")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--costs", action="store_true", help="measure Ray and votes too")
    for name, count in {"requests": 200, "streams": 8, "tokens": 256, "votes": 2000}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    args = parser.parse_args()
    sizes = [int(one) for one in args.replicas.split(",") if one]
    fleets = {f"{count} replicas": figures_of(count, args.hours) for count in sizes}
    for name in next(iter(fleets.values()), ()):
        print(f"{name:44}" + "".join(f"{fleet[name]:16,.4g}" for fleet in fleets.values()))
    if not args.costs:
        write("replicas", args, {"fleets": fleets})
        return
    costs = costs_of_ray(args.requests, args.streams, args.tokens)
    votes = {name: seconds * 1e6 for name, seconds in asdict(vote_costs(args.votes)).items()}
    print("us of a vote of two processes: " + ", ".join(f"{n} {v:.0f}" for n, v in votes.items()))
    content = {"fleets": fleets, "costs": costs, "votes_us": votes}
    write("replicas-costs", args, content, ("ray",))


if __name__ == "__main__":
    main()
