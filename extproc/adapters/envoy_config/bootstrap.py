"""The bootstrap, and its way into YAML."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.core.v3 import Address, Node, SocketAddress
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from extproc.adapters.envoy_config.clusters import clusters
from extproc.adapters.envoy_config.listener import listener
from extproc.adapters.envoy_config.mesh import Mesh
from extproc.policy import Policy

HEADER = "# Written by `tokenfleet envoy-config`; envoy/README.md says why each setting stands.\n"


def bootstrap(policy: Policy, mesh: Mesh) -> Bootstrap:
    """Return the whole configuration as envoy-data-plane's message.

    Raises
    ------
    ValueError
        If Envoy cannot do what the policy asks.
    """
    admin = SocketAddress(address=mesh.admin_host, port_value=mesh.admin_port)
    return Bootstrap(
        node=Node(id="tokenfleet", cluster="tokenfleet"),
        admin=Admin(address=Address(socket_address=admin)),
        static_resources=BootstrapStaticResources(listeners=[listener(policy, mesh)], clusters=clusters(policy, mesh)),
    )


def to_yaml(policy: Policy, mesh: Mesh) -> str:
    """Return :func:`bootstrap` as YAML, every string quoted."""
    tree = bootstrap(policy, mesh).to_dict(casing=_as_written)
    yaml = YAML()
    yaml.width = 4096
    out = io.StringIO()
    yaml.dump(_quoted(tree), out)
    return HEADER + out.getvalue()


def _as_written(field: str) -> str:
    """Keep a field's own name: betterproto2's snake case turns ``consecutive_5xx`` into ``consecutive_5_xx``."""
    return field


def _quoted(node: Any) -> Any:  # noqa: ANN401 - a JSON tree
    match node:
        case str():
            return LiteralScalarString(node) if "\n" in node else DoubleQuotedScalarString(node)
        case Mapping():
            return {DoubleQuotedScalarString(key) if key[:1] == "@" else key: _quoted(one) for key, one in node.items()}
        case Sequence():
            return [_quoted(one) for one in node]
        case _:
            return node
