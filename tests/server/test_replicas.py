"""Replicas on a real Ray cluster: the same answers, whichever replica gives them, or dies of it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import everystep as es
from everystep.server.offline import run_batch
from everystep.server.ray.orders import replica_orders
from everystep.server.settings import ServeSettings
from everystep.testing.models import tiny_llama
from tests.cli.running import everystep
from tests.reading import ROOT
from tests.server.programs import assert_none_is_left, marked, program
from tests.server.serving import (
    PATIENCE,
    Served,
    chunks_of,
    in_thread,
    joined,
    served,
)
from tests.server.test_batches import killed, mixed, rows, texts, written
from tests.server.watched import DRAIN_SECONDS

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed; the extra ray brings it"
)
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 150, "ignore_eos": True}
MARK = f"EVERYSTEP_TEST={secrets.token_hex(8)}"


class Owner:
    """A cluster, and the program that has it and looks at its replicas."""

    def __init__(self, running: subprocess.Popen[str], application: str | None = None) -> None:
        self._running, self._application = running, application
        assert running.stdout is not None
        self.address = running.stdout.readline().strip()
        assert self.address, "the cluster did not start"

    def of(self, application: str) -> Owner:
        """This, looking at the replicas of another server."""
        found = copy(self)
        found._application = application
        return found

    def ask(self, verb: str, *given: Any) -> Any:
        assert self._running.stdin is not None and self._running.stdout is not None
        self._running.stdin.write(json.dumps([verb, self._application, *given]) + "\n")
        self._running.stdin.flush()
        return json.loads(self._running.stdout.readline())

    def loads(self) -> dict[int, list[int]]:
        """Asks and tokens of each replica, by process."""
        return {int(pid): load for pid, load in self.ask("loads").items()}

    def busy(self) -> int:
        """The process of the one replica that works."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = [pid for pid, (asks, _) in self.loads().items() if asks]
            if len(found) == 1:
                return found[0]
        raise AssertionError("no replica works")

    def both(self) -> None:
        """Wait until two replicas are there."""
        deadline = time.monotonic() + 240
        while len(self.loads()) < 2:
            assert time.monotonic() < deadline, "no second replica came"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*MARK.split("="))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
        command = [sys.executable, "-m", "tests.server.ray_owner"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, stderr=subprocess.DEVNULL, **pipes) as running:
            yield Owner(running)
            assert running.stdin is not None
            running.stdin.close()
            assert running.wait(60) == 0
    assert_none_is_left(MARK)


