"""A model that nobody asks for is put away, and loaded again for the next request, which waits."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.host import HostedModel
from everystep.server.link import EngineLink, HangWatch, ThreadMooring
from everystep.server.local import listening
from everystep.server.messages import Alive
from everystep.server.presence import IdleLimits, Presence
from everystep.server.settings import read_settings
from everystep.testing.models import tiny_llama
from tests.inspector.browser import Browser, needs_chromium
from tests.process_tree import children_of
from tests.server.programs import program
from tests.server.serving import LIMITS, TOKENIZER, TRIALS, Served, chunks_of, joined
from tests.server.test_metrics import read, total

ASKED: dict[str, Any] = {"prompt": "hello the", "max_tokens": 12, "ignore_eos": True}
SEEDS = {"first": 0, "second": 1}


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Library:
    """Where models come from: each loading makes one anew. `held`: those that are alive."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.held: dict[str, weakref.ref[LanguageModel]] = {}
        self.opened = threading.Event()  # until which nothing is loaded again
        self.opened.set()
        self.error: Exception | None = None

    def load(self, name: str) -> HostedModel:
        """Loads a model."""
        assert self.opened.wait(60)
        if self.error is not None:
            raise self.error
        model = tiny_llama(SEEDS[name], vocab_size=320, max_position_embeddings=4096)
        self.loaded.append(name)
        self.held[name] = weakref.ref(model)
        return HostedModel(model, TOKENIZER, LIMITS, trials=TRIALS)

    def all(self) -> dict[str, HostedModel]:
        """The models of a new engine."""
        return {name: self.load(name) for name in SEEDS}


@contextmanager
def putting_away(limits: IdleLimits) -> Iterator[tuple[Served, Library]]:
    """A server of two models."""
    library = Library()
    link = EngineLink(ThreadMooring(library.all, LIMITS, library.load), idle=limits)
    known = FrontModel(TOKENIZER, tiny_llama(vocab_size=320).chat_defaults)
    front = Front(link, dict.fromkeys(SEEDS, known))
    with listening(front) as port:
        one = Served(front, port)
        with one.client:
            yield one, library


def where(server: Served) -> dict[str, str]:
    """What the server says of its models."""
    found: dict[str, str] = server.client.get("/v1/everystep/load").json()["models"]
    assert server.client.get("/ready").json()["models"].keys() == found.keys()
    return found


# --- when -----------------------------------------------------------------------------------------


def test_a_model_is_idle_from_its_last_ask_on() -> None:
    now = 100.0
    presence = Presence(IdleLimits(60.0), lambda: now)
    presence.meet(["a", "b"])
    now += 59.9
    assert presence.idle({"a"}) == [], "b was not asked for, but not for long enough"
    now += 0.2
    assert presence.idle(set()) == ["b"] and presence.idle(set()) == []
    assert not presence.is_loaded("b") and not presence.calls_for("b"), "it is still leaving"
    presence.told("b", loaded=False)
    assert presence.calls_for("b") and not presence.calls_for("b"), "it is loaded once"
    assert presence.shown() == {"a": "loaded", "b": "loading"}
    now += 1000.0
    assert presence.idle(set()) == ["a"], "what is being loaded is not put away"
    presence.told("b", loaded=True)
    assert presence.is_loaded("b") and presence.loads == {"b": 1}
    presence.told("a", loaded=True)  # a run of it is open
    assert presence.loads == {"b": 1} and presence.idle(set()) == []
    now += 61.0
    assert presence.idle({"b"}) == ["a"]
    never = Presence(None, lambda: now)
    never.meet(["a"])
    now += 10**9
    assert never.idle(set()) == []


def test_a_thread_that_has_gone_does_not_hang() -> None:
    watch = HangWatch(10.0)
    watch.hear(Alive([-1, 7]))
    for _ in range(30):
        watch.hear(Alive([-1]))
        assert watch.passes(0.5) is None


# --- what becomes of it ---------------------------------------------------------------------------


