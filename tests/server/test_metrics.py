"""What /metrics counts: each request once, by model, and by vLLM's names where that is wanted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from everystep.server.exchange import FrontSettings
from everystep.server.host import EngineLimits, HostedModel
from tests.server.serving import TOKENIZER, TRIALS, MortalMooring, Served, served, tiny

ASKED: dict[str, Any] = {"prompt": "hello the", "max_tokens": 6, "ignore_eos": True}


def read(server: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels."""
    text = server.client.get("/metrics").text
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def total(found: dict[Any, float], name: str, **labels: str) -> float:
    """The sum of samples that have these labels."""
    wanted = set(labels.items())
    return sum(value for (own, has), value in found.items() if own == name and wanted <= set(has))


def test_each_request_is_counted_once() -> None:
    with served() as server:
        server.completion(**ASKED)
        server.completion(**ASKED, n=2, temperature=1.0, seed=1)
        server.post("/v1/completions", **ASKED, stream=True)
        server.post("/v1/embeddings", input="hello")
        server.post("/v1/completions", prompt="hello", max_tokens=0)
        found = read(server)
    model = {"model_name": "tiny"}
    assert total(found, "everystep_generation_tokens_total", **model) == 6 + 12 + 6
    for name, count in (
        ("e2e_request_latency_seconds", 4),
        ("request_queue_time_seconds", 4),
        ("request_inference_time_seconds", 4),
        ("request_generation_tokens", 4),
        ("request_max_num_generation_tokens", 4),
        ("request_prefill_kv_computed_tokens", 4),
        ("request_params_n", 4),
        ("time_to_first_token_seconds", 1),
        ("request_prefill_time_seconds", 1),
        ("request_decode_time_seconds", 1),
        ("inter_token_latency_seconds", 5),
    ):
        assert total(found, f"everystep_{name}_count", **model) == count, name
    assert total(found, "everystep_request_generation_tokens_sum") == 24
    assert total(found, "everystep_request_max_num_generation_tokens_sum") == 6 + 6 + 6
    computed = total(found, "everystep_request_prefill_kv_computed_tokens_sum")
    prompts = total(found, "everystep_request_prompt_tokens_sum")
    cached = total(found, "everystep_prompt_tokens_cached_total")
    assert computed == prompts - cached > 0
    assert total(found, "everystep_request_success_total", finished_reason="length") == 4
    whole = total(found, "everystep_e2e_request_latency_seconds_sum")
    parts = ("request_queue_time_seconds", "request_inference_time_seconds")
    assert math.isclose(whole, sum(total(found, f"everystep_{one}_sum") for one in parts))
    assert total(found, "everystep_http_responses_total", status="400") == 1
    assert not any(name.startswith("vllm") for name, _ in found)


def test_tokens_that_a_cache_held_are_not_computed() -> None:
    asked = {**ASKED, "prompt": "hello the cat and the dog and the sea " * 8}
    with served() as server:
        for _ in range(3):
            server.completion(**asked)
        found = read(server)
    own = "everystep_request_prefill_kv_computed_tokens"
    assert total(found, f"{own}_count") == 3
    cached = total(found, "everystep_prompt_tokens_cached_total")
    prompts = total(found, "everystep_request_prompt_tokens_sum")
    assert cached > 0 and total(found, f"{own}_sum") == prompts - cached


VLLM_BOARD = (
    *("e2e_request_latency_seconds_bucket", "prompt_tokens_total", "generation_tokens_total"),
    *("inter_token_latency_seconds_bucket", "num_requests_running", "num_requests_waiting"),
    *("time_to_first_token_seconds_bucket", "kv_cache_usage_perc", "request_success_total"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
)
"""What the panels of vLLM's dashboard for Grafana show, but for the prefix `vllm:`."""


def test_each_panel_of_vllm_s_dashboard_has_its_series() -> None:
    with crowded(EngineLimits()) as (server, _, _):
        server.post("/v1/completions", **ASKED, stream=True)
        wanted = {f"vllm:{name}" for name in VLLM_BOARD}
        while missing := wanted - {name for name, _ in read(server)}:  # told twice a second
            assert missing == {"vllm:kv_cache_usage_perc"}
            time.sleep(0.05)


def test_names_of_vllm_say_the_same() -> None:
    with served(settings=FrontSettings(vllm_metrics=True)) as server:
        server.post("/v1/completions", **ASKED, stream=True)
        server.completion(**ASKED)
        found = read(server)
    theirs = {key: value for key, value in found.items() if key[0].startswith("vllm:")}
    also = {"prefix_cache_queries": "prompt_tokens", "prefix_cache_hits": "prompt_tokens_cached"}
    for (name, labels), value in theirs.items():
        assert ("engine", "0") in labels and ("model_name", "tiny") in labels
        own = name.removeprefix("vllm:")
        for other, ours in also.items():
            own = own.replace(other, ours)
        rest = tuple(one for one in labels if one[0] != "engine")
        assert found[f"everystep_{own}", rest] == value
    names = {name for name, _ in theirs}
    assert names >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_prompt_tokens_bucket",
        "vllm:request_params_max_tokens_bucket",
    }
    assert total(found, "vllm:request_success_total", finished_reason="length") == 2