@pytest.fixture(scope="module")
def two(owner: Owner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with two replicas."""
    folder = tmp_path_factory.mktemp("two")
    on = ("--replicas", "2", "--ray-address", owner.address, "--port", "0")
    with (
        program(folder, *on) as (_, address),
        httpx.Client(base_url=address, timeout=PATIENCE) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def one() -> Iterator[Served]:
    """A server whose engine is in a thread, to compare with."""
    with served(in_thread()) as found:
        yield found


def test_a_batch_on_two_actors_is_that_of_one_process(
    owner: Owner, folder: Path, tmp_path: Path
) -> None:
    lines = mixed(300)
    source, target = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    whole = tmp_path / "whole.jsonl"
    asyncio.run(run_batch(source, whole, ServeSettings(model=str(folder)), mooring=in_thread()))
    begun = whole.read_bytes().splitlines(keepends=True)[:7]
    target.write_bytes(b"".join(begun) + b'{"id":"batch_req_torn","custom_id":"n7')
    done = subprocess.run(
        on_replicas(owner, folder, source, target), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(f"{len(lines)} lines, 30 of them without an answer\n")
    assert_same_rows(rows(target), rows(whole))
    assert target.read_bytes().startswith(b"".join(begun)), "what is done is not done again"


def test_a_task_that_reads_lines_imports_no_torch() -> None:
    """Ray has a process for each of them, and one with torch starts in seconds."""
    looked = "import sys, everystep.server.ray.spans; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", looked], timeout=PATIENCE).returncode == 0


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on .Field.")  # Ray's own
@pytest.mark.parametrize("address", [None, "of:1"])
def test_replicas_that_do_not_end_in_time_end_no_server_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str | None
) -> None:
    """Ray's own wait is a minute, and this stands for one that was too short."""
    from everystep.server.ray import deployment

    said: list[str] = []

    class SlowServe:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: said.append(name)

        def delete(self, name: str) -> None:
            raise TimeoutError(name)

    monkeypatch.setattr(deployment, "serve", SlowServe())
    monkeypatch.setattr(deployment, "application", lambda _: None)
    orders = replica_orders(ServeSettings(model="m", replicas=2, ray_address=address))
    with deployment.deployed(orders):
        pass
    assert said == ["start", "run", *([] if address else ["shutdown"])]
    assert f"{orders.application} have not ended within a minute" in caplog.text


@pytest.mark.slow
def test_a_killed_batch_goes_on_where_it_was(owner: Owner, folder: Path, tmp_path: Path) -> None:
    lines = mixed(1500)
    source, target = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = on_replicas(owner, folder, source, target)
    before = killed(command, target, 12)
    assert 0 < before < len(lines), "it was killed in the middle"
    assert subprocess.run(command, timeout=500).returncode == 0
    whole = tmp_path / "whole.jsonl"
    asyncio.run(run_batch(source, whole, ServeSettings(model=str(folder)), mooring=in_thread()))
    assert_same_rows(rows(target), rows(whole))


def trained(owner: Owner, folder: Path, output: Path, **said: Any) -> list[str]:
    """The command of the guide that trains on two workers of the cluster."""
    words = ("lit", "asleep", "grey", "here", "far", "cold", "old")
    data = folder.parent / "examples.jsonl"
    data.write_text(
        "\n".join(
            json.dumps({"prompt": f"The thing {number} is", "completion": f" {word}"})
            for number, word in enumerate(words)
        )
    )
    line = [str(ROOT / "deploy" / "ray_train.py"), str(folder), str(data), str(output)]
    options = {"address": owner.address, "rows": 2, **said}
    return [sys.executable, *line, *(f"--{name}={value}" for name, value in options.items())]


def alone(folder: Path, output: Path, steps: int) -> dict[str, Tensor]:
    """The weights after as many steps in one process, which has the rows of both workers."""
    model, tokenizer = es.load(folder)
    args = es.TrainingArguments(
        output_dir=output, max_steps=steps, per_device_train_batch_size=4, disable_tqdm=True
    )
    data = es.read_rows(folder.parent / "examples.jsonl", model, tokenizer)
    trainer = es.Trainer(model, args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(output / "end")
    return load_file(output / "end" / "model.safetensors")


@pytest.mark.slow
def test_workers_of_ray_train_take_the_steps_of_one_process(
    owner: Owner, folder: Path, tmp_path: Path
) -> None:
    command = trained(owner, folder, tmp_path / "two", steps=6, save=3)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"trained: {tmp_path / 'two' / 'end'}"]
    found = load_file(tmp_path / "two" / "end" / "model.safetensors")
    assert_close(found, alone(folder, tmp_path / "one", 6), rtol=1e-4, atol=1e-5)
    checkpoints = sorted(one.name for one in (tmp_path / "two").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-3", "checkpoint-6"]


@pytest.mark.slow
def test_a_killed_worker_of_ray_train_costs_the_steps_since_a_checkpoint(
    owner: Owner, folder: Path, tmp_path: Path
) -> None:
    command = trained(owner, folder, tmp_path / "two", steps=60, save=5)
    begun = tmp_path / "two" / "checkpoint-10" / "checkpoint.json"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 120
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        workers = [pid for pid, command in marked(MARK).items() if "TrainWorker" in command]
        assert len(workers) == 2, "the workers of Ray Train are named so"
        os.kill(workers[0], signal.SIGKILL)
        said = running.communicate(timeout=300)[0].splitlines()
    assert said[-1] == f"trained: {tmp_path / 'two' / 'end'}"
    found = load_file(tmp_path / "two" / "end" / "model.safetensors")
    assert_close(found, alone(folder, tmp_path / "one", 60), rtol=1e-3, atol=1e-4)


def on_replicas(owner: Owner, folder: Path, source: Path, target: Path) -> list[str]:
    """The command that answers a batch file by two actors."""
    on = ("--replicas", "2", "--ray-address", owner.address, "--threads", "1")
    return everystep("run-batch", str(source), "-o", str(target), str(folder), *on)


def assert_same_rows(found: list[Any], wanted: list[Any]) -> None:
    """Rows of the same lines with the same answers; ids and times differ."""
    assert [row["custom_id"] for row in found] == [row["custom_id"] for row in wanted]
    assert [texts(row) for row in found] == [texts(row) for row in wanted]
    codes = [[row["response"]["status_code"] for row in one] for one in (found, wanted)]
    assert codes[0] == codes[1]


def test_openais_client_gets_the_bytes_of_one_process(
    two: httpx.Client, one: Served, owner: Owner
) -> None:
    before = owner.loads()
    assert len(before) == 2
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "n": 2}]
    for base in (str(two.base_url), one.url):
        assert httpx.get(f"{base}/ready").status_code == 200
    answers = []
    for base in (str(two.base_url), one.url):
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
            answers.append(
                [
                    [
                        *(
                            c.model_dump(exclude={"id", "created", "usage"})
                            for c in client.completions.create(
                                model="tiny",
                                prompt=f"hello {number}",
                                seed=number,
                                stream=True,
                                max_tokens=12,
                                logprobs=1,
                                **ways[number % 3],
                            )
                        )
                    ]
                    for number in range(12)
                ]
            )
    ours, theirs = answers
    assert [_choices(chunks) for chunks in ours] == [_choices(chunks) for chunks in theirs]
    after = owner.loads()
    assert all(after[pid][1] > before[pid][1] for pid in before), "both replicas made tokens"


