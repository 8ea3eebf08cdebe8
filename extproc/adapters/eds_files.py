"""Mirror what discovery found into files that Envoy watches, one a site cluster.

Each file is a whole discovery response, written beside its place and renamed into it, so Envoy never reads half of one.
Envoy refuses to start while a file of its configuration is missing: write once, also empty lists, before it starts.
"""

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

ASSIGNMENT = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def file_of(folder: Path, cluster: str) -> Path:
    """Return where the endpoints of *cluster* stand; a slash in the name does not become a folder."""
    return folder / f"{quote(cluster, safe='@:')}.json"


def write(folder: Path, clusters: Mapping[str, Sequence[str]]) -> None:
    """Write the addresses (``ip:port``, IPv6 in brackets) of each cluster, where they changed.

    The order of addresses does not count. An empty list leaves the cluster without endpoints. Files of clusters that
    are not named stay as they are.

    Raises
    ------
    ValueError
        If an address is not ``ip:port``; nothing has been written then.
    OSError
        If the folder cannot be written.
    """
    texts = {file_of(folder, name): _response(name, addresses) for name, addresses in clusters.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            _replace(path, text)


def _response(cluster: str, addresses: Sequence[str]) -> str:
    endpoints = [{"endpoint": {"address": {"socket_address": _socket(one)}}} for one in sorted(set(addresses))]
    resource = {"@type": ASSIGNMENT, "cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}
    version = sha256(json.dumps(resource).encode()).hexdigest()[:16]
    return json.dumps({"version_info": version, "resources": [resource]}, indent=1)


def _socket(address: str) -> dict[str, str | int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not ip:port")
    return {"address": host.strip("[]"), "port_value": int(port)}


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
