"""What does a record cost, and how soon is a long one shown?

    scripts/bench inspector [--turns 9] [--rows 1 32] [--steps 100000] [--million] [--live 20000]
        [--out NAME]

The default model samples natively, with temperature and top-k, without a record and with one,
plain, compressed and without what each processor did, in turns. Prints, and writes to
bench/results/, medians of milliseconds a step, the median ratio of the turns, seconds of the
processor a step, and bytes a step. A record of so many steps, made as the library writes them, is
read and served: megabytes of one row and of four beams, seconds to read it, what Chromium takes
from an address to the first text that is painted, with the reading of the file before it and
without, and from there to the step of another token. `--million`: of a
million steps, what reading takes in seconds of the processor and in memory. A run in hands of a
tiny model that has so many tokens (`--live`) takes
another step: milliseconds of the step alone, until the page is told, and until it is drawn.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from parts.report import options, write

import everystep as es
from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import Known, LiveSession, Reading
from everystep.records import RecordWriter
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.inspector.browser import Browser, chromium
from tests.inspector.long_records import long_record

ASKED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "seed": 1}


def cost(rows: int, new: int, turns: int, folder: Path) -> dict[str, Any]:
    """Medians of milliseconds a step without a record and with one, and ratios of the pairs."""
    model, tokenizer = es.load("smollm2-135m-instruct", dtype=torch.float32)
    prompts = [f"{row}: The capital of France is" for row in range(rows)]
    given = {"max_new_tokens": new, "min_new_tokens": 0, "eos_token_id": 0, **ASKED}
    ways: dict[str, dict[str, Any]] = {
        "without": {},
        "plain": {"record": folder / "a.jsonl"},
        "compressed": {"record": folder / "a.jsonl.gz"},
        "without stages": {"record": folder / "b.jsonl.gz"},
    }

    def call(way: str) -> tuple[float, float]:
        begin, spent = time.perf_counter(), time.process_time()
        record = ways[way].get("record")
        if way == "without stages":
            record = RecordWriter(record, stages=False)
        es.generate(model, tokenizer, prompts, **given, record=record)
        taken = time.perf_counter() - begin, time.process_time() - spent
        return taken[0] / new * 1e3, taken[1] / new * 1e3

    for way in ways:
        call(way)
    turned = [[*ways][turn % 4 :] + [*ways][: turn % 4] for turn in range(turns)]
    taken = [{way: call(way) for way in turn} for turn in turned]
    found: dict[str, Any] = {}
    for way in ways:
        ratios = [[one[way][i] / one["without"][i] for one in taken] for i in (0, 1)]
        found[way] = {
            "ms": round(statistics.median(one[way][0] for one in taken), 2),
            "processor ms": round(statistics.median(one[way][1] for one in taken), 2),
            "ratio": round(statistics.median(ratios[0]), 3),
            "processor ratio": round(statistics.median(ratios[1]), 3),
        }
        if file := ways[way].get("record"):
            found[way]["bytes"] = round(file.stat().st_size / rows / new)
    return found


def shown(steps: int, beams: int, folder: Path) -> dict[str, Any]:
    """Megabytes of a long record, seconds until it is read and ready, milliseconds on the page."""
    file = folder / f"{beams}.jsonl.gz"
    long_record(file, steps, beams)
    found: dict[str, Any] = {"MB": round(file.stat().st_size / 1e6, 1)}
    if beams > 1 or chromium() is None:
        return found
    step = "document.querySelector('#step tbody tr') !== null"
    taken: dict[str, list[float]] = {"read": [], "ready": [], "page": [], "paint": [], "jump": []}
    with Browser(folder / "profile") as browser:
        for turn in range(_OPENED):
            begin = time.perf_counter()
            session = Reading(("long", es.read_record(file)))
            read = time.perf_counter()
            with PageServer(session) as server:
                ready = time.perf_counter()
                taken["page"].append(_painted(browser, server.url))
                before = read - begin, ready - read
                taken["read"].append(before[0])
                taken["ready"].append(before[1])
                taken["paint"].append(sum(before) + taken["page"][-1])
                browser.until(step)
                for part in range(1, 8):
                    at = steps * part // 8 + turn
                    here = (
                        f"document.querySelector('#step h2').textContent.startsWith('Token {at}:')"
                    )
                    begin = time.perf_counter()
                    browser.value(f"everystep.go({at})")
                    browser.until(f"{here} && {step}")
                    taken["jump"].append(time.perf_counter() - begin)
    middle = {name: statistics.median(own) for name, own in taken.items()}
    found |= {f"{name} s": round(middle[name], 1) for name in ("read", "ready")}
    found["first paint with reading ms"] = round(middle["paint"] * 1e3)
    found["first paint of what was read ms"] = round(middle["page"] * 1e3)
    return {**found, "jump ms": round(middle["jump"] * 1e3)}


_OPENED = 3
# Milliseconds from the start of the navigation to the frame after that in which the text stands.
_PAINT = """new Promise((done) => {
  const look = () => document.querySelector('#tokens span')
    ? requestAnimationFrame(() => done(performance.now()))
    : requestAnimationFrame(look);
  look();
})"""


def _painted(browser: Browser, url: str) -> float:
    """Return the seconds from the start of the navigation to a frame with the text."""
    browser.visit(url, "document.readyState !== 'loading'")
    return float(browser.later(_PAINT)) / 1e3


def opened(steps: int, folder: Path) -> dict[str, Any]:
    """Seconds of the processor and megabytes that reading a record takes, and its document."""
    file = folder / "million.jsonl.gz"
    long_record(file, steps)
    found: dict[str, Any] = {"MB": round(file.stat().st_size / 1e6)}
    begin, before = time.process_time(), _resident()
    session = Reading(("long", es.read_record(file)))
    found["read processor s"] = round(time.process_time() - begin)
    found["read MB of memory"] = round(_resident() - before)
    begin = time.process_time()
    session.document()
    found["document processor s"] = round(time.process_time() - begin)
    begin = time.perf_counter()
    session.steps(0, steps // 2, 100)
    return {**found, "window ms": round((time.perf_counter() - begin) * 1e3)}


def _resident() -> float:
    """Megabytes of memory that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# Milliseconds from a click to the token that stands in its place then.
