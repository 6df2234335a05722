"""Counters and histograms of a server, by vLLM's names after `everystep_`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from everystep.server.link import News
from everystep.server.messages import Begun, EngineTally, Over, RowNews

_WAITS = (
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
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20, 50)
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Seconds to the first token of a stream.", _WAITS),
    "inter_token_latency_seconds": ("Seconds between two tokens of a sequence.", _BETWEEN),
    "request_time_per_output_token_seconds": ("Their mean, of a stream.", _BETWEEN),
    "e2e_request_latency_seconds": ("Seconds that a prompt took in all.", _WHOLE),
    "request_queue_time_seconds": ("Seconds in line.", _WAITS),
    "request_inference_time_seconds": ("Seconds after that.", _WHOLE),
    "request_prefill_time_seconds": ("Of these, to the first token of a stream.", _WAITS),
    "request_decode_time_seconds": ("Of these, after the first token of a stream.", _WHOLE),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Of these, tokens that no cache held.", _TOKENS),
    "request_generation_tokens": ("Tokens that were made for a prompt.", _TOKENS),
    "request_max_num_generation_tokens": ("Of these, tokens of its longest answer.", _TOKENS),
    "request_params_max_tokens": ("Tokens of an answer that were asked for at most.", _TOKENS),
    "request_params_n": ("Answers that were asked for.", _COUNTS),
}
"""Histograms by name, each by model: what they count, and their buckets."""
_COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Tokens of prompts.",
    "prompt_tokens_cached": "Of these, tokens that the cache held.",
    "generation_tokens": "Tokens that were made.",
    "request_success": "Answers by what ended them.",
}
_TALLIED: Mapping[str, tuple[str, str]] = {
    "num_preemptions": ("preemptions", "Prompts whose rows others needed."),
    "spec_decode_num_draft_tokens": ("drafted", "Tokens that were drafted."),
    "spec_decode_num_accepted_tokens": ("accepted", "Of these, tokens that were accepted."),
}
"""Counters of the engine by name: what it calls them, and their meaning."""
_USAGE = "kv_cache_usage_perc"
_ALSO = {"prefix_cache_queries": "prompt_tokens", "prefix_cache_hits": "prompt_tokens_cached"}
"""Names of vLLM's for what has another name too."""
_OURS, _THEIRS = "everystep_", "vllm:"
_REASONS = {"length": "length", "time": "abort", "error": "error", "cancelled": "abort"}


class ServerMetrics:
    """Everything that /metrics shows. Labels hold names of models, never what a client wrote.

    `vllm`: whether it also has vLLM's names, so that what reads that server reads this one.
    """

    def __init__(self, *, vllm: bool = False) -> None:
        self._registry = registry = CollectorRegistry()
        own = ("model_name",)
        self._running = _gauge(registry, "num_requests_running", "Prompts at work.", own)
        self._waiting = _gauge(registry, "num_requests_waiting", "Prompts in line.", own)
        self.ready = _gauge(registry, "engine_ready", "1 while the engine takes prompts.")
        self.restarts = _gauge(registry, "engine_restarts", "Starts of the engine after a death.")
        self._loaded = _gauge(registry, "model_loaded", "1 while a model is loaded.", own)
        line = "Times that a model was loaded again after it had been put away."
        self._loads = _gauge(registry, "model_loads", line, own)
        self.replicas = _gauge(registry, "replicas", "Engines that share the prompts.")
        line = "Replicas that died, or were ended, at work."
        self.log_lost = _gauge(registry, "log_lines_lost", "Lines of the log that nobody took.")
        self.replica_deaths = _gauge(registry, "replica_deaths", line)
        self._counters = {
            name: Counter(
                f"{_OURS}{name}",
                line,
                (*own, "finished_reason") if name == "request_success" else own,
                registry=registry,
            )
            for name, line in _COUNTERS.items()
        }
        line = "The part of the rows in use, or of the positions, where these are bounded."
        self._usage = _gauge(registry, _USAGE, line, own)
        self._tallied = {
            name: Counter(f"{_OURS}{name}", line, own, registry=registry)
            for name, (_, line) in _TALLIED.items()
        }
        self._told: dict[str, EngineTally] = {}
        self._histograms = {
            name: Histogram(f"{_OURS}{name}", line, own, registry=registry, buckets=buckets)
            for name, (line, buckets) in _HISTOGRAMS.items()
        }
        self.answers = Counter(
            f"{_OURS}http_responses", "Answers by status.", ("status",), registry=registry
        )
        self.rejections = Counter(
            f"{_OURS}admission_rejections", "Requests refused for load.", registry=registry
        )
        self.left = Counter(f"{_OURS}requests_left", "Clients that went away.", registry=registry)
        self._renamed: CollectorRegistry | None = None
        if vllm:
            self._renamed = CollectorRegistry()
            self._renamed.register(RenamedMetrics(registry))

    def shown(self, load: Mapping[str, tuple[int, int]]) -> bytes:
        """Return the text that Prometheus reads; `load`: prompts at work and in line, by model."""
        for model, (running, waiting) in load.items():
            self._running.labels(model).set(running)
            self._waiting.labels(model).set(waiting)
        found = generate_latest(self._registry)
        return found if self._renamed is None else found + generate_latest(self._renamed)

    def models(self, where: Mapping[str, str], loads: Mapping[str, int]) -> None:
        """Note where each model is, and how often it was loaded again."""
        for model, one in where.items():
            self._loaded.labels(model).set(one == "loaded")
            self._loads.labels(model).set(loads.get(model, 0))

    def tallies(self, told: Mapping[str, EngineTally]) -> None:
        """Note what engines have counted until now."""
        for model, one in told.items():
            before = self._told.get(model, EngineTally())
            for name, (own, _) in _TALLIED.items():
                self._tallied[name].labels(model).inc(getattr(one, own) - getattr(before, own))
            self._usage.labels(model).set(one.usage)
        self._told |= told

    def observe(self, name: str, model: str, value: float) -> None:
        """Note a value of a histogram."""
        self._histograms[name].labels(model).observe(value)

    def count(self, name: str, model: str, more: int, *labels: str) -> None:
        """Add to a counter."""
        self._counters[name].labels(model, *labels).inc(more)


