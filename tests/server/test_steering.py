"""Steering over HTTP is that of the library, row by row, and what is no vector is refused."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import everystep as es
from everystep.adapters import steering as steering_module
from everystep.api.model import LanguageModel
from everystep.errors import RequestError
from everystep.server.engine_process import EngineOrders, hosted
from everystep.server.fields import MOST_STEERED
from everystep.server.host import HostedModel
from everystep.server.link import ThreadMooring
from everystep.server.messages import Ask, ModelFacts
from everystep.server.ray.fan import session_of
from everystep.server.settings import read_settings
from everystep.server.wire_keywords import packed_steering
from everystep.testing.models import tiny_llama
from tests.server.serving import (
    LIMITS,
    TOKENIZER,
    TRIALS,
    Served,
    chunks_of,
    joined,
    served,
    tiny,
)
from tests.server.test_runs import RUNS, opened, plain, results_of, step_of

WIDTH = tiny().width
Wire = dict[str, list[float]]
ASKED: dict[str, Any] = {"max_new_tokens": 9, "seed": 4}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "guided": {"guidance_scale": 1.5, "negative_prompt": "of the"},
    "drafted": {"prompt_lookup_num_tokens": 3},
    "grammar": {"regex": "[a-z ]{3,9}"},
}


def drawn(seed: int, layers: tuple[int, ...] = (0,), width: int = WIDTH) -> dict[int, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {one: torch.randn(width, generator=made, dtype=torch.float64) * 4 for one in layers}


def on_wire(vectors: Mapping[int, Tensor]) -> Wire:
    return {str(layer): one.tolist() for layer, one in vectors.items()}


ONE, OTHER = drawn(1), drawn(2, (0, 1))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server whose operator has named vectors."""
    named = {"polite": ONE, "terse": OTHER}
    mooring = ThreadMooring(
        lambda: {"tiny": HostedModel(tiny(), TOKENIZER, LIMITS, trials=TRIALS, steering=named)},
        LIMITS,
    )
    with served(mooring) as one:
        yield one


