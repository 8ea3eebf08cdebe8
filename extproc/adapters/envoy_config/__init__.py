"""Envoy's configuration for a policy.

Typed messages of envoy-data-plane go in; YAML comes out whose every string is quoted, so that YAML 1.1 cannot take one
for a boolean. ``envoy/README.md`` says why each setting stands. This file, ``names.py`` and ``mesh.py`` are light and
for everyone; the rest loads envoy-data-plane (a second, 15 MB), which no server needs.
"""

from extproc.adapters.envoy_config.mesh import Mesh, MutualTls
from extproc.policy import Policy

__all__ = ["Mesh", "MutualTls", "write"]


def write(policy: Policy, mesh: Mesh) -> str:
    """Return the configuration as YAML.

    Raises
    ------
    ValueError
        If Envoy cannot do what the policy asks; the message is a sentence for the operator.
    """
    from extproc.adapters.envoy_config.bootstrap import to_yaml  # noqa: PLC0415 - a second to load, for writers alone

    return to_yaml(policy, mesh)
