"""One Envoy configuration an arm: the shipped one, less what the arm does without."""

from collections.abc import Mapping
from typing import Any, Literal

import orjson
from ruamel.yaml import YAML

from extproc.adapters.envoy_config import Mesh, names, write
from extproc.policy import Policy

Part = Literal["ext_proc", "usage", "access_log"]
_FILTERS: Mapping[str, Part] = {"envoy.filters.http.ext_proc": "ext_proc", "envoy.filters.http.lua": "usage"}
DIRECT: frozenset[Part] = frozenset({"ext_proc", "usage", "access_log"})
BARE: frozenset[Part] = frozenset({"usage", "access_log"})
"""What a no-op server does without: nobody there reads logs or token counts."""


def config(policy: Policy, servers: tuple[str, ...], without: frozenset[Part] = frozenset()) -> str:
    """Return Envoy's configuration as JSON, on free ports of the loopback."""
    mesh = Mesh(host="127.0.0.1", port=0, admin_port=0, servers=servers)
    tree: dict[str, Any] = YAML(typ="safe").load(write(policy, mesh))
    resources = tree["static_resources"]
    http = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    http["http_filters"] = [one for one in http["http_filters"] if _FILTERS.get(one["name"]) not in without]
    if "access_log" in without:
        del http["access_log"]
    if "ext_proc" in without:
        _take_routes_settings_out(http, "envoy.filters.http.ext_proc")
        resources["clusters"] = [one for one in resources["clusters"] if one["name"] != names.EXT_PROC_CLUSTER]
    return orjson.dumps(tree).decode()


def _take_routes_settings_out(http: dict[str, Any], filter_name: str) -> None:
    for host in http["route_config"]["virtual_hosts"]:
        for route in host["routes"]:
            route.get("typed_per_filter_config", {}).pop(filter_name, None)
