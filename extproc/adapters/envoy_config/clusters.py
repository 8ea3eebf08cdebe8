"""One cluster a site, and one for our own servers."""

import ipaddress
from datetime import timedelta

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    ApiVersion,
    ConfigSource,
    DataSource,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    PathConfigSource,
    Pipe,
    SocketAddress,
    TcpKeepalive,
    TransportSocket,
    TypedExtensionConfig,
    WatchedDirectory,
)
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    TlsCertificate,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions as UpstreamProtocol,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from extproc.adapters import eds_files
from extproc.adapters.envoy_config import names
from extproc.adapters.envoy_config.mesh import Mesh, MutualTls
from extproc.policy import Policy, SiteSpec

KEPT_OPEN = timedelta(seconds=4)
"""Uvicorn, and so vLLM, closes a connection after 5 s without a request; closing first avoids that race."""
PROTOCOL = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
STREAMS_A_CONNECTION = 1024


def clusters(policy: Policy, mesh: Mesh) -> list[Cluster]:
    """Return every cluster, our servers' first.

    Raises
    ------
    ValueError
        If a site's instances are in a watched file and *mesh* has no folder of endpoint files.
    """
    return [_servers(mesh), *(_site(site, mesh) for site in policy.fleet.sites)]


def _site(site: SiteSpec, mesh: Mesh) -> Cluster:
    name = site.envoy_cluster
    engine = UpstreamProtocol(
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=KEPT_OPEN),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions()),
    )
    return Cluster(
        name=name,
        connect_timeout=timedelta(seconds=mesh.connect_s),
        circuit_breakers=_breakers(mesh),
        load_balancing_policy=_told_host(),
        typed_extension_protocol_options={PROTOCOL: Any.pack(engine)},
        upstream_connection_options=UpstreamConnectionOptions(
            tcp_keepalive=TcpKeepalive(keepalive_time=30, keepalive_interval=10, keepalive_probes=3)
        ),
        **_discovery(site, mesh),
    )


def _discovery(site: SiteSpec, mesh: Mesh) -> dict[str, object]:
    name = site.envoy_cluster
    if mesh.eds is not None:
        watched = WatchedDirectory(path=str(mesh.eds))
        source = PathConfigSource(path=str(eds_files.file_of(mesh.eds, name)), watched_directory=watched)
        config = ConfigSource(path_config_source=source, resource_api_version=ApiVersion.V3)
        return {"type": ClusterDiscoveryType.EDS, "eds_cluster_config": ClusterEdsClusterConfig(eds_config=config)}
    if any(group.file for group in site.instances):
        raise ValueError(f"site {site.name!r} lists instances in a watched file: give a folder of endpoint files")
    listed = [one.address for group in site.instances for one in group.static or ()]
    by_name = [group.dns for group in site.instances if group.dns]
    return {
        "type": ClusterDiscoveryType.STRICT_DNS if by_name else ClusterDiscoveryType.STATIC,
        "load_assignment": assignment(name, [*listed, *by_name]),
    }


def _told_host() -> LoadBalancingPolicy:
    """Return the policy that takes the hosts we name, in order, and the least loaded one when we named none."""
    key = MetadataKey(key=names.LB_NAMESPACE, path=[MetadataKeyPathSegment(key=names.ENDPOINT)])
    told = OverrideHost(
        override_host_sources=[OverrideHostOverrideHostSource(metadata=key)],
        fallback_policy=_policy("least_request", LeastRequest()),
    )
    return _policy("override_host", told)


def _policy(name: str, message: LeastRequest | OverrideHost) -> LoadBalancingPolicy:
    extension = TypedExtensionConfig(name=f"envoy.load_balancing_policies.{name}", typed_config=Any.pack(message))
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=extension)])


def _servers(mesh: Mesh) -> Cluster:
    http2 = Http2ProtocolOptions(max_concurrent_streams=STREAMS_A_CONNECTION)
    protocol = UpstreamProtocol(
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=http2)
    )
    named = [one for one in mesh.servers if not one.startswith("unix:") and not _is_ip(host_port(one)[0])]
    return Cluster(
        name=names.EXT_PROC_CLUSTER,
        type=ClusterDiscoveryType.STRICT_DNS if named else ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=mesh.connect_s),
        circuit_breakers=_breakers(mesh),
        load_balancing_policy=_policy("least_request", LeastRequest()),
        # Any healthy worker is better than a dead one; all unhealthy at once means that we are slow, not gone.
        common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=1.0)),
        health_checks=[
            HealthCheck(
                timeout=timedelta(seconds=2),
                interval=timedelta(milliseconds=500),
                no_traffic_interval=timedelta(seconds=1),
                unhealthy_threshold=2,
                healthy_threshold=1,
                grpc_health_check=HealthCheckGrpcHealthCheck(),
            )
        ],
        # Only failures to connect count: an aborted stream is our answer, not a broken worker.
        outlier_detection=OutlierDetection(
            split_external_local_origin_errors=True,
            consecutive_local_origin_failure=2,
            enforcing_consecutive_5xx=0,
            enforcing_consecutive_gateway_failure=0,
            enforcing_success_rate=0,
            enforcing_local_origin_success_rate=0,
            interval=timedelta(milliseconds=500),
            base_ejection_time=timedelta(seconds=1),
            max_ejection_time=timedelta(seconds=10),
            max_ejection_percent=90,
        ),
        typed_extension_protocol_options={PROTOCOL: Any.pack(protocol)},
        transport_socket=_tls(mesh.tls) if mesh.tls else None,
        load_assignment=assignment(names.EXT_PROC_CLUSTER, list(mesh.servers)),
    )


def _tls(tls: MutualTls) -> TransportSocket:
    def file(path: object) -> DataSource:
        return DataSource(filename=str(path))

    expected = [
        SubjectAltNameMatcher(san_type=SubjectAltNameMatcherSanType.DNS, matcher=StringMatcher(exact=tls.server_name))
    ]
    context = UpstreamTlsContext(
        sni=tls.server_name,
        common_tls_context=CommonTlsContext(
            tls_certificates=[TlsCertificate(certificate_chain=file(tls.certificate), private_key=file(tls.key))],
            validation_context=CertificateValidationContext(
                trusted_ca=file(tls.ca), match_typed_subject_alt_names=expected if tls.server_name else []
            ),
            alpn_protocols=["h2"],
        ),
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))


def _breakers(mesh: Mesh) -> CircuitBreakers:
    most = mesh.concurrent
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                max_connections=most, max_pending_requests=most, max_requests=most, max_retries=most
            )
        ]
    )


def assignment(cluster: str, addresses: list[str]) -> ClusterLoadAssignment:
    """Return the endpoints of *cluster*; each address is ``unix:/path`` or ``host:port`` (IPv6 in brackets)."""
    endpoints = [LbEndpoint(endpoint=Endpoint(address=_address(one))) for one in addresses]
    return ClusterLoadAssignment(cluster_name=cluster, endpoints=[LocalityLbEndpoints(lb_endpoints=endpoints)])


def _address(text: str) -> Address:
    if text.startswith("unix:"):
        return Address(pipe=Pipe(path=text.removeprefix("unix:")))
    host, port = host_port(text)
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def host_port(text: str) -> tuple[str, int]:
    """Split ``host:port``; brackets around an IPv6 address are taken off."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
