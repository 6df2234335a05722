"""What does HTTP cost beside the engine in process, and how fast are other servers?

    scripts/bench serve [--streams 1,8,32] [--tokens 64] [--requests 2] [--servers NAME,...]
                        [--heavy] [--hostile]

One generator of load asks everybody for the same prompts, greedily: the engine in a process of its
own through a socket for each stream, `everystep serve` over HTTP, and other servers, each in an
environment of its own and in the format that it runs best. Each stream asks again when it is
answered. All of them run, and take turns, so that a machine whose speed swings is as fast for each.
A row has tokens per second, seconds to the first token, seconds between tokens (the median and the
99th of 100), and which share of a core the generator and the server took. A server that cannot be
installed or started is listed with its error.

With --heavy, `everystep serve` is also asked for what is much to read, and what a neighbour's
stream waits meanwhile is told in its own steps. With --hostile, each server is asked for a few
tokens while 200 hostile connections are open, and while none is.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parts.crowd import beside_crowd
from parts.environments import Unavailable, default_folder
from parts.heavy import beside, heavy_asks
from parts.load import LoadFigures, OverHttp, OverSockets, Target, load
from parts.models import Models
from parts.report import options, write
from parts.servers import OURS, SERVERS, running, seconds_of

IN_PROCESS = "in process"
WORDS = ("sun", "sea", "wind", "rain", "moon", "snow", "sand", "tide", "fog", "ice", "hail", "dew")
WARM_UP = 4
QUESTION = "The capital of France is"


def prompts_of(streams: int, requests: int, round_number: int) -> list[list[str]]:
    """Texts of some 32 tokens, which no other round has."""
    drawn = random.Random(1000 * round_number + streams)
    return [[" ".join(drawn.choices(WORDS, k=30)) for _ in range(requests)] for _ in range(streams)]


@contextmanager
def in_process(
    models: Models, streams: int, args: argparse.Namespace
) -> Iterator[tuple[Target, int]]:
    """The engine without HTTP, and the number of its process."""
    pairs = [socket.socketpair() for _ in range(streams)]
    numbers = [theirs.fileno() for _, theirs in pairs]
    script = Path(__file__).parent / "engines" / "socket_engine.py"
    line = [sys.executable, str(script), str(models.gguf("Q4_1")), str(args.threads)]
    process = subprocess.Popen(
        [*line, *map(str, numbers)],
        pass_fds=numbers,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
    )
    for _, theirs in pairs:
        theirs.close()
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise Unavailable("the engine did not start")
        yield OverSockets([ours for ours, _ in pairs]), process.pid
    finally:
        process.kill()
        process.wait()
        for ours, _ in pairs:
            ours.close()


def row_of(name: str, streams: int, tokens: int, found: LoadFigures, used: float) -> dict[str, Any]:
    """The figures of a run; `used`: the server's processor seconds."""
    counted = len(found.answers) * tokens
    gaps = sorted(gap for one in found.answers for gap in one.gaps)
    row = {
        "server": name,
        "streams": streams,
        "tokens_per_s": counted / found.seconds,
        "first_s": statistics.median(one.first for one in found.answers),
        "between_s": statistics.median(gaps),
        "between_p99_s": gaps[int(len(gaps) * 0.99)],
        "events_per_token": sum(len(one.events) for one in found.answers) / counted,
        "load_cores": found.own_seconds / found.seconds,
        "server_cores": used / found.seconds,
    }
    print(
        f"{name:20} {streams:3} streams {row['tokens_per_s']:8.1f} tokens/s"
        f"   first {row['first_s'] * 1e3:7.1f} ms   between {row['between_s'] * 1e3:6.1f}"
        f" (p99 {row['between_p99_s'] * 1e3:6.1f}) ms   cores: load {row['load_cores']:4.2f},"
        f" server {row['server_cores']:4.2f}   events/token {row['events_per_token']:4.2f}",
        flush=True,
    )
    return row


@dataclass(frozen=True)
class Contender:
    """Somebody who answers: a name, how it is asked, the number of its process, and what it says
    to a question whose answer is known."""

    name: str
    target: Target
    pid: int
    says: str


