"""Which requests are steered, which go home, and what is tried again."""

from datetime import timedelta

from envoy_data_plane.envoy.config.core.v3 import HeaderValue, HeaderValueOption, TypedExtensionConfig
from envoy_data_plane.envoy.config.core.v3 import HeaderValueOptionHeaderAppendAction as Append
from envoy_data_plane.envoy.config.route.v3 import (
    ClusterSpecifierPlugin,
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.http.buffer.v3 import BufferPerRoute
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExtProcPerRoute
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import MetadataMatcher, MetadataMatcherPathSegment, ValueMatcher
from envoy_data_plane.google.protobuf import Any

from extproc.adapters.envoy_config import names
from extproc.adapters.envoy_config.mesh import Mesh, hold_s
from extproc.adapters.envoy_config.priority_group import ClusterWeight, PriorityGroup, PriorityGroupClusterSpecifier
from extproc.policy import Policy

EXT_PROC_FILTER = "envoy.filters.http.ext_proc"
BUFFER_FILTER = "envoy.filters.http.buffer"
RETRY_ON = "connect-failure,refused-stream,reset,retriable-status-codes"


def routes(policy: Policy, mesh: Mesh) -> RouteConfiguration:
    """Return the route table: around us, steered by us, and home for what we did not steer."""
    home = home_cluster(policy)
    table = [
        Route(
            name="health",
            match=RouteMatch(path="/health"),
            route=_action(policy, mesh, cluster=home),
            typed_per_filter_config=_around_us(),
        )
    ]
    if mesh.unrouted_prefix:
        table.append(
            Route(
                name="unrouted",
                match=RouteMatch(prefix=mesh.unrouted_prefix),
                route=_action(policy, mesh, cluster=home, prefix_rewrite="/"),
                typed_per_filter_config=_around_us(),
            )
        )
    table += [
        *_steered(policy, mesh, home),
        Route(name="home", match=RouteMatch(prefix="/"), route=_action(policy, mesh, cluster=home)),
    ]
    host = VirtualHost(
        name="tokenfleet",
        domains=["*"],
        routes=table,
        request_body_buffer_limit=policy.gateway.max_body_bytes,
        response_headers_to_add=[
            _from_metadata("why", names.WHY_HEADER),
            _from_metadata("id", names.REQUEST_ID_HEADER),
        ],
    )
    return RouteConfiguration(name="tokenfleet", virtual_hosts=[host])


def home_cluster(policy: Policy) -> str:
    """Return the cluster of this gateway's own site."""
    return next(site.envoy_cluster for site in policy.fleet.sites if site.name == policy.fleet.home)


def _steered(policy: Policy, mesh: Mesh, home: str) -> list[Route]:
    """Return the routes of what we steered; without groups of ours the header names the site, never Envoy."""
    named = [HeaderMatcher(name=names.CLUSTER_HEADER, present_match=True)]
    table = []
    if mesh.style == "priority-group":
        given = MetadataMatcher(
            filter=names.PRIORITY_NAMESPACE,
            path=[MetadataMatcherPathSegment(key="priority_groups")],
            value=ValueMatcher(present_match=True),
        )
        match = RouteMatch(prefix="/", headers=named, dynamic_metadata=[given])
        route = _action(policy, mesh, inline_cluster_specifier_plugin=_groups(home))
        table.append(Route(name="steered-by-attempt", match=match, route=route))
    route = _action(policy, mesh, cluster_header=names.CLUSTER_HEADER)
    return [*table, Route(name="steered", match=RouteMatch(prefix="/", headers=named), route=route)]


def _groups(home: str) -> ClusterSpecifierPlugin:
    # Home alone is configured: without lawful groups of ours a retry must not reach another site.
    groups = PriorityGroupClusterSpecifier(
        priority_groups=[PriorityGroup(name=home, clusters=[ClusterWeight(cluster_name=home, weight=1)])],
        override_metadata_namespace=names.PRIORITY_NAMESPACE,
    )
    name = "envoy.router.cluster_specifier_plugin.priority_group"
    return ClusterSpecifierPlugin(extension=TypedExtensionConfig(name=name, typed_config=Any.pack(groups)))


def _action(policy: Policy, mesh: Mesh, **target: object) -> RouteAction:
    return RouteAction(
        timeout=timedelta(0),
        idle_timeout=timedelta(seconds=max(hold_s(policy), mesh.stall_s) + 30),
        retry_policy=RetryPolicy(
            retry_on=RETRY_ON,
            num_retries=max(policy.tokenpilot.hosts - 1, 1),
            retriable_status_codes=list(mesh.retry_statuses),
            per_try_idle_timeout=timedelta(seconds=mesh.stall_s),
            retry_host_predicate=[
                RetryPolicyRetryHostPredicate(
                    name="envoy.retry_host_predicates.previous_hosts", typed_config=Any.pack(PreviousHostsPredicate())
                )
            ],
            host_selection_retry_max_attempts=5,
            retry_back_off=RetryPolicyRetryBackOff(
                base_interval=timedelta(milliseconds=1), max_interval=timedelta(milliseconds=10)
            ),
            refresh_cluster_on_retry="inline_cluster_specifier_plugin" in target,
        ),
        **target,
    )


def _around_us() -> dict[str, Any]:
    return {
        BUFFER_FILTER: Any.pack(BufferPerRoute(disabled=True)),
        EXT_PROC_FILTER: Any.pack(ExtProcPerRoute(disabled=True)),
    }


def _from_metadata(key: str, header: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=header, value=f"%DYNAMIC_METADATA({names.NAMESPACE}:{key})%"),
        append_action=Append.OVERWRITE_IF_EXISTS_OR_ADD,
    )
