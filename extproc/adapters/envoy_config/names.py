"""Names that Envoy's configuration and our servers share. Changing one is changing the protocol between them."""

CLUSTER_HEADER = "x-tokenfleet-cluster"
"""Request header that carries the site's cluster from us to Envoy's route."""
ENDPOINT = "x-gateway-destination-endpoint"
"""Header, and key in ``LB_NAMESPACE``: ``ip:port,ip:port``, best first."""
LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
"""Metadata namespace in which an upstream picker narrows our choice (Gateway API)."""
NAMESPACE = "tokenfleet"
"""Metadata namespace of one request: ``id`` and, when asked for and allowed, ``why``."""
PRIORITY_NAMESPACE = "tokenfleet.priority"
"""Metadata namespace: ``priority_groups``, a list of ``{name, clusters: [{cluster_name, weight}]}``, one an attempt."""
USAGE_NAMESPACE = "tokenfleet.usage"
"""Metadata namespace of what an answer said of itself: token counts, ``stream_error``."""
RETRIES_HEADER = "x-envoy-max-retries"
"""Request header by which we bound the retries of one request: hosts given, less one."""
REQUEST_ID_HEADER = "x-tokenfleet-request-id"
WHY_HEADER = "x-tokenfleet-why"
EXT_PROC_CLUSTER = "tokenfleet-ext-proc"
LOG_NAME = "tokenfleet"
ATTEMPT_LOG_NAME = "tokenfleet-attempt"
OWN_PREFIXES = ("x-tokenfleet-", "x-gateway-destination-")
"""Headers that no client may set."""
STEERING_PREFIXES = ("x-envoy-retr", "x-envoy-max-retries", "x-envoy-upstream-", "x-envoy-hedge-")
"""Envoy's own request headers that change retries and time-outs; not for clients either."""
TAGS = {
    "ttft_us": "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%",
    "engine_ttft_us": "%COMMON_DURATION(US_TX_END:US_RX_BODY_BEG:us)%",
    "held_us": "%COMMON_DURATION(DS_RX_END:US_TX_BEG:us)%",
}
"""Custom tags of the access log, microseconds; ``-`` while the moment has not come."""
