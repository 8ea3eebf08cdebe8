"""llama.cpp's own server. Its ``prompt_tokens_total`` counts computed tokens only, so queries are those plus cached.

It publishes no block size; KV usage only in versions before mid 2025.
"""

from extproc.adapters.telemetry.dialect import Dialect, added, mean, total

_CACHED = total("llamacpp:prompt_tokens_cached_total")

LLAMACPP = Dialect(
    name="llamacpp",
    mark="llamacpp:",
    waiting=total("llamacpp:requests_deferred"),
    running=total("llamacpp:requests_processing"),
    kv_usage=mean("llamacpp:kv_cache_usage_ratio"),
    prefix_hits=_CACHED,
    prefix_queries=added(total("llamacpp:prompt_tokens_total"), _CACHED),
)