def _choices(chunks: list[Any]) -> dict[int, list[Any]]:
    """What each choice of a stream was told, in order; choices may come between each other."""
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


def test_sessions_are_pinned_and_find_what_is_cached(two: httpx.Client, owner: Owner) -> None:
    def turns(first: int) -> list[list[int]]:
        return [
            [first + user] * 8 + list(range(10, 10 + 24 * turn))
            for turn in range(1, 4)
            for user in range(8)
        ]

    pinned, spread = owner.ask("cached", 8, turns(40)), owner.ask("cached", 0, turns(60))
    most = 8 * sum(8 + 24 * turn for turn in (1, 2))
    assert pinned > 0.9 * most and spread < 0.9 * pinned
    for _ in range(2):
        body = two.post("/v1/completions", json={"prompt": "hello the " * 9, "max_tokens": 1})
    assert body.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    text = two.get("/metrics").text
    assert _sample(text, 'everystep_prompt_tokens_cached_total{model_name="tiny"}') > 0
    assert _sample(text, "everystep_replicas") == 2
    deadline = time.monotonic() + 30
    while not all(one["cached_tokens"] for one in shown(two, owner)):
        assert time.monotonic() < deadline, "each of both held the beginnings of some"
    states = shown(two, owner)
    assert all(one["cached_tokens"] < one["prompt_tokens"] for one in states)
    assert all(one["models"].keys() == {"tiny"} and one["age_seconds"] > 0 for one in states)


