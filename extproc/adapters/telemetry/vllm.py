"""vLLM 0.8 and newer. Data-parallel ranks are series of their own (``engine="N"``) with caches of their own.

KV usage was ``gpu_cache_usage_perc`` up to 0.8 and has only its new name since 0.12; the prefix counters likewise.
The exposition adds ``_total`` to counters. KV usage counts the blocks of live requests only.
"""

from extproc.adapters.telemetry.dialect import Dialect, mean, told, total
from extproc.adapters.telemetry.exposition import Page


def _counter(what: str) -> tuple[str, ...]:
    stems = (f"vllm:prefix_cache_{what}", f"vllm:gpu_prefix_cache_{what}")
    return tuple(name for stem in stems for name in (f"{stem}_total", stem))


def _adapters(page: Page) -> tuple[str, ...]:
    """Series of past combinations stay on the page; a series' value is when it was last true."""
    samples = page.samples("vllm:lora_requests_info")
    if not samples:
        return ()
    now = max(samples, key=lambda sample: sample.value).labels
    named = f"{now.get('running_lora_adapters', '')},{now.get('waiting_lora_adapters', '')}".split(",")
    return tuple(sorted({name.strip() for name in named} - {""}))


VLLM = Dialect(
    name="vllm",
    mark="vllm:",
    waiting=total("vllm:num_requests_waiting"),
    running=total("vllm:num_requests_running"),
    kv_usage=mean("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    prefix_hits=total(*_counter("hits")),
    prefix_queries=total(*_counter("queries")),
    block_tokens=told("vllm:cache_config_info", "block_size", once=True),
    kv_blocks=told("vllm:cache_config_info", "num_gpu_blocks", once=False),
    adapters=_adapters,
)
