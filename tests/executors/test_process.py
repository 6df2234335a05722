"""Steps beside the end of the interpreter, `fork`, the garbage collector, and too little memory."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api import load
from everystep.api.model import LanguageModel
from everystep.errors import CapacityError, UnsupportedError
from everystep.executors.choice import ExecutorName
from everystep.executors.native.library import check
from everystep.executors.process import is_shortage
from tests.executors.members import members
from tests.executors.models import PLAIN, random_model
from tests.files.gguf_writer import write_gguf
from tests.models.test_gguf import converted, metadata
from tests.models.tiny import reference_decoder
from tests.reading import ROOT

BEGIN = """
import gc, os, sys, threading, time
import torch
import everystep as es
from everystep.api.model import LanguageModel
from tests.executors.models import PLAIN, random_model
torch.set_num_threads(2)
model = LanguageModel(random_model(PLAIN, dtype=torch.float32), executor={executor!r})
IDS = list(range(3, 12))
def stream():
    return es.stream(model, None, IDS, max_new_tokens=12)
def status(child, patience=60):
    until = time.monotonic() + patience
    while time.monotonic() < until:
        found, code = os.waitpid(child, os.WNOHANG)
        if found:
            return code
        time.sleep(0.01)
    os.kill(child, 9)
    return "hangs"
"""

ENDS = """
def go():
    while True:
        model.generate(torch.tensor([IDS]), max_new_tokens=60, do_sample=False)
for number in range(8):
    child = os.fork()
    if child == 0:
        threading.Thread(target=go, daemon=True).start()
        time.sleep(0.05 + 0.003 * number)
        sys.exit(0)
    assert status(child) == 0
"""

FORKS = """
expected = [event.token for event in stream()]
# Both kinds of threads are there: those of native steps, and those of torch.
torch.randn(1000, 1000).exp() @ torch.randn(1000, 1000)
begun = stream()
first = [next(begun).token for _ in range(5)]
child = os.fork()
if child == 0:
    torch.randn(1000, 1000).exp() @ torch.randn(1000, 1000)
    assert first + [event.token for event in begun] == expected
    assert [event.token for event in stream()] == expected
    dropped = stream()
    next(dropped)
    del dropped
    sys.exit(0)
# One after the other: threads of torch that spin in both processes would slow them down.
assert status(child) == 0
assert first + [event.token for event in begun] == expected
"""

CYCLES = """
class Node: pass
def server():
    with stream() as events:
        yield from events
gc.disable()
sys.unraisablehook = lambda told: os._exit(3)
for _ in range(10):
    node = Node()
    node.itself, node.server = node, server()
    next(node.server), next(node.server)
    del node
    gc.collect()
"""

SHORTAGES = """
import resource
from everystep.errors import CapacityError
torch.set_num_threads(4)
executor = model.executor()
expected = model.generate(torch.tensor([IDS]), max_new_tokens=5).tolist()
room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
none = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (room + 2**22, none[1]))
assert executor._library.es_reserve(executor._runner, 10**6, 0) == 1
del executor
try:
    model.generate(torch.tensor([IDS]), max_new_tokens=5)
except CapacityError as error:
    assert "no more threads" in str(error), error
else:
    raise AssertionError("there were threads enough")
resource.setrlimit(resource.RLIMIT_AS, none)
assert model.generate(torch.tensor([IDS]), max_new_tokens=5).tolist() == expected
"""

both = pytest.mark.parametrize(
    "executor", [pytest.param("native", marks=pytest.mark.native), "torch"]
)


def succeeds(program: str, executor: str) -> None:
    """A process that runs the program on a tiny model ends by itself, and well."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.format(executor=executor) + program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"


@pytest.mark.few(2)
@both
def test_the_interpreter_ends_beside_a_daemon_thread_that_generates(executor: str) -> None:
    succeeds(ENDS, executor)


@pytest.mark.few(2)
@both
def test_a_forked_child_goes_on_and_ends(executor: str) -> None:
    succeeds(FORKS, executor)


@pytest.mark.few(2)
@both
def test_a_stream_in_a_cycle_is_collected(executor: str) -> None:
    succeeds(CYCLES, executor)


@pytest.mark.native
def test_without_memory_for_threads_the_model_stays_usable() -> None:
    succeeds(SHORTAGES, "native")


def test_every_shortage_is_one_kind_of_error() -> None:
    for failure in (1, 4):
        with pytest.raises(CapacityError):
            check(failure)
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**50)
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA"), found.value):
        assert is_shortage(error)
    assert not is_shortage(RuntimeError("shapes differ"))


@both
def test_what_holds_a_model_is_not_pickled_or_deeply_copied(executor: ExecutorName) -> None:
    model = LanguageModel(random_model(PLAIN, dtype=torch.float32), executor=executor)
    stream = es.stream(model, None, [1, 2])
    for holder in (model, model.core, model.executor(), stream):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(UnsupportedError, match="holds the weights of a model"):
                copied(holder)
    assert copy.copy(model).core is model.core


@pytest.mark.parametrize("kind", ["folder", "file", "weights"])
def test_a_model_is_loaded_by_one_thread_whatever_torch_has(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading is thousands of small operations, each of which would wait for the slowest thread."""
    reference = reference_decoder("llama", torch.float32)
    reference.save_pretrained(tmp_path / "folder")
    tensors = {name: ("F32", values) for name, (_, values) in converted(reference, "llama").items()}
    file = write_gguf(tmp_path / "model.gguf", metadata("llama"), tensors)
    counts = []
    for name in ("build_model", "build_gguf_model"):
        build = getattr(load, name)

        def counted(*given: Any, build: Any = build, **options: Any) -> Any:
            counts.append(torch.get_num_threads())
            return build(*given, **options)

        monkeypatch.setattr(load, name, counted)
    with members(3):
        if kind == "weights":
            load.from_weights(reference.config.to_dict(), reference.state_dict())
        else:
            es.load_model(tmp_path / "folder" if kind == "folder" else file)
        assert (counts, torch.get_num_threads()) == ([1], 3)