def shown(client: httpx.Client, owner: Owner) -> list[Any]:
    """How the replicas are that are there, as the server says it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        there = owner.loads()
        found: list[Any] = client.get("/v1/everystep/replicas").json()["data"]
        if {one["process"] for one in found} == {*there}:
            return found
        time.sleep(0.1)
    raise AssertionError((found, there))


def _sample(text: str, name: str) -> float:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[-1])


@pytest.fixture(scope="module")
def watched_url(owner: Owner, folder: Path) -> Iterator[str]:
    """The address of a front over one replica that tells of those who leave."""
    yield owner.ask("watch", str(folder))
    owner.ask("unwatch")


def test_a_client_that_leaves_frees_its_rows_within_two_steps(
    owner: Owner, watched_url: str
) -> None:
    """Steps that its replica begins once it has heard of it, beside a stream that goes on."""
    url = watched_url
    body: dict[str, Any] = {**LONG, "max_tokens": 4000, "stream": True}
    ends: list[Any] = []
    over = threading.Event()

    def stay() -> None:
        while not over.is_set():
            shorter = {**body, "max_tokens": 400}
            answer = httpx.post(f"{url}/v1/completions", json=shorter, timeout=PATIENCE)
            ends.append(chunks_of(answer.text)[-1]["choices"][0]["finish_reason"])

    staying = threading.Thread(target=stay)
    staying.start()
    for number in (1, 2, 9):
        with (
            httpx.Client(base_url=url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()  # which ends it when nobody has it any more
            for _ in range(number):
                next(lines)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as asking:
            own: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 4000}
            more = {"ignore_eos": True}
            stream = asking.completions.create(**own, stream=True, extra_body=more)
            for _ in range(number):
                next(stream)
            stream.close()
    deadline = time.monotonic() + 30
    while len(found := owner.ask("departures")) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    over.set()
    staying.join()
    assert len(found) == 6 and all(steps <= 2 and wrong == "" for steps, wrong in found)
    assert {*ends} == {"length"}, "whoever stays is told all of it"


def test_a_replica_that_is_told_to_end_answers_first(owner: Owner, watched_url: str) -> None:
    """For as long as the deadline of its requests allows, however short the drain is."""
    assert httpx.get(f"{watched_url}/ready").status_code == 200
    length = 1500
    *answers, seconds, ends, there = owner.ask("drained", length)
    assert ends == ["None"] * 2 and seconds > 2 * DRAIN_SECONDS and not there
    for before, after, over in answers:
        assert 0 < before < length / 2 and after == length and over, "it was told in the middle"


def test_runs_in_hands_are_refused(two: httpx.Client) -> None:
    answer = two.post("/v1/everystep/runs", json={"prompt": "hello"})
    assert answer.status_code == 400 and "without" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_replica_ends_no_stream_in_silence(
    two: httpx.Client, one: Served, owner: Owner, kills: int
) -> None:
    longer = {**LONG, "max_tokens": 400}
    asked: list[dict[str, Any]] = [
        {**longer, "prompt": "hello " * (1 + number), "seed": number, "temperature": number % 2}
        for number in range(4)
    ]
    wanted = [one.completion(**body)["choices"][0]["text"] for body in asked]
    for _ in range(kills):
        owner.both()
        found: list[str] = [""] * 5
        begun = threading.Barrier(6)

        def ask(number: int, body: dict[str, Any], begun: Any = begun, found: Any = found) -> None:
            body = {**body, "stream": True}
            with two.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                begun.wait(60)
                found[number] = "\n".join([first, *lines])

        timed = {**asked[0], "timeout": 600}
        clients = [threading.Thread(target=ask, args=pair) for pair in enumerate([*asked, timed])]
        for client in clients:
            client.start()
        begun.wait(60)
        before = deaths(two)
        os.kill(_most(owner), signal.SIGKILL)
        for client in clients:
            client.join()
        until = time.monotonic() + 30
        while deaths(two) == before:
            assert time.monotonic() < until, "it was killed in the middle of an answer"
            time.sleep(0.05)
        assert [joined(chunks_of(body)) for body in found[:4]] == wanted
        whole = "[DONE]" in found[4] and joined(chunks_of(found[4])) == wanted[0]
        assert whole or '"error"' in found[4], "an answer with a clock is whole or says it is not"
    owner.both()
    assert len(shown(two, owner)) == 2, "those that died are shown no more"


def _most(owner: Owner) -> int:
    """The process of the replica with the most asks."""
    loads = owner.loads()
    return max(loads, key=lambda pid: loads[pid][0])


def settings_file(folder: Path, owner: Owner, **said: Any) -> Path:
    """A file of settings for a server on the cluster."""
    folder.mkdir(exist_ok=True)
    lines = [f"{name} = {json.dumps(value)}" for name, value in said.items()]
    path = folder / "serve.toml"
    path.write_text("\n".join([*lines, f'ray_address = "{owner.address}"']))
    return path


@pytest.mark.slow
def test_a_burst_has_two_replicas_and_then_one_again_and_loses_nothing(
    owner: Owner, one: Served, tmp_path: Path
) -> None:
    scale: dict[str, Any] = {"replicas": 1, "max_replicas": 2, "replica_load": 3}
    scale |= {"scale_up_seconds": 1, "scale_down_seconds": 4, "ray_application": "scaled"}
    file = settings_file(tmp_path, owner, **scale)
    asked = [{**LONG, "seed": number, "temperature": 1} for number in range(16)]
    wanted = [one.completion(**body)["choices"][0]["text"] for body in asked]
    over = threading.Event()
    wrong: list[str] = []

    def ask(client: httpx.Client, number: int, most: int | None) -> None:
        asks = 0
        while not over.is_set() and (most is None or asks < most):
            asks += 1
            answer = client.post("/v1/completions", json={**asked[number], "stream": True})
            if joined(chunks_of(answer.text)) != wanted[number]:
                wrong.append(answer.text)

    with (
        program(tmp_path, "--settings", str(file), "--port", "0") as (_, address),
        httpx.Client(base_url=address, timeout=PATIENCE) as client,
    ):
        seen = [replicas_of(client)]
        burst = [threading.Thread(target=ask, args=(client, n, 12)) for n in range(15)]
        always = threading.Thread(target=ask, args=(client, 15, None))
        for thread in (*burst, always):
            thread.start()
        deadline = time.monotonic() + 240
        while seen[-2:] != [2, 1] and time.monotonic() < deadline:
            if (count := replicas_of(client)) != seen[-1]:
                seen.append(count)
            time.sleep(0.2)
        over.set()
        for thread in (*burst, always):
            thread.join()
        assert wrong == [] and seen == [1, 2, 1]
        assert deaths(client) == 0, "drained, not cut"


def deaths(client: httpx.Client) -> int:
    """Replicas that died at work, as the server says it."""
    return int(client.get("/v1/everystep/load").json()["replica_deaths"])


def replicas_of(client: httpx.Client) -> int:
    return int(client.get("/v1/everystep/load").json()["replicas"])


@pytest.mark.slow
def test_the_model_is_changed_by_another_server_on_the_cluster(
    owner: Owner, one: Served, tmp_path: Path
) -> None:
    """The old one goes on until its answers are whole, and none of them is the new model's."""
    other = tiny_llama(vocab_size=320, max_position_embeddings=4096, seed=5)
    wanted = one.completion(**LONG)["choices"][0]["text"]
    texts: list[str] = []
    with served(in_thread(other)) as server:
        of_new = server.completion(**LONG)["choices"][0]["text"]
    assert of_new != wanted
    old, new = (
        settings_file(tmp_path / name, owner, replicas=1, ray_application=name)
        for name in ("old", "new")
    )

    def ask(client: httpx.Client, address: str) -> None:
        answer = client.post(f"{address}/v1/completions", json={**LONG, "stream": True})
        texts.append(joined(chunks_of(answer.text)))

    begin = ("--port", "0", "--settings")
    with program(tmp_path / "b", *begin, str(new), model=other) as (_, there):
        with (
            httpx.Client(timeout=PATIENCE) as client,
            program(tmp_path / "a", *begin, str(old)) as (_, here),
        ):
            asking = threading.Thread(target=ask, args=(client, here))
            asking.start()
            while not client.get(f"{here}/v1/everystep/load").json()["running"]:
                time.sleep(0.01)
        asking.join()
        assert texts == [wanted], "it was drained before it ended"
        answer = httpx.post(f"{there}/v1/completions", json=LONG, timeout=PATIENCE).json()
        assert answer["choices"][0]["text"] == of_new
        assert len(owner.of("new").loads()) == 1