class RenamedMetrics(Collector):
    """The metrics of a registry by vLLM's names, as engine 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield what vLLM has a name for."""
        every = {one.name.removeprefix(_OURS): one for one in self._registry.collect()}
        names = ["num_requests_running", "num_requests_waiting", _USAGE]
        names += [*_COUNTERS, *_TALLIED, *_HISTOGRAMS]
        for name, own in [*zip(names, names, strict=True), *_ALSO.items()]:
            yield _renamed(every[own], f"{_THEIRS}{name}")


def _renamed(one: Metric, name: str) -> Metric:
    found = Metric(name, one.documentation, one.type)
    found.samples = [
        Sample(
            name + sample.name.removeprefix(one.name),
            {**sample.labels, "engine": "0"},
            sample.value,
            sample.timestamp,
            sample.exemplar,
        )
        for sample in one.samples
    ]
    return found


class RequestWatch:
    """The watch over a request: when each of its prompts begins, has tokens, and ends.

    `first`: seconds to its first token, where tokens are told as they come. `reasons`: what ended
    its answers.
    """

    def __init__(self, metrics: ServerMetrics, model: str, most: int | None, n: int) -> None:
        self._metrics, self._model = metrics, model
        self._since = time.monotonic()
        self._begun: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._last: dict[tuple[int, int], float] = {}
        self.first: float | None = None
        self.reasons: list[str] = []
        metrics.observe("request_params_n", model, n)
        if most is not None:
            metrics.observe("request_params_max_tokens", model, most)

    def note(self, number: int, message: News) -> None:
        """Take notice of what became of a prompt."""
        now = time.monotonic()
        if isinstance(message, Begun):
            self._begun[number] = now
            self._observe("request_queue_time_seconds", now - self._since)
        elif isinstance(message, RowNews) and message.token >= 0:
            self._token(number, message.index, now)
        elif isinstance(message, Over):
            self._over(number, message, now)

    def _token(self, number: int, index: int, now: float) -> None:
        if (last := self._last.get((number, index))) is not None:
            self._observe("inter_token_latency_seconds", now - last)
        self._last[number, index] = now
        if number in self._first:
            return
        self._first[number] = now
        self.first = now - self._since if self.first is None else self.first
        self._observe("time_to_first_token_seconds", now - self._since)
        self._observe("request_prefill_time_seconds", now - self._begun.get(number, self._since))

    def _over(self, number: int, message: Over, now: float) -> None:
        lengths = [len(one.tokens) for one in message.results]
        made = sum(lengths)
        self._observe("e2e_request_latency_seconds", now - self._since)
        begun, first = self._begun.get(number, self._since), self._first.get(number)
        self._observe("request_inference_time_seconds", now - begun)
        if first is not None:
            self._observe("request_decode_time_seconds", now - first)
            if made > 1:
                each = (now - first) / (made - 1)
                self._observe("request_time_per_output_token_seconds", each)
        if message.results:
            answer = message.results[0]
            self._observe("request_prompt_tokens", answer.prompt_tokens)
            computed = answer.prompt_tokens - answer.cached_tokens
            self._observe("request_prefill_kv_computed_tokens", computed)
        self._observe("request_generation_tokens", made)
        self._observe("request_max_num_generation_tokens", max(lengths, default=0))
        for one in message.results:
            reason = _REASONS.get(one.kind, "stop")
            self.reasons.append(reason)
            self._metrics.count("request_success", self._model, 1, reason)

    def _observe(self, name: str, value: float) -> None:
        self._metrics.observe(name, self._model, value)


def _gauge(
    registry: CollectorRegistry, name: str, line: str, labels: tuple[str, ...] = ()
) -> Gauge:
    return Gauge(f"{_OURS}{name}", line, labels, registry=registry)
