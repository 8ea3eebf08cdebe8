"""SGLang 0.5, read from its documentation. Cached tokens are one series per tier they came from (``cache_source``)."""

from extproc.adapters.telemetry.dialect import Dialect, either, first, mean, told, total

SGLANG = Dialect(
    name="sglang",
    mark="sglang:",
    waiting=total("sglang:num_queue_reqs"),
    running=total("sglang:num_running_reqs"),
    kv_usage=mean("sglang:token_usage"),
    prefix_hits=total("sglang:cached_tokens_total"),
    prefix_queries=total("sglang:prompt_tokens_total"),
    block_tokens=either(first("sglang:page_size"), told("sglang:cache_config_info", "page_size", once=True)),
    kv_blocks=either(total("sglang:num_pages"), told("sglang:cache_config_info", "num_pages", once=False)),
)
