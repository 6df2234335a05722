"""`AsyncEngine` beside the garbage collector, the end of the interpreter, and `fork`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.reading import ROOT

BEGIN = """
import asyncio, gc, os, sys, threading
import torch
import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError
from everystep.executors import process
from tests.executors.models import PLAIN, random_model
torch.set_num_threads(2)
process._PATIENCE = 10**6  # the end of a process would wait for an engine that stays
model = LanguageModel(random_model(PLAIN, dtype=torch.float32), executor={executor!r})
IDS = list(range(3, 12))
LONG = {{"max_new_tokens": 240, "eos_token_id": None}}
SHORT = {{"max_new_tokens": 12, "eos_token_id": None}}
async def tokens(stream):
    return [event.token async for event in stream]
expected = [event.token for event in es.stream(model, None, IDS, **SHORT)]
"""

DROPPED = """
async def main():
    engine = es.AsyncEngine(model)
    async for event in engine.stream(IDS, **LONG):
        break
    (thread,) = [one._thread for one in engine._desk._threads.values()]
    engine.itself = engine
    del engine
    gc.collect()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
    # The stream alone keeps its engine.
    assert await tokens(es.AsyncEngine(model).stream(IDS, **SHORT)) == expected
asyncio.run(main())
"""

ENDS = """
async def main(engine, begin):
    if begin:
        await anext(engine.stream(IDS, **LONG))
    global stream
    stream = engine.stream(IDS, **LONG)
    await anext(stream)
    if not begin:
        await engine.generate(IDS, **SHORT)
for number in range(2):
    child = os.fork()
    if child == 0:
        engine = es.AsyncEngine(model, max_events=240)
        asyncio.run(main(engine, number % 2))
        sys.exit(0)
    found, code = os.waitpid(child, 0)
    assert code == 0, code
"""

FORKS = """
async def main(engine):
    assert await tokens(engine.stream(IDS, **SHORT)) == expected
unused, used = es.AsyncEngine(model), es.AsyncEngine(model)
asyncio.run(main(used))
stream = used.stream(IDS, **SHORT)
asyncio.run(main(used))
child = os.fork()
if child == 0:
    for use in (lambda: used.stream(IDS), lambda: asyncio.run(tokens(stream))):
        try:
            use()
        except RequestError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError("nothing runs here")
    asyncio.run(main(unused))
    asyncio.run(main(es.AsyncEngine(model)))
    asyncio.run(used.close())
    del stream, used
    sys.exit(0)
found, code = os.waitpid(child, 0)
assert code == 0, code
assert asyncio.run(tokens(stream)) == expected
asyncio.run(main(used))
asyncio.run(main(unused))
assert [one for one in used._desk._threads.values() if one.is_alive], "it ends with this process"
"""

HELD = """
begun, gate = threading.Event(), threading.Event()
def slow(ids, scores):
    if threading.current_thread() is not threading.main_thread():
        begun.set()
        gate.wait(60)
    return scores
PLAIN_STEPS = {{**SHORT, "logits_processor": [slow]}}
events = es.stream(model, None, IDS, **PLAIN_STEPS)
run = es.open(model, None, IDS, **PLAIN_STEPS)
first, tokens_of_run = next(events).token, [token for _, token in zip(range(2), run)]
for take in (lambda: next(events), lambda: next(iter(run))):
    begun.clear()
    threading.Thread(target=take, daemon=True).start()
    assert begun.wait(60)
child = os.fork()
if child == 0:
    assert [first, *[event.token for event in events]] == expected
    dropped = es.stream(model, None, IDS, **SHORT)
    assert [event.token for event in dropped] == expected
    for step in run:
        pass
    assert list(run.tokens) == expected, run.tokens
    sys.exit(0)
found, code = os.waitpid(child, 0)
assert code == 0, code
gate.set()
"""


@pytest.mark.parametrize("executor", [pytest.param("native", marks=pytest.mark.native), "torch"])
def test_engines_that_are_dropped_forked_and_running_let_their_process_end(executor: str) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
    script = BEGIN.format(executor=executor) + DROPPED + ENDS + FORKS + HELD.format()
    done = subprocess.run(
        # From Python 3.12 on every fork of a process with threads is warned of.
        [sys.executable, "-W", "ignore:This process", "-c", script],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
