"""What Prometheus reads. One object per server, passed in; nothing here is global.

Names and meanings are vLLM's where they are equal, so that its dashboards work; durations are seconds of the
step loop's clock. Counters and gauges of the scheduler are read from its snapshot when Prometheus asks, so
they cannot disagree with /stats; histograms are fed by the step loop. Labels are bounded; none holds text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm53srv.request import FinishReason
from glm53srv.scheduler.sequence import Sequence
from glm53srv.scheduler.stats import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MODEL_LABEL = "model_name"

LONG_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960, 1920)
"""Whole requests and their parts: from a short prompt on a GPU to a long one on a CPU."""

TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
"""Between two tokens: from 200 tokens a second down to a step that waits for a long prefill slice."""

LENGTH_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)

FINISHED_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


class Metrics:
    """Owned by the event loop thread, told by the step loop (scheduler.loop.SequenceObserver)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model = ""
        self._read_stats: Callable[[], SchedulerStats] | None = None
        self._registry.register(_SchedulerCollector(self))
        self._time_to_first_token = self._seconds("time_to_first_token", "From submission to the first token")
        self._inter_token = self._seconds("inter_token_latency", "Between two tokens", TOKEN_BUCKETS_S)
        self._token_gap: Histogram | None = None
        self._per_output_token = self._seconds(
            "request_time_per_output_token", "Decode time per token after the first", TOKEN_BUCKETS_S
        )
        self._end_to_end = self._seconds("e2e_request_latency", "From submission to the end")
        self._queue_time = self._seconds("request_queue_time", "From submission to the first step")
        self._prefill_time = self._seconds("request_prefill_time", "From the first step to the first token")
        self._decode_time = self._seconds("request_decode_time", "From the first token to the last")
        self._prompt_length = self._lengths("request_prompt_tokens", "Prompt tokens of ended requests")
        self._output_length = self._lengths("request_generation_tokens", "Output tokens of ended requests")
        self._success = Counter(
            "vllm:request_success",
            "Ended requests, by reason",
            (MODEL_LABEL, "finished_reason"),
            registry=self._registry,
        )

    def begin(self, model: str, read_stats: Callable[[], SchedulerStats]) -> None:
        """Take the model's name and the source of the scheduler's numbers, once both are there."""
        self._model = model
        self._read_stats = read_stats
        self._token_gap = self._inter_token.labels(model)  # looked up once: this one is fed for every token
        for reason in sorted(set(FINISHED_REASONS.values())):
            self._success.labels(model, reason)  # a rate needs the zero before the first one

    def on_token(self, sequence: Sequence) -> None:
        """Count a token that was sampled."""
        if sequence.token_gap_s is not None and self._token_gap is not None:
            self._token_gap.observe(sequence.token_gap_s)
        elif sequence.first_token_s is not None:
            waited_s = sequence.first_token_s - sequence.submitted_s
            self._time_to_first_token.labels(self._model).observe(waited_s)

    def on_end(self, sequence: Sequence, finish: FinishReason, now_s: float) -> None:
        """Count a sequence that has ended."""
        model, num_output = self._model, len(sequence.output_ids)
        self._success.labels(model, FINISHED_REASONS[finish]).inc()
        self._end_to_end.labels(model).observe(now_s - sequence.submitted_s)
        self._prompt_length.labels(model).observe(sequence.num_prompt_tokens)
        self._output_length.labels(model).observe(num_output)
        if sequence.first_scheduled_s is None:
            return
        self._queue_time.labels(model).observe(sequence.first_scheduled_s - sequence.submitted_s)
        if sequence.first_token_s is None or sequence.last_token_s is None:
            return
        self._prefill_time.labels(model).observe(sequence.first_token_s - sequence.first_scheduled_s)
        decode_s = sequence.last_token_s - sequence.first_token_s
        self._decode_time.labels(model).observe(decode_s)
        if num_output > 1:
            self._per_output_token.labels(model).observe(decode_s / (num_output - 1))

    def exposition(self) -> bytes:
        """Give everything in the text format, CONTENT_TYPE."""
        return generate_latest(self._registry)

    def scheduler_families(self) -> Iterator[Metric]:
        """Give the scheduler's numbers as they are now; none before begin()."""
        if self._read_stats is None:
            return
        stats = self._read_stats()
        usage = stats.num_pages_used / stats.num_pages
        gauges = (
            ("vllm:num_requests_running", "Sequences that have a slot", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences in the queue", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache's pages in use, 1 is all", usage),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=(MODEL_LABEL,))
            gauge.add_metric((self._model,), value)
            yield gauge
        counters = (
            ("vllm:num_preemptions", "Sequences that lost their place", stats.total_preemptions),
            (
                "vllm:prompt_tokens",
                "Prompt tokens computed, again after a preemption",
                stats.total_prefill_tokens,
            ),
            ("vllm:generation_tokens", "Tokens sampled", stats.total_output_tokens),
            ("glm53srv:requests", "Sequences accepted", stats.total_requests),
            ("glm53srv:requests_rejected", "Sequences refused at the queue", stats.total_rejected),
            ("glm53srv:steps", "Steps of the engine", stats.total_steps),
        )
        for name, text, count in counters:
            counter = CounterMetricFamily(name, text, labels=(MODEL_LABEL,))
            counter.add_metric((self._model,), count)
            yield counter

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = LONG_BUCKETS_S) -> Histogram:
        name = f"vllm:{name}_seconds"
        return Histogram(name, text, (MODEL_LABEL,), buckets=buckets, registry=self._registry)

    def _lengths(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"vllm:{name}", text, (MODEL_LABEL,), buckets=LENGTH_BUCKETS, registry=self._registry
        )


class _SchedulerCollector(Collector):
    """Lets the registry ask for the scheduler's numbers."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.scheduler_families()
