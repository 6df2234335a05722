"""Runs over HTTP are the runs of `everystep.open`: step by step, verb by verb, to the bit."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import EverystepError
from everystep.server.access import Keys, digest_of
from everystep.server.application import FrontSettings
from everystep.server.live_runs import LiveRuns, RunLimits
from everystep.server.service import ServedBeside
from tests.server.serving import TOKENIZER, Served, chunks_of, served, tiny
from tests.server.test_engine_dies import one_server, wait_ready  # noqa: F401

RUNS = "/v1/everystep/runs"
VERBS = (
    *("step", "step", "step", "send", "edit", "rewind"),
    *("set", "fork", "explain", "save"),
)
WORDS = ("hello", " the", " and of", "ü", " it was\n", "0.5")
STRATEGIES: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2},
    {"do_sample": True, "temperature": 1.4, "logprobs": 2},
    {"do_sample": True, "mirostat_tau": 3.0},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"prompt_lookup_num_tokens": 3},
    {"do_sample": True, "num_return_sequences": 3},
    {"num_beams": 3, "num_return_sequences": 2},
    {"regex": "[ab]{4,20}", "do_sample": True},
    {"logit_bias": {"90": 4.0}, "stop_strings": ["e", " th"]},
)


# --- both sides of a comparison -------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value as JSON has it: what is no number is null."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finish(reason: Any) -> Any:
    return None if reason is None else {"kind": reason.kind, "matched": reason.matched}


def step_of(step: es.Step) -> Any:
    events = [
        {
            **{name: getattr(one, name) for name in ("index", "position", "token", "text")},
            "logprob": one.logprob,
            "top_logprobs": one.top_logprobs,
            "finish": finish(one.finish),
        }
        for one in step.events
    ]
    names = ("parent", "index", "tokens", "score")
    branches = [
        {**{name: getattr(one, name) for name in names}, "finish": finish(one.finish)}
        for one in step.branches
    ]
    beams = [{"tokens": one.tokens, "text": one.text, "score": one.score} for one in step.beams]
    found = {"number": step.number, "tokens": step.tokens, "text": step.text}
    found |= {"finish": finish(step.finish), "events": events, "beams": beams}
    best = []
    if step.scores is not None and step.logits is not None:
        for logits, scores in zip(step.logits, step.scores, strict=True):
            ids = scores.topk(2).indices.tolist()
            kept = [id for id in ids if scores[id] > -math.inf]
            best.append(
                [{"id": i, "logit": float(logits[i]), "score": float(scores[i])} for i in kept]
            )
    return plain({**found, "branches": branches, "best": best})


def state_of(run: es.Run) -> Any:
    text = TOKENIZER.decode(list(run.tokens), skip_special_tokens=True)
    return plain({"tokens": run.tokens, "text": text, "given": run.given, "done": run.done})


def likelihoods(found: Any) -> Any:
    if found is None:
        return None
    names = ("tokens", "logprobs", "top_tokens", "top_logprobs")
    return {name: getattr(found, name) for name in names}


def results_of(found: Any) -> Any:
    results = found if isinstance(found, list) else [found]
    return plain(
        [
            {
                **{name: getattr(one, name) for name in ("text", "tokens", "score")},
                "finish": finish(one.finish_reason),
                "prompt_tokens": one.prompt_tokens,
                "logprobs": likelihoods(one.logprobs),
                "prompt_logprobs": likelihoods(one.prompt_logprobs),
            }
            for one in results
        ]
    )


def explained(why: es.Explanation) -> Any:
    found: dict[str, Any] = {"position": why.position, "given": why.given}
    found |= {"chosen": why.chosen._asdict(), "rivals": [one._asdict() for one in why.rivals]}
    found["effects"] = [one._asdict() for one in why.effects]
    return plain({**found, "draw": why.draw and why.draw._asdict()})


class Pair:
    """A run over HTTP and one in the process, to which the same is done."""

    def __init__(self, server: Served, id: str, run: es.Run) -> None:
        self.server, self.id, self.run = server, id, run

    def post(self, verb: str, **body: Any) -> Any:
        return self.server.post(f"{RUNS}/{self.id}/{verb}", **body)

    def require_alike(self, answer: Any, act: Any) -> Any:
        """Both do it, or both refuse it with one text; what the process gives is the value."""
        try:
            found = act()
        except EverystepError as error:
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"] == str(error)
            return None
        assert answer.status_code == 200, answer.text
        return found

    def require_state(self) -> None:
        shown = self.server.client.get(f"{RUNS}/{self.id}").json()
        assert {name: shown[name] for name in ("tokens", "text", "given", "done")} == state_of(
            self.run
        )

    def step(self, count: int) -> None:
        answer = self.post("step", steps=count, best=2)
        steps: list[Any] = []

        def act() -> Any:
            for _ in range(count):
                if (one := next(self.run, None)) is None:
                    break
                steps.append(step_of(one))
            return True

        if self.require_alike(answer, act):
            assert answer.json()["steps"] == steps


def acted(pair: Pair, rng: random.Random) -> Pair | None:
    """Do something to both; a pair where that made another."""
    run, length = pair.run, len(pair.run.tokens)
    verb = rng.choice(VERBS)
    if verb == "step":
        pair.step(rng.randint(1, 4))
    elif verb == "send":
        text = rng.choice(WORDS)
        body = {"text": text} if rng.random() < 0.7 else {"ids": rng.choices(range(5, 300), k=2)}
        pair.require_alike(pair.post("send", **body), lambda: run.send(body.get("ids", text)))
    elif verb == "edit":
        place, ids = rng.randint(0, max(length, 1)), rng.choices(range(5, 300), k=2)
        answer = pair.post("edit", position=place, ids=ids)
        pair.require_alike(answer, lambda: run.edit(place, ids))
    elif verb == "rewind":
        n = rng.randint(0, length + 1)
        pair.require_alike(pair.post("rewind", n=n), lambda: run.rewind(n))
    elif verb == "set":
        changes: dict[str, Any] = rng.choice(
            [{"do_sample": True, "top_k": 7}, {"seed": 9}, {"max_new_tokens": 20}, {"num_beams": 2}]
        )
        pair.require_alike(pair.post("set", **changes), lambda: run.set(**changes))
    elif verb == "fork":
        changes = rng.choice([{}, {"seed": rng.randint(0, 99)}])
        answer = pair.post("fork", **changes)
        twin = pair.require_alike(answer, lambda: run.fork(**changes))
        return None if twin is None else Pair(pair.server, answer.json()["id"], twin)
    elif verb == "explain":
        place = rng.randint(-length, length)
        answer = pair.post("explain", position=place, rivals=3)
        why = pair.require_alike(answer, lambda: run.explain(place, 3))
        assert why is None or answer.json() == explained(why)
    elif verb == "save":
        saved = pair.post("save")
        assert saved.status_code == 200, saved.text
        kind = {"content-type": "application/octet-stream"}
        again = pair.server.client.post(f"{RUNS}/resume", content=saved.content, headers=kind)
        assert again.status_code == 200, again.text
        assert pair.server.client.delete(f"{RUNS}/{pair.id}").status_code == 200
        pair.id = again.json()["id"]
    return None


def require_same_script(server: Served, seed: int) -> None:
    rng = random.Random(seed)
    asked = {**rng.choice(STRATEGIES), "max_new_tokens": rng.randint(4, 14), "seed": seed}
    prompt = "".join(rng.choices(WORDS, k=rng.randint(1, 4)))
    given = {**asked}
    if "stop_strings" in given:
        given["trim_stop_strings"] = True
    if "logit_bias" in given:
        given["logit_bias"] = {int(id): bias for id, bias in given["logit_bias"].items()}
    answer = server.post(RUNS, prompt=prompt, **asked)
    assert answer.status_code == 200, answer.text
    pairs = [Pair(server, answer.json()["id"], es.open(tiny(), TOKENIZER, prompt, **given))]
    for _ in range(rng.randint(3, 12)):
        pair = rng.choice(pairs)
        if (twin := acted(pair, rng)) is not None and len(pairs) < 3:
            pairs.append(twin)
        elif twin is not None:
            server.client.delete(f"{RUNS}/{twin.id}")
        pair.require_state()
    for pair in pairs:
        answer = pair.post("result")
        wanted = pair.require_alike(answer, pair.run.result)
        assert wanted is None or answer.json()["results"] == results_of(wanted)
        assert server.client.delete(f"{RUNS}/{pair.id}").status_code == 200
    assert server.client.get(RUNS).json()["data"] == []


@pytest.mark.filterwarnings("ignore")
def test_random_scripts_of_verbs(server: Served) -> None:
    for seed in range(40):
        require_same_script(server, seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_thousand_random_scripts(server: Served) -> None:
    for seed in range(40, 1000):
        require_same_script(server, seed)


# --- verbs that scripts do not say ----------------------------------------------------------------


@contextmanager
def opened(server: Served, headers: Any = None, **body: Any) -> Iterator[str]:
    answer = server.client.post(RUNS, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    yield answer.json()["id"]
    server.client.delete(f"{RUNS}/{answer.json()['id']}", headers=headers)


def test_steps_come_one_by_one(server: Served) -> None:
    run = es.open(tiny(), TOKENIZER, "hello", max_new_tokens=5, eos_token_id=None)
    with opened(server, prompt="hello", max_tokens=5, ignore_eos=True) as id:
        body = server.post(f"{RUNS}/{id}/step", steps=9, best=2, stream=True)
        *steps, last = chunks_of(body.text)
        for one in steps:
            assert one.pop("object") == "everystep.step"
        assert steps == [step_of(one) for one in run]
        assert last["id"] == id and last["tokens"] == list(run.tokens) and last["done"]


def test_more_of_a_search_and_a_conversation(server: Served) -> None:
    asked: Any = {"max_new_tokens": 6, "num_beams": 3, "seed": 1}
    run = es.open(tiny(), TOKENIZER, "hello", **asked)
    with opened(server, prompt="hello", **asked) as id:
        for n in (2, 3):
            answer = server.post(f"{RUNS}/{id}/more", n=n)
            assert answer.status_code == 200, answer.text
            assert answer.json()["results"] == results_of(run.more(n))
    messages: Any = [{"role": "user", "content": "hello"}]
    run = es.open(tiny(), TOKENIZER, messages, max_new_tokens=6, seed=2)
    with opened(server, messages=messages, max_tokens=6, seed=2) as id:
        assert server.post(f"{RUNS}/{id}/result").json()["results"] == results_of(run.result())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "one of prompt and messages"),
        ({"prompt": "x", "stream": True}, "stream has no place in a run"),
        ({"prompt": "x", "tools": [{}]}, "tools has no place in a run"),
        ({"prompt": "x", "max_token": 3}, "max_tokens"),
        ({"prompt": "x", "stopping_criteria": ["a"]}, "is code"),
        ({"prompt": "x", "logits_processor": ["a"]}, "names a processor that there is not"),
        ({"prompt": [400]}, "beyond the vocabulary"),
        ({"prompt": "x", "add_generation_prompt": False}, "no effect"),
        ({"prompt": "x", "max_tokens": 10_000}, "longer than the model's context"),
    ],
)
def test_what_cannot_be_opened(server: Served, body: Any, said: str) -> None:
    answer = server.post(RUNS, **body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert server.client.get(RUNS).json()["data"] == []


def test_what_cannot_be_done(server: Served) -> None:
    with opened(server, prompt="hello", max_tokens=5) as id:
        for verb, body, said in (
            ("step", {"steps": 0}, "steps is impossible"),
            ("step", {"step": 1}, "Perhaps you meant steps"),
            ("send", {}, "one of text and ids"),
            ("send", {"ids": [99999]}, "no ids to send"),
            ("edit", {"ids": [5]}, "position is missing"),
            ("more", {}, "only a beam search"),
            ("set", {"hooks": []}, "cannot change while a run is under way"),
            ("set", {"tools": []}, "no field"),
        ):
            answer = server.post(f"{RUNS}/{id}/{verb}", **body)
            assert answer.status_code == 400 and said in answer.text, (verb, answer.text)
        assert server.post(f"{RUNS}/{id}/nothing").status_code == 404
    for path in (f"{RUNS}/run_none/step", f"{RUNS}/{id}/step"):
        answer = server.post(path)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "run_not_found"


def test_only_saved_runs_are_resumed(server: Served, tmp_path: Path) -> None:
    kind = {"content-type": "application/octet-stream"}

    def resumed(content: bytes) -> Any:
        return server.client.post(f"{RUNS}/resume", content=content, headers=kind)

    with opened(server, prompt="hello", max_tokens=5) as id:
        saved = server.post(f"{RUNS}/{id}/save").content
    for content in (b"", b"x" * 100, saved[:-9], saved[:-1] + b"\x7f"):
        answer = resumed(content)
        assert answer.status_code == 400 and len(answer.content) < 3000
        assert "/tmp" not in answer.text
    run = es.open(tiny(), TOKENIZER, "hello", num_beams=100, max_new_tokens=3)
    run.save(tmp_path / "wide")
    answer = resumed((tmp_path / "wide").read_bytes())
    assert answer.status_code == 400 and "num_beams is impossible" in answer.text
    es.open(tiny(), TOKENIZER, "hello", output_scores=True).save(tmp_path / "scores")
    assert "no request can have" in resumed((tmp_path / "scores").read_bytes()).text
    assert server.client.get(RUNS).json()["data"] == []


# --- whose, how many, how long --------------------------------------------------------------------


def test_a_run_belongs_to_its_key_and_there_are_so_many() -> None:
    settings = FrontSettings(keys=Keys([digest_of("a"), digest_of("b")]))
    beside = ServedBeside(runs=RunLimits(per_key=2, total=3))
    mine, other = ({"Authorization": f"Bearer {key}"} for key in "ab")
    hello: Any = {"prompt": "hello", "max_tokens": 3}
    with (
        served(settings=settings, beside=beside) as server,
        opened(server, mine, **hello) as id,
        opened(server, mine, **hello),
    ):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/step"), ("POST", "/save")):
            body = {} if method == "POST" else None
            asked = server.client.request(method, f"{RUNS}/{id}{path}", json=body, headers=other)
            assert asked.status_code == 404, path
        assert server.client.get(RUNS, headers=other).json()["data"] == []
        full = server.client.post(RUNS, json=hello, headers=mine)
        assert full.status_code == 429 and "at most 2" in full.text and full.headers["retry-after"]
        forked = server.client.post(f"{RUNS}/{id}/fork", json={}, headers=mine)
        assert forked.status_code == 429, "a fork is a run too"
        with opened(server, other, **hello):
            full = server.client.post(RUNS, json=hello, headers=other)
            assert full.status_code == 429 and "at most 3" in full.text


def test_a_run_that_is_left_alone_ends() -> None:
    beside = ServedBeside(runs=RunLimits(idle_seconds=0.4))
    with served(beside=beside) as server:
        left = server.post(RUNS, prompt="hello", max_tokens=3).json()["id"]
        used = server.post(RUNS, prompt="hello", max_tokens=3).json()["id"]
        deadline = time.monotonic() + 30
        while len(server.client.get(RUNS).json()["data"]) > 1 and time.monotonic() < deadline:
            server.client.get(f"{RUNS}/{used}")
            time.sleep(0.02)
        assert [one["id"] for one in server.client.get(RUNS).json()["data"]] == [used]
        assert server.post(f"{RUNS}/{left}/step").status_code == 404


def test_a_clock_and_a_death_of_the_engine_end_runs() -> None:
    now, engine = 0.0, 0
    runs = LiveRuns(RunLimits(idle_seconds=10), lambda: engine, lambda: now)
    to: Any = None
    one, two = runs.add("a", to), runs.add("a", to)
    runs.free(one)
    now = 11.0
    assert runs.expired() == [one], "the other one is at work"
    runs.free(two)
    assert runs.expired() == [] and runs.find("a", two.id) is two
    engine = 1
    assert runs.listed("a") == []


def test_two_verbs_at_once_are_a_conflict(server: Served) -> None:
    body = {"steps": 3000, "stream": True}
    with (
        opened(server, prompt="hello", max_tokens=3000, ignore_eos=True) as id,
        opened(server, prompt="hello", max_tokens=3) as other,
        server.client.stream("POST", f"{RUNS}/{id}/step", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        conflict = server.post(f"{RUNS}/{id}/rewind")
        assert conflict.status_code == 409 and conflict.json()["error"]["code"] == "run_busy"
        assert server.post(f"{RUNS}/{other}/result").status_code == 200
        looked = server.client.get(f"{RUNS}/{id}").json()
        assert 0 < len(looked["tokens"]) < 3000, "a long run keeps no other waiting"
    # The client has left: the run is as far as it came, and nobody steps it.
    deadline = time.monotonic() + 30
    while server.front.open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.front.open == 0


def test_runs_end_with_their_engine(one_server: Served) -> None:  # noqa: F811
    wait_ready(one_server)
    id = one_server.post(RUNS, prompt="hello", max_tokens=3000, ignore_eos=True).json()["id"]
    lines: list[str] = []
    body = {"steps": 3000, "stream": True}
    with one_server.client.stream("POST", f"{RUNS}/{id}/step", json=body) as answer:
        for number, line in enumerate(answer.iter_lines()):
            lines.append(line)
            if number == 10:
                process = one_server.front.link.process
                assert process is not None
                os.kill(process, 9)
    told = [json.loads(one.removeprefix("data: ")) for one in lines if one.startswith("data: {")]
    assert "error" in told[-1] and "data: [DONE]" not in lines
    wait_ready(one_server)
    assert one_server.client.get(f"{RUNS}/{id}").status_code == 404
    with opened(one_server, prompt="hello", max_tokens=3) as again:
        assert one_server.post(f"{RUNS}/{again}/result").status_code == 200
