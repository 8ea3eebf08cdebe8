"""``/metrics`` under the names, labels and buckets of vLLM 0.32.

Times are wall seconds, as a real engine would measure them. What a simulation has no value for (FLOPs, the cache of
images, other cache tiers) is there and 0. Inter-token latency is known per request, not per token: each of a request's
gaps counts as its mean.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loadtest.engine.core import Core
from loadtest.engine.request import Timing

LABELS = ("engine", "model_name")
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TPOT = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_SPANS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", _SIZES),
    "request_generation_tokens": ("Number of generation tokens processed.", _SIZES),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _STEP_SIZES),
    "request_max_num_generation_tokens": ("Histogram of maximum number of requested generation tokens.", _SIZES),
    "request_params_n": ("Histogram of the n request parameter.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", _SIZES),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _TTFT),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _TPOT),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", _TPOT),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _SPANS),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _SPANS),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _SPANS),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _SPANS),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _SPANS),
    "request_num_preemptions": ("Histogram of the number of times a request was preempted.", (1, 2, 3, 4, 5, 10, 20)),
    "request_prefill_kv_computed_tokens": ("Histogram of new KV tokens computed during prefill.", _SIZES),
}


class EngineMetrics(Collector):
    """Metrics of one engine: gauges and counters are read from *core*, histograms fed by :meth:`ended`."""

    def __init__(self, core: Core, model: str, scale: float) -> None:
        self._core, self._model, self._scale = core, model, scale
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}
        self.rejected = 0
        """Calls refused because the queue was full."""
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self._registry).labels("0", model)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def text(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self._registry)

    def asked(self, choices: int, limit: int | None) -> None:
        """Count a call's parameters."""
        self._observe("request_params_n", choices)
        if limit is not None:
            self._observe("request_params_max_tokens", limit)

    def ended(self, timing: Timing, reason: str) -> None:
        """Count a request that has ended for *reason* (stop, length, abort)."""
        self._finished[reason] += 1
        if timing.first_token is None or timing.started is None:
            return
        self._observe("time_to_first_token_seconds", (timing.first_token - timing.arrived) * self._scale)
        if reason == "abort":
            return
        decode = (timing.finished - timing.first_token) * self._scale
        self._observe("request_prompt_tokens", timing.prompt_tokens)
        self._observe("request_generation_tokens", timing.output_tokens)
        self._observe("request_max_num_generation_tokens", timing.output_tokens)
        self._observe("e2e_request_latency_seconds", (timing.finished - timing.arrived) * self._scale)
        self._observe("request_queue_time_seconds", (timing.started - timing.arrived) * self._scale)
        self._observe("request_inference_time_seconds", (timing.finished - timing.started) * self._scale)
        self._observe("request_prefill_time_seconds", (timing.first_token - timing.started) * self._scale)
        self._observe("request_decode_time_seconds", decode)
        self._observe("request_num_preemptions", timing.preemptions)
        self._observe("request_prefill_kv_computed_tokens", timing.prompt_tokens - timing.cached_tokens)
        if timing.tpot is not None:
            self._observe("request_time_per_output_token_seconds", timing.tpot * self._scale)
            for _ in range(timing.output_tokens - 1):
                self._observe("inter_token_latency_seconds", timing.tpot * self._scale)

    def stepped(self, steps: int, tokens: int) -> None:
        """Count *steps* engine steps of *tokens* tokens together."""
        for _ in range(steps):
            self._observe("iteration_tokens_total", tokens / steps)

    def collect(self) -> Iterator[Metric]:
        """Yield gauges and counters."""
        core, totals = self._core, self._core.totals
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", core.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", core.waiting)
        by_reason = {"capacity": core.waiting, "deferred": 0}
        yield self._gauges(
            "num_requests_waiting_by_reason", "Number of waiting requests by reason.", "reason", by_reason
        )
        asleep = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauges("engine_sleep_state", "Engine sleep state.", "sleep_state", asleep)
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", core.kv_usage)
        yield from self._cache()
        yield self._counter("num_preemptions", "Cumulative number of preemption from the engine.", totals.preemptions)
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", totals.prompt)
        own = {"local_compute": totals.prompt - totals.cached, "local_cache_hit": totals.cached}
        sources = own | {"external_kv_transfer": 0}
        yield self._counters("prompt_tokens_by_source", "Number of prompt tokens by source.", "source", sources)
        yield self._counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", totals.cached)
        tiers = {"device": totals.cached, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
        yield self._counters("prompt_tokens_cached_by_source", "Prefix-cache hit tokens by tier.", "source", tiers)
        yield self._counter("generation_tokens", "Number of generation tokens processed.", totals.generated)
        text = "Count of successfully processed requests."
        yield self._counters("request_success", text, "finished_reason", self._finished)
        yield self._rejections()
        for what in ("estimated_flops", "estimated_read_bytes", "estimated_write_bytes"):
            yield self._counter(f"{what}_per_gpu", "Not simulated.", 0)

    def _cache(self) -> Iterable[Metric]:
        core, totals = self._core, self._core.totals
        yield self._counter("prefix_cache_queries", "Prefix cache queries, in tokens.", totals.prompt)
        yield self._counter("prefix_cache_hits", "Prefix cache hits, in tokens.", totals.cached)
        for what in (
            "external_prefix_cache_queries",
            "external_prefix_cache_hits",
            "mm_cache_queries",
            "mm_cache_hits",
        ):
            yield self._counter(what, "Not simulated.", 0)
        config = {
            "block_size": core.profile.block_tokens,
            "enable_prefix_caching": True,
            "engine": 0,
            "kv_cache_size_tokens": core.pool.capacity * core.profile.block_tokens,
            "num_gpu_blocks": core.pool.capacity,
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(config)
        )
        info.add_metric([str(value) for value in config.values()], 1)
        yield info

    def _rejections(self) -> Metric:
        text = "Number of admission attempts rejected by a queue limit, by reason."
        family = CounterMetricFamily("vllm:admission_rejections", text, labels=("model_name", "reason"))
        family.add_metric((self._model, "max_num_queued_reqs"), self.rejected)
        family.add_metric((self._model, "max_num_queued_tokens"), 0)
        return family

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(("0", self._model), value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric(("0", self._model, key), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(("0", self._model), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric(("0", self._model, key), value)
        return family