def test_it_is_let_go_of_and_the_next_request_waits_for_it() -> None:
    with putting_away(IdleLimits(1.0)) as (server, library):
        wanted = {name: server.completion(**ASKED, model=name)["choices"] for name in SEEDS}
        assert wanted["first"] != wanted["second"]
        over = threading.Event()

        def keep_asking() -> None:
            while not over.wait(0.1):
                server.completion(**ASKED, model="first")

        asking = threading.Thread(target=keep_asking)
        asking.start()
        until(lambda: where(server) == {"first": "loaded", "second": "away"}, "the second goes")
        gc.disable()  # it is gone by itself, and not when garbage is looked for
        until(lambda: library.held["second"]() is None, "nothing holds the model any more")
        gc.enable()
        found, before = read(server), library.loaded.count("second")
        assert total(found, "everystep_model_loaded", model_name="second") == 0
        assert total(found, "everystep_model_loaded", model_name="first") == 1
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/ready").json()["models"]["second"] == "away"
        names = [one["id"] for one in server.client.get("/v1/models").json()["data"]]
        assert names == ["first", "second"]
        answer = server.post("/tokenize", prompt="hello", model="second")
        assert answer.json()["tokens"] == TOKENIZER.encode("hello")
        assert where(server)["second"] == "away", "none of this needs the model"
        library.opened.clear()
        waiting: list[Any] = []
        bodies = [{**ASKED, "model": "second", "stream": stream} for stream in (True, False)]
        threads = [
            threading.Thread(
                target=lambda b=body: waiting.append(server.post("/v1/completions", **b))
            )
            for body in bodies
        ]
        for one in threads:
            one.start()
        until(lambda: server.front.link.waiting == 2, "both wait")
        until(lambda: where(server)["second"] == "loading", "it is being loaded")
        told = server.completion(**ASKED, model="first")["choices"]
        assert told == wanted["first"] and not waiting, "others are answered meanwhile"
        library.opened.set()
        for one in threads:
            one.join()
        over.set()
        asking.join()
        whole, stream = sorted(
            waiting, key=lambda one: "event-stream" in one.headers["content-type"]
        )
        assert whole.json()["choices"] == wanted["second"]
        assert joined(chunks_of(stream.text)) == wanted["second"][0]["text"]
        assert library.loaded.count("second") == before + 1, "it was loaded once more"
        assert total(read(server), "everystep_model_loads", model_name="second") == before


def test_a_run_in_hands_keeps_its_model() -> None:
    with putting_away(IdleLimits(0.6)) as (server, library):
        asked = {"prompt": "hello", "max_tokens": 8, "model": "second", "seed": 1}
        run = server.post("/v1/everystep/runs", **asked).json()["id"]
        until(lambda: where(server)["first"] == "away", "the first goes")
        time.sleep(2.0)
        assert where(server)["second"] == "loaded"
        result = server.post(f"/v1/everystep/runs/{run}/result").json()["results"][0]["text"]
        model = tiny_llama(1, vocab_size=320, max_position_embeddings=4096)
        assert result == es.generate(model, TOKENIZER, "hello", max_new_tokens=8, seed=1)
        assert server.client.delete(f"/v1/everystep/runs/{run}").status_code == 200
        until(lambda: where(server)["second"] == "away", "it goes when the run has ended")
        until(lambda: library.held["second"]() is None, "nothing holds the model any more")
        before = library.loaded.count("second")
        assert server.post("/v1/everystep/runs", **asked).status_code == 200
        assert library.loaded.count("second") == before + 1