_CLICKED = """new Promise((done) => {
  const begin = performance.now();
  const look = () => document.querySelector('#token-%d.here') && done(performance.now() - begin);
  const watch = { subtree: true, childList: true, attributes: true };
  new MutationObserver(look).observe(document.getElementById('tokens'), watch);
  document.getElementById('do-step').click();
})"""


def grown(tokens: int, folder: Path) -> dict[str, Any]:
    """Medians of milliseconds of a step of a run with so many tokens, alone and on the page."""
    positions = {"max_position_embeddings": tokens + 200}
    model = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32, **positions)
    options = {"do_sample": True, "seed": 3, "max_new_tokens": tokens + 100, "eos_token_id": None}
    session = LiveSession.opened(
        model, tiny_tokenizer(320), "ab ab", folder / "live.jsonl", "live", **options
    )
    session.obey(f"step {tokens}")
    alone, drawn, told = [], [], []
    texts = len(session.record().texts)
    for _ in range(20):
        begin = time.perf_counter()
        next(session.run)
        alone.append((time.perf_counter() - begin) * 1e3)
    for _ in range(20):
        known = Known(len(session.run.tokens), texts)
        begin = time.perf_counter()
        session.answered("step", None, known)
        told.append((time.perf_counter() - begin) * 1e3)
    with PageServer(session) as server, Browser(folder / "live profile") as browser:
        browser.visit(server.url, "document.querySelectorAll('#tokens span').length > 0")
        for _ in range(20):
            drawn.append(browser.later(_CLICKED % len(session.run.tokens)))
    figures = {"step ms": alone, "told ms": told, "drawn ms": drawn}
    return {"tokens": tokens} | {n: round(statistics.median(own), 1) for n, own in figures.items()}


def main() -> None:
    parser = options(__doc__ or "", threads=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--live", type=int, default=20_000)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    content: dict[str, Any] = {"cost": {}, "page": {}, "load": os.getloadavg()}
    with tempfile.TemporaryDirectory() as name:
        for rows in args.rows:
            new = 64 if rows == 1 else 16
            content["cost"][rows] = cost(rows, new, args.turns, Path(name))
            print(rows, content["cost"][rows], flush=True)
        for beams in (1, 4) if args.steps else ():
            content["page"][beams] = shown(args.steps, beams, Path(name))
            print(beams, content["page"][beams], flush=True)
        if args.million:
            content["million"] = opened(1_000_000, Path(name))
            print(content["million"], flush=True)
        if args.live and chromium() is not None:
            content["live"] = grown(args.live, Path(name))
            print(content["live"], flush=True)
    write("inspector", args, content)


if __name__ == "__main__":
    main()