@pytest.mark.parametrize("way", WAYS)
def test_rows_side_by_side_are_steered_as_by_the_library(server: Served, way: str) -> None:
    """Two with vectors of their own and a plain one, whole and streamed, at once."""
    asked = {**ASKED, **WAYS[way]}
    each: tuple[Any, ...] = (ONE, OTHER, None)
    wanted = []
    for steer in each:
        found = es.generate(tiny(), TOKENIZER, "hello the", **asked, steer=steer)
        wanted.append(found if isinstance(found, list) else [found])
    assert len({*map(str, wanted)}) == 3, "each of them is another text"
    bodies: list[dict[str, Any]] = [
        {"prompt": "hello the", **asked, "stream": streams, **({} if one is None else one)}
        for one in ({"steer": on_wire(ONE)}, {"steer": on_wire(OTHER)}, None)
        for streams in (False, True)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: server.post("/v1/completions", **body), bodies))
    for number, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        if number % 2:
            chunks = chunks_of(answer.text)
            texts = [joined(chunks, place) for place in range(len(wanted[number // 2]))]
        else:
            texts = [one["text"] for one in answer.json()["choices"]]
        assert texts == wanted[number // 2], bodies[number]


def test_every_wire_takes_it(server: Served) -> None:
    turns: Any = [{"role": "user", "content": "hello"}]
    wanted = es.chat(tiny(), TOKENIZER, turns, seed=5, max_new_tokens=9, steer=ONE)
    assert wanted != es.chat(tiny(), TOKENIZER, turns, seed=5, max_new_tokens=9)
    for steer in (on_wire(ONE), "polite"):
        own: dict[str, Any] = {"seed": 5, "steer": steer}
        chat = server.post("/v1/chat/completions", messages=turns, max_tokens=9, **own).json()
        assert chat["choices"][0]["message"]["content"] == wanted
        told = server.post("/v1/messages", messages=turns, max_tokens=9, **own).json()
        assert "".join(one.get("text", "") for one in told["content"]) == wanted
        items = server.post("/v1/responses", input="hello", max_output_tokens=9, **own).json()
        texts = [part["text"] for one in items["output"] for part in one.get("content", ())]
        assert "".join(texts) == wanted
        data = server.post("/v1/everystep/score", texts=["hello the"], steer=steer).json()["data"]
        score = es.score(tiny(), TOKENIZER, "hello the", steer=ONE)
        assert data[0]["logprobs"] == score.logprobs.tolist()
    bare = es.score(tiny(), TOKENIZER, "hello the")
    assert bare.logprobs.tolist() != score.logprobs.tolist()


def test_a_run_is_steered_saved_and_resumed(server: Served, tmp_path: Path) -> None:
    for steer, vectors in ((on_wire(OTHER), OTHER), ("polite", ONE)):
        run = es.open(tiny(), TOKENIZER, "hello", **ASKED, steer=vectors)
        with opened(server, prompt="hello", **ASKED, steer=steer) as id:
            steps = server.post(f"{RUNS}/{id}/step", steps=3, best=2).json()["steps"]
            assert steps == [plain(step_of(next(run))) for _ in range(3)]
            refused = server.post(f"{RUNS}/{id}/set", steer=steer)
            assert refused.status_code == 400 and "steer" in refused.json()["error"]["message"]
            saved = server.post(f"{RUNS}/{id}/save").content
        kind = {"content-type": "application/octet-stream"}
        again = server.client.post(f"{RUNS}/resume", content=saved, headers=kind)
        assert again.status_code == 200, again.text
        results = server.post(f"{RUNS}/{again.json()['id']}/result").json()["results"]
        assert results == results_of(run.result())
        assert server.client.delete(f"{RUNS}/{again.json()['id']}").status_code == 200


def test_a_saved_run_brings_no_more_than_a_request(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    es.open(tiny(), TOKENIZER, "hello", max_new_tokens=3, steer=OTHER).save(tmp_path / "run")
    monkeypatch.setattr("everystep.server.wire_keywords.MOST_STEERED", WIDTH)
    kind = {"content-type": "application/octet-stream"}
    data = (tmp_path / "run").read_bytes()
    answer = server.client.post(f"{RUNS}/resume", content=data, headers=kind)
    assert answer.status_code == 400 and "more than a request may bring" in answer.text


HUGE = [10**400, *[0] * (WIDTH - 1)]
FLAT = [0.0] * WIDTH


@pytest.mark.parametrize(
    ("steer", "said"),
    [
        ({}, "steer is impossible"),
        ([FLAT], "steer is impossible"),
        (3, "steer is impossible"),
        ("", "steer is impossible"),
        ("x" * 129, "steer is impossible"),
        ({str(one): [] for one in range(257)}, "steer is impossible"),
        ({"0": [0] * (MOST_STEERED + 1)}, "262144 numbers in all"),
        ("polit", "Perhaps you meant polite"),
        ({"-1": FLAT}, "a layer that the model does not have"),
        ({"2": FLAT}, "wanted 0 to 1, as a text; got 2"),
        ({"00": FLAT}, "a layer that the model does not have"),
        ({"one": FLAT}, "a layer that the model does not have"),
        ({"9" * 5000: FLAT}, "a layer that the model does not have"),
        ({"0": FLAT[1:]}, f"wanted {WIDTH} numbers, as many as its hidden states have; got"),
        ({"0": [FLAT]}, "steer[0] does not fit the model"),
        ({"0": {"0": 1.0}}, "steer[0] does not fit the model"),
        ({"1": None}, "steer[1] does not fit the model"),
        ({"0": [*FLAT[1:], None]}, f"steer[0][{WIDTH - 1}] is impossible; wanted a finite number"),
        ({"0": [True, *FLAT[1:]]}, "steer[0][0] is impossible"),
        ({"0": ["1", *FLAT[1:]]}, "steer[0][0] is impossible"),
        ({"0": HUGE}, "steer[0][0] is impossible"),
    ],
)
def test_what_is_no_vector_is_refused(server: Served, steer: Any, said: str) -> None:
    paths: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hello", "max_tokens": 2},
        "/v1/everystep/score": {"texts": "hello"},
        RUNS: {"prompt": "hello"},
    }
    for path, body in paths.items():
        answer = server.post(path, **body, steer=steer)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert said in error["message"], error
        assert error["param"].startswith("steer") and len(answer.content) < 4096


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none_are_refused(server: Served, number: str) -> None:
    vector = ", ".join([number, *map(str, FLAT[1:])])
    body = f'{{"prompt": "hello", "max_tokens": 2, "steer": {{"0": [{vector}]}}}}'
    headers = {"content-type": "application/json"}
    answer = server.client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400, answer.text


def test_what_the_models_type_cannot_hold_is_refused() -> None:
    model = tiny_llama(vocab_size=320, dtype=torch.float32)
    vector = {0: torch.full((model.width,), 1e300, dtype=torch.float64)}
    with pytest.raises(RequestError, match=r"got one that is not finite in torch\.float32"):
        es.generate(model, TOKENIZER, "hello", steer=vector)


def facts(**more: Any) -> ModelFacts:
    return ModelFacts("tiny", [], [], 64, 320, "torch", **more)


def test_a_model_that_cannot_be_steered_says_so() -> None:
    with pytest.raises(RequestError, match="steer adds to the layers of a decoder, and tiny is"):
        packed_steering({"0": [0.0]}, facts())
    with pytest.raises(RequestError, match="as none have a name here"):
        packed_steering("polite", facts(layers=1, width=1))
    assert packed_steering({"0": [0.5]}, facts(layers=1, width=1)) == {
        "0": b"\0\0\0\0\0\0\xe0\x3f",
    }


def test_replicas_are_chosen_by_it() -> None:
    def session(**keywords: Any) -> str | None:
        return session_of(Ask(1, "tiny", [1, 2, 3], keywords), 2)

    one, other = ({"steer": {"0": bytes([n] * 8)}} for n in (1, 2))
    assert session(**one) == session(**one)
    assert len({session(**one), session(**other), session(), session(adapters={"a": 1.0})}) == 4


def test_no_steering_is_left_when_requests_are_over() -> None:
    """Not that of strangers; the rows of a cache are found by it meanwhile."""
    model = LanguageModel(tiny_llama(vocab_size=320, dtype=torch.float32).core)
    before = {*steering_module._KNOWN}
    mooring = ThreadMooring(
        lambda: {
            "tiny": HostedModel(model, TOKENIZER, LIMITS, trials=TRIALS, steering={"own": ONE})
        },
        LIMITS,
    )
    with served(mooring) as server:
        prompt = "hello the and of " * 8
        for number in range(12):
            body = {"prompt": prompt, "max_tokens": 3, "steer": on_wire(drawn(number))}
            answers = [server.completion(**body) for _ in range(2)]
            cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers]
            assert cached[0] == 0 and cached[1] > 0
        server.completion(prompt=prompt, max_tokens=3, steer="own")
        deadline = time.monotonic() + 30
        while len(left := {*steering_module._KNOWN} - before) > 1 and time.monotonic() < deadline:
            gc.collect()
        assert len(left) == 1, "the operator's own"


def test_an_operator_names_vectors_in_files(folder: Path, tmp_path: Path) -> None:
    save_file({"0": ONE[0]}, tmp_path / "polite.safetensors")
    lines = f'[steer]\npolite = "{tmp_path / "polite.safetensors"}"\n'
    (tmp_path / "serve.toml").write_text(lines)
    read = read_settings(tmp_path / "serve.toml", {})
    assert read.orders({"tiny": "x"}).steer == {"polite": str(tmp_path / "polite.safetensors")}
    orders = EngineOrders({"tiny": str(folder)}, steer=read.orders({}).steer)
    (one,) = hosted(orders).values()
    (vectors,) = one.steering.values()
    assert [*vectors] == [0] and bool((vectors[0] == ONE[0]).all())
    assert one.facts("tiny").steering == ["polite"]
    one.close()
    with pytest.raises(RequestError, match="does not fit the model"):
        HostedModel(tiny(), TOKENIZER, LIMITS, trials=TRIALS, steering={"a": {0: torch.ones(3)}})


def test_names_are_told(server: Served) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["steering"] == ["polite", "terse"]
