"""TensorRT-LLM's ``trtllm-serve``, read from its documentation. Prefix counters are in blocks, on a path of its own."""

from extproc.adapters.telemetry.dialect import Dialect, added, first, mean, times, total

_BLOCK = first("trtllm_kv_cache_tokens_per_block")
_REUSED = total("trtllm_kv_cache_reused_blocks_total")
_MISSED = total("trtllm_kv_cache_missed_blocks_total")

TRTLLM = Dialect(
    name="trtllm",
    mark="trtllm_",
    path="/prometheus/metrics",
    waiting=total("trtllm_num_requests_waiting"),
    running=total("trtllm_num_requests_running"),
    kv_usage=mean("trtllm_kv_cache_utilization"),
    prefix_hits=times(_REUSED, _BLOCK),
    prefix_queries=times(added(_REUSED, _MISSED), _BLOCK),
    block_tokens=_BLOCK,
    kv_blocks=total("trtllm_kv_cache_max_blocks"),
)
