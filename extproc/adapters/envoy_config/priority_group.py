"""The ``priority_group`` cluster specifier of Envoy 1.40, which envoy-data-plane 2.2 does not carry yet.

Field numbers are those of the descriptor that the Envoy 1.40.0 binary embeds. Drop this file once the package has it.
"""

from dataclasses import dataclass

import betterproto2
from envoy_data_plane.google.protobuf import UInt32Value
from envoy_data_plane.message_pool import default_message_pool

PACKAGE = "envoy.extensions.router.cluster_specifiers.priority_group.v3"


@dataclass(eq=False, repr=False)
class ClusterWeight(betterproto2.Message):
    """One cluster of a group."""

    cluster_name: str = betterproto2.field(1, betterproto2.TYPE_STRING)
    weight: int | None = betterproto2.field(2, betterproto2.TYPE_MESSAGE, unwrap=lambda: UInt32Value, optional=True)


@dataclass(eq=False, repr=False)
class PriorityGroup(betterproto2.Message):
    """The clusters of one attempt."""

    name: str = betterproto2.field(1, betterproto2.TYPE_STRING)
    clusters: list[ClusterWeight] = betterproto2.field(  # noqa: RUF009 - it makes a dataclass field
        2, betterproto2.TYPE_MESSAGE, repeated=True
    )


@dataclass(eq=False, repr=False)
class PriorityGroupClusterSpecifier(betterproto2.Message):
    """Attempt *n* takes group *n*, the last one once they are used up; the namespace replaces them for one request."""

    priority_groups: list[PriorityGroup] = betterproto2.field(  # noqa: RUF009 - it makes a dataclass field
        1, betterproto2.TYPE_MESSAGE, repeated=True
    )
    override_metadata_namespace: str = betterproto2.field(2, betterproto2.TYPE_STRING)


for message in (ClusterWeight, PriorityGroup, PriorityGroupClusterSpecifier):
    default_message_pool.register_message(PACKAGE, message.__name__, message)