def started(
    stack: ExitStack, args: argparse.Namespace, models: Models, most: int
) -> tuple[list[Contender], dict[str, str]]:
    """Everybody who can be measured, running until the stack is closed; and why others cannot."""
    wanted, found, absent = args.servers.split(","), list[Contender](), dict[str, str]()

    def join(name: str, target: Target, pid: int) -> None:
        (answer,) = load(target, [[QUESTION]], 8).answers
        print(f"{name} says: {answer.text!r}", flush=True)
        found.append(Contender(name, target, pid, answer.text))

    if IN_PROCESS in wanted:
        join(IN_PROCESS, *stack.enter_context(in_process(models, most, args)))
    for kind in SERVERS:
        if kind.name not in wanted:
            continue
        try:
            one = stack.enter_context(running(kind, models, args.threads))
            target = OverHttp(one.port, one.model, kind.asks)
            load(target, prompts_of(1, 1, 10**6), WARM_UP)
            join(kind.name, target, one.pid)
        except (Unavailable, ConnectionError) as cause:
            absent[kind.name] = str(cause)
            print(f"{kind.name}: {cause}", flush=True)
    return found, absent


def measured(one: Contender, streams: int, args: argparse.Namespace, number: int) -> dict[str, Any]:
    """A row: somebody is asked by so many streams."""
    before = seconds_of(one.pid)
    found = load(one.target, prompts_of(streams, args.requests, number), args.tokens)
    used = seconds_of(one.pid) - before
    return {"round": number, **row_of(one.name, streams, args.tokens, found, used)}


def shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What HTTP keeps of the engine's speed, for each count of streams, as medians of rounds."""
    found = []
    for streams in sorted({one["streams"] for one in rows}):
        speeds = {
            name: [
                one["tokens_per_s"]
                for one in rows
                if (one["server"], one["streams"]) == (name, streams)
            ]
            for name in (IN_PROCESS, OURS)
        }
        if all(speeds.values()):
            inside, outside = (statistics.median(speeds[name]) for name in (IN_PROCESS, OURS))
            found.append({"streams": streams, "share": outside / inside})
            print(f"{streams:3} streams: HTTP keeps {outside / inside:.3f} of the speed in process")
    return found


def heavy(everybody: list[Contender]) -> list[dict[str, Any]]:
    """What heavy asks cost the stream beside them, in its steps."""
    found = []
    for one in everybody:
        if one.name != OURS or not isinstance(one.target, OverHttp):
            continue
        for ask in heavy_asks():
            figures = beside(one.target.port, one.target.model, ask)
            found.append(asdict(figures))
            print(
                f"{figures.name:20} status {figures.status}   {figures.seconds:6.2f} s"
                f"   {figures.steps:5} steps meanwhile   longest wait {figures.longest:5.2f} steps"
                f", {figures.alone:5.2f} of as many after it",
                flush=True,
            )
    return found


def hostile(everybody: list[Contender]) -> list[dict[str, Any]]:
    """What a request takes beside hostile connections, and without any."""
    found = []
    for one in everybody:
        if not isinstance(one.target, OverHttp):
            continue
        for connections in (0, 200):
            figures = beside_crowd(one.target.port, one.target.model, connections)
            found.append({"server": one.name, **asdict(figures)})
            print(
                f"{one.name:20} {connections:3} hostile connections   median"
                f" {figures.median_s:6.3f} s   longest {figures.longest_s:6.3f} s"
                f"   {figures.wrong} of {figures.requests} not answered",
                flush=True,
            )
    return found


def main() -> None:
    """A line for each server and count of streams, and a dated file."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    names = ",".join((IN_PROCESS, *(one.name for one in SERVERS)))
    parser.add_argument("--servers", default=names)
    parser.add_argument("--heavy", action="store_true", help="ask for what is much to read, too")
    parser.add_argument("--hostile", action="store_true", help="ask beside hostile connections")
    parser.add_argument("--peers", type=Path, default=default_folder(), metavar="FOLDER")
    args = parser.parse_args()
    counts = [int(one) for one in args.streams.split(",")]
    models, rows = Models(args.peers), list[dict[str, Any]]()
    with ExitStack() as stack:
        everybody, absent = started(stack, args, models, max(counts))
        for number in range(1, args.rounds + 1):
            for streams in counts:
                rows += [measured(one, streams, args, number) for one in everybody]
        waits = heavy(everybody) if args.heavy else []
        crowded = hostile(everybody) if args.hostile else []
    versions = {
        pin.split("==")[0]: pin.partition("==")[2]
        for kind in SERVERS
        if kind.peer is not None and kind.name not in absent
        for pin in kind.peer.packages
    }
    reads = {kind.name: kind.reads for kind in SERVERS}
    write(
        "serve",
        args,
        {
            "rows": rows,
            "http_keeps": shares(rows),
            "heavy": waits,
            "hostile": crowded,
            "absent": absent,
            "says": {one.name: one.says for one in everybody},
            "reads": reads,
        },
        versions=versions,
    )


if __name__ == "__main__":
    main()