VLLM_BUCKETS = {
    "time_to_first_token_seconds": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    "inter_token_latency_seconds": (0.01, 0.025, 0.05, 0.075, 0.1),
}
"""Bounds up to a tenth of a second, as vLLM has them."""


def test_buckets_are_finer_than_those_of_vllm(server: Served) -> None:
    """Where small models on a processor are: most of their steps are in the first one of theirs."""
    server.post("/v1/completions", **ASKED, stream=True)
    found = read(server)
    for name, theirs in VLLM_BUCKETS.items():
        every = (dict(labels)["le"] for own, labels in found if own == f"everystep_{name}_bucket")
        ours = [bound for bound in map(float, every) if bound <= 0.01]
        assert len(ours) > len([bound for bound in theirs if bound <= 0.01]), name
    assert min(ours) < 0.001, "of a step that takes a millisecond"


# --- what the engine counts -----------------------------------------------------------------------

COUNTED = {
    "num_preemptions_total": "preemptions",
    "spec_decode_num_draft_tokens_total": "drafted",
    "spec_decode_num_accepted_tokens_total": "accepted",
}


@contextmanager
def crowded(limits: EngineLimits) -> Iterator[tuple[Served, MortalMooring, list[HostedModel]]]:
    """A server with its engines, the last one last."""
    engines: list[HostedModel] = []

    def models() -> dict[str, HostedModel]:
        engines.append(HostedModel(tiny(), TOKENIZER, limits, trials=TRIALS))
        return {"tiny": engines[-1]}

    settings = FrontSettings(vllm_metrics=True)
    mooring = MortalMooring(models, limits)
    with served(mooring, settings) as server:
        yield server, mooring, engines


def counts_of(engine: HostedModel) -> dict[str, int]:
    """What the engine itself has counted."""
    every = [one.engine.counts for one in engine.desk.drivers]
    return {name: sum(getattr(one, own) for one in every) for name, own in COUNTED.items()}


def counted(server: Served) -> dict[str, float]:
    """What the server says of that, by both names."""
    found = read(server)
    ours = {name: total(found, f"everystep_{name}", model_name="tiny") for name in COUNTED}
    assert ours == {name: total(found, f"vllm:{name}", model_name="tiny") for name in COUNTED}
    return ours


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_drafts_and_preemptions_are_those_of_the_engine() -> None:
    limits = EngineLimits(max_rows=16, max_positions=120)
    drafted = {"prompt": "the hello the hello", "max_tokens": 40, "ignore_eos": True}
    drafted |= {"prompt_lookup_num_tokens": 3, "logit_bias": {"90": 50.0}}  # says one token only
    with crowded(limits) as (server, mooring, engines):
        first = server.completion(**drafted, return_token_ids=True)["choices"][0]["token_ids"]
        alone = counts_of(engines[0])
        steps = [one.engine.counts.steps for one in engines[0].desk.drivers]
        assert alone["spec_decode_num_accepted_tokens_total"] == len(first) - sum(steps) > 0
        assert alone["num_preemptions_total"] == 0
        until(lambda: counted(server) == alone)
        bodies = [{**ASKED, "max_tokens": 60, "prompt": "hello " * n} for n in (1, 3, 5, 7)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda body: server.completion(**body), bodies))
        before = counts_of(engines[0])
        assert before["num_preemptions_total"] > 0
        until(lambda: counted(server) == before)
        mooring.die()
        mooring.let.set()
        until(lambda: len(engines) == 2 and server.front.link.ready)
        server.completion(**drafted)
        own = counts_of(engines[1])
        assert own["num_preemptions_total"] == 0, "the next engine begins at nothing"
        assert own["spec_decode_num_accepted_tokens_total"] > 0
        until(lambda: counted(server) == {name: before[name] + own[name] for name in COUNTED})


@pytest.mark.parametrize(("positions", "parts"), [(None, 2 / 16), (4000, None)])
def test_the_use_of_the_cache_is_told(positions: int | None, parts: float | None) -> None:
    with crowded(EngineLimits(max_rows=16, max_positions=positions)) as (server, _, _):

        def usage() -> float:
            found = read(server)
            ours = total(found, "everystep_kv_cache_usage_perc", model_name="tiny")
            assert ours == total(found, "vllm:kv_cache_usage_perc", model_name="tiny")
            return ours

        server.completion(**ASKED)
        body = {**ASKED, "max_tokens": 3900, "n": 2, "temperature": 1.0, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # which ends the stream when nobody has it any more
            next(lines)
            until(lambda: usage() > 0)
            seen = usage()
            if parts is not None:
                assert seen == parts, "two rows of sixteen"
            else:
                assert 0 < seen <= 1
        until(lambda: usage() == 0)


def test_models_that_nobody_has_make_no_series(server: Served) -> None:
    read(server)  # which is the first with its status, perhaps
    server.post("/v1/completions", model="nobody", prompt="x")
    before = len(read(server))
    for number in range(30):
        server.post("/v1/completions", model=f"nobody-{number}", prompt="x")
    assert len(read(server)) == before
