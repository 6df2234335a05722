"""A generation that is saved and restored goes on as if it had never been interrupted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from everystep.draws import SeededDraws
from everystep.engine import Continuous, DraftModel, Engine, audit
from everystep.engine.snapshot import fingerprint
from everystep.errors import FormatError, RequestError
from everystep.processors.warpers import TemperatureLogitsWarper
from everystep.strategies import DiverseBeam, Greedy
from everystep.types import Event, Prompt, Request, Wants
from everystep.types.stored import Chain, from_bytes, to_bytes
from tests.judges.drive import Drive, hash_executor, result
from tests.judges.mixes import Mix, random_mix
from tests.nn.test_modes import interrupted

SEEDS = range(40)


def engine_of(mix: Mix) -> Engine:
    return Engine(hash_executor(mix), Continuous(token_budget=64, max_rows=64))


def alone(request: Request, mix: Mix) -> tuple[Drive, list[Event]]:
    run = Drive(engine_of(mix))
    run.submit(request)
    run.finish()
    return run, run.events


def in_order(events: list[Event], request: Request) -> list[Event]:
    """The events as they came, or, where siblings have several drafts, sibling by sibling: a step
    whose rows were lost makes one draft, and so gives some siblings fewer tokens."""
    return sorted(events, key=lambda event: event.index) if request.drafts > 1 else events


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_restored_equals_uninterrupted(seed: int) -> None:
    """After every number of steps, into an engine that has other requests too."""
    mix = random_mix(seed)
    for request in mix.requests[:2]:
        whole, events = alone(request, mix)
        expected = whole.results[request.request_id]
        for steps in range(0, 14, 1 + seed % 3):
            engine = engine_of(mix)
            group = engine.submit(request)
            before: list[Event] = []
            for _ in range(steps):
                if engine.pending:
                    before += engine.step()
            if not group.live:
                break
            data = engine.dump(group)
            run = Drive(engine_of(mix))
            for other in mix.requests:
                if other is not request:
                    run.submit(other)
            again = run.engine.restore(request, data)
            while run.engine.pending:
                run.step()
            audit(run.engine)
            own = [one for one in run.events if one.request_id == request.request_id]
            assert result(again) == expected
            assert in_order([*before, *own], request) == in_order(events, request)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_who_was_dumped_goes_on(seed: int) -> None:
    mix = random_mix(seed)
    request = mix.requests[0]
    expected, _ = alone(request, mix)
    run = Drive(engine_of(mix))
    run.submit(request)
    while run.engine.pending:
        for group in run.engine.scheduler.groups:
            run.engine.dump(group)
        run.step()
    assert run.results == expected.results


BEAMS = """
import sys
from pathlib import Path
from tests.engine.test_snapshot import beam_request
from everystep.engine import Engine, Lockstep
from tests.judges.drive import result
from everystep.testing.hash_model import HashExecutor

engine = Engine(HashExecutor(23), Lockstep())
group = engine.restore(beam_request(), Path(sys.argv[1]).read_bytes())
while engine.pending:
    engine.step()
print(result(group))
"""


def beam_request() -> Request:
    from everystep.stops.ends import EosToken, MaxLength

    prompt = Prompt(ids=np.arange(9) % 5)
    stops = (EosToken((3,)), MaxLength(25))
    strategy = DiverseBeam(4, returns=3, max_new=16)
    return Request("beams", prompt, strategy, SeededDraws(0), stops=stops, max_length=25)


def test_a_beam_search_goes_on_in_another_process(tmp_path: Path) -> None:
    from everystep.engine import Lockstep
    from everystep.testing.hash_model import HashExecutor

    engine = Engine(HashExecutor(23), Lockstep())
    group = engine.submit(beam_request())
    for _ in range(5):
        engine.step()
    file = tmp_path / "beams"
    file.write_bytes(engine.dump(group))
    while engine.pending:
        engine.step()
    command = [sys.executable, "-c", BEAMS, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(result(group))


def test_another_request_is_refused() -> None:
    mix = random_mix(2)
    engine = engine_of(mix)
    request = replace(mix.requests[0], processors=(TemperatureLogitsWarper(0.3),))
    data = engine.dump(engine.submit(request))
    for other in (
        replace(request, max_length=request.max_length + 1),
        replace(request, draws=SeededDraws(12345)),
        replace(request, prompt=Prompt(ids=np.array([1, 2, 3]))),
        replace(request, processors=(TemperatureLogitsWarper(0.31),)),
    ):
        with pytest.raises(RequestError, match="another request"):
            engine_of(mix).restore(other, data)


def test_an_interrupt_at_any_line_leaves_the_fingerprint_as_it_was() -> None:
    """A `repr` that was interrupted may leave a note that it runs, and be another one for ever."""
    asked = beam_request()
    wanted, line = fingerprint(asked), 0
    while interrupted(lambda: fingerprint(asked), line):
        line += 1
        assert fingerprint(asked) == wanted, line
    assert line > 50


def test_a_fingerprint_reads_the_choices_as_repr_shows_them() -> None:
    found = {fingerprint(replace(beam_request(), **one)) for one in (
        {}, {"max_length": 77}, {"adapters": (("a", 0.5),)}, {"wants": Wants(logprobs=2)},
        {"strategy": Greedy()}, {"strategy": DiverseBeam(2)}, {"draws": SeededDraws(8)},
        {"processors": (TemperatureLogitsWarper(0.5),)},
        {"processors": (TemperatureLogitsWarper(0.25),)},
    )}  # fmt: skip
    assert len(found) == 9


def test_damaged_bytes_are_refused() -> None:
    mix = random_mix(4)
    engine = engine_of(mix)
    group = engine.submit(mix.requests[0])
    for _ in range(3):
        engine.step()
    data = engine.dump(group)
    rng = np.random.default_rng(0)
    for _ in range(300):
        cut = data[: rng.integers(len(data))]
        with pytest.raises((FormatError, RequestError)):
            engine_of(mix).restore(mix.requests[0], cut)
    with pytest.raises(FormatError):
        from_bytes(b"\x80\x04pickle")


@dataclass(frozen=True)
class Unknown:
    """A value of a caller's own."""


def test_what_cannot_be_written_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="Unknown"):
        to_bytes({"memory": Unknown()})


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(2**70), 0.1, float("inf"), "ä", [1, (2, "x")], {"a": {1: None}},
        frozenset({1, 2}), Chain(2, Chain((1, "x"), None)),
    ],
)  # fmt: skip
def test_values_come_back(value: object) -> None:
    assert from_bytes(to_bytes(value)) == value


def test_arrays_come_back_with_their_types() -> None:
    for dtype in (np.int64, np.uint64, np.float32, np.float64, np.bool_):
        for shape in ((0,), (3,), (2, 2)):
            array = np.ones(shape, dtype)
            back = from_bytes(to_bytes((array, array)))[1]
            assert back.dtype == array.dtype and np.array_equal(back, array)


def test_a_long_chain_needs_no_recursion() -> None:
    chain = None
    for n in range(20_000):
        chain = Chain(n, chain)
    assert from_bytes(to_bytes(chain)).values() == list(range(20_000))


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    from everystep.testing.hash_model import HashExecutor

    mix = random_mix(4)
    request = replace(
        mix.requests[0], strategy=Greedy(), companions=(), readout=None,
        drafter=DraftModel(lambda: HashExecutor(mix.vocab_size + 1)),
    )  # fmt: skip
    with pytest.raises(RequestError, match="vocabulary"):
        engine_of(mix).submit(request)
