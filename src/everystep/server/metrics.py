"""Counters and histograms of a server, by vLLM's names after `everystep_`."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

_FIRST = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5,
    10,
    40,
    160,
)
_BETWEEN = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1, 5)
_WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Everything that /metrics shows. Labels hold names of models, never what a client wrote."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ("model_name",)
        self.running = _gauge(registry, "num_requests_running", "Asks that the engine works on.")
        self.waiting = _gauge(registry, "num_requests_waiting", "Asks that wait for the engine.")
        self.ready = _gauge(registry, "engine_ready", "1 while the engine takes asks.")
        self.restarts = _gauge(
            registry, "engine_restarts", "How often the engine was started again."
        )
        self.prompt = Counter("everystep_prompt_tokens", "Prompt.", labels, registry=registry)
        self.cached = Counter(
            "everystep_prompt_tokens_cached", "Cached.", labels, registry=registry
        )
        self.generated = Counter("everystep_generation_tokens", "New.", labels, registry=registry)
        self.answers = Counter(
            "everystep_http_responses", "Answers by status.", ("status",), registry=registry
        )
        self.rejections = Counter(
            "everystep_admission_rejections", "Requests refused for load.", registry=registry
        )
        self.left = Counter("everystep_requests_left", "Clients that went away.", registry=registry)
        self.first = Histogram(
            "everystep_time_to_first_token_seconds",
            "First token.",
            registry=registry,
            buckets=_FIRST,
        )
        self.between = Histogram(
            "everystep_inter_token_latency_seconds", "Between.", registry=registry, buckets=_BETWEEN
        )
        self.whole = Histogram(
            "everystep_e2e_request_latency_seconds", "Whole.", registry=registry, buckets=_WHOLE
        )

    def shown(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry)


def _gauge(registry: CollectorRegistry, name: str, line: str) -> Gauge:
    return Gauge(f"everystep_{name}", line, registry=registry)