def test_a_request_waits_so_long_and_an_error_is_told() -> None:
    with putting_away(IdleLimits(0.5, load_seconds=0.3)) as (server, library):
        until(lambda: [*where(server).values()] == ["away", "away"], "both go")
        library.opened.clear()
        answer = server.post("/v1/completions", **ASKED, model="first")
        assert answer.status_code == 503 and "Retry-After" in answer.headers
        assert "takes too long to load" in answer.json()["error"]["message"]
        library.opened.set()
        until(lambda: where(server)["first"] == "loaded", "it comes nevertheless")
        library.error = OSError("/secret/path is gone")
        answer = server.post("/v1/everystep/score", texts="hello", model="second")
        assert answer.status_code == 503 and "cannot be loaded again" in answer.text
        assert "secret" not in answer.text
        library.error = None
        answer = server.post("/v1/everystep/score", texts="hello", model="second")
        assert answer.status_code == 200, "the next one has it tried again"
        assert (server.front.link.running, server.front.link.waiting) == (0, 0)


def test_clients_that_go_while_a_model_is_loaded_leave_nothing() -> None:
    with putting_away(IdleLimits(0.5)) as (server, library):
        until(lambda: where(server)["first"] == "away", "it goes")
        library.opened.clear()
        before = library.loaded.count("first")
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url) as client:
            client.post("/v1/completions", json={**ASKED, "model": "first"}, timeout=0.3)
        until(lambda: server.front.link.waiting == 0, "its place in line is given up")
        library.opened.set()
        until(lambda: where(server)["first"] == "away", "nobody asks, and it goes again")
        assert library.loaded.count("first") == before + 1


@needs_chromium
def test_the_page_says_where_models_are(tmp_path: Path) -> None:
    with Browser(tmp_path) as browser, putting_away(IdleLimits(0.5)) as (server, library):
        browser.visit(server.url, "document.querySelectorAll('#models tr').length === 2")
        cells = "[...document.querySelectorAll('#models .where')].map((one) => one.textContent)"
        browser.until(f"{cells}.join() === 'put away,put away'")
        library.opened.clear()
        asking = threading.Thread(target=server.completion, kwargs={**ASKED, "model": "second"})
        asking.start()
        browser.until(f"{cells}.join() === 'put away,being loaded'")
        library.opened.set()
        asking.join()
        assert browser.problems == []
        browser.visit("about:blank", "location.href === 'about:blank'")


# --- as a program ---------------------------------------------------------------------------------


def resident(process: int) -> int:
    """Bytes that a process has in memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(one.split()[1] for one in lines if one.startswith("VmRSS:"))) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process holds")
def test_the_memory_of_a_lone_model_is_given_back(tmp_path: Path) -> None:
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    model = tiny_llama(vocab_size=320, max_position_embeddings=4096, dtype=torch.float32, **size)
    wanted = es.generate(model, TOKENIZER, "hello the", max_new_tokens=4)
    idle = ("--port", "0", "--idle-minutes", "0.02")
    server = program(tmp_path, *idle, model=model)
    with server as (running, url), httpx.Client(base_url=url, timeout=60) as client:
        asked = {"prompt": "hello the", "max_tokens": 4}
        first = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        weights = (tmp_path / "tiny" / "model.safetensors").stat().st_size
        (engine,) = children_of(running.pid)
        held = resident(engine)
        until(lambda: client.get("/ready").json()["models"] == {"tiny": "away"}, "it goes")
        until(lambda: resident(engine) < held - 0.8 * weights, "its memory is given back")
        again = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        assert (first, again) == (wanted, wanted)
        assert 'everystep_model_loads{model_name="tiny"} 1.0' in client.get("/metrics").text


def test_the_setting_is_judged(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("idle_minutes = 5\nload_seconds = 20\n")
    assert read_settings(file, {}).idle() == IdleLimits(300.0, 20.0)
    assert read_settings(file, {"idle_minutes": 1.5}).idle() == IdleLimits(90.0, 20.0)
    assert read_settings(None, {}).idle() == IdleLimits(None, 300.0)
    for wrong in ({"idle_minutes": 0}, {"idle_minutes": -1.0}, {"load_seconds": 0}):
        with pytest.raises(RequestError, match="setting is impossible"):
            read_settings(None, wrong)
    with pytest.raises(RequestError, match="there are replicas"):
        read_settings(None, {"idle_minutes": 1, "replicas": 2}).require_possible()
