"""What /metrics counts: each request once, by model, and by vLLM's names where that is wanted."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from everystep.server.exchange import FrontSettings
from tests.server.serving import Served, served

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
        ("request_params_n", 4),
        ("time_to_first_token_seconds", 1),
        ("request_prefill_time_seconds", 1),
        ("request_decode_time_seconds", 1),
        ("inter_token_latency_seconds", 5),
    ):
        assert total(found, f"everystep_{name}_count", **model) == count, name
    assert total(found, "everystep_request_generation_tokens_sum") == 24
    assert total(found, "everystep_request_success_total", finished_reason="length") == 4
    whole = total(found, "everystep_e2e_request_latency_seconds_sum")
    parts = ("request_queue_time_seconds", "request_inference_time_seconds")
    assert math.isclose(whole, sum(total(found, f"everystep_{one}_sum") for one in parts))
    assert total(found, "everystep_http_responses_total", status="400") == 1
    assert not any(name.startswith("vllm") for name, _ in found)


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


def test_models_that_nobody_has_make_no_series(server: Served) -> None:
    read(server)  # which is the first with its status, perhaps
    server.post("/v1/completions", model="nobody", prompt="x")
    before = len(read(server))
    for number in range(30):
        server.post("/v1/completions", model=f"nobody-{number}", prompt="x")
    assert len(read(server)) == before
