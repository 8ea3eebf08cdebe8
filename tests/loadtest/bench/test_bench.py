"""The whole bench, as short as it can be, with the real Envoy and the real Redis."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.bench import meshes
from tests.builders import a_policy
from tests.e2e.envoy_process import an_envoy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SURGE = 1_200
"""More than the 1,000 streams from which gRPC would cancel some at random if it were left to."""


@pytest.mark.parametrize("without", [meshes.DIRECT, meshes.BARE, frozenset({"usage"}), frozenset()])
def test_envoy_takes_the_configuration_of_every_arm(tmp_path: Path, without: frozenset[meshes.Part]) -> None:
    config = meshes.config(a_policy(), ("unix:/nowhere",), without)
    assert ("envoy.filters.http.ext_proc" in config) == ("ext_proc" not in without)
    assert ("envoy.filters.http.lua" in config) == ("usage" not in without)
    assert ("envoy.access_loggers.http_grpc" in config) == ("access_log" not in without)
    with an_envoy(config, tmp_path) as envoy:
        assert envoy.port


def test_a_short_run_measures_every_cell_and_loses_no_held_request(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "loadtest.bench", "--rounds", "1", "--seconds", "0.3", "--no-extras"]
    done = subprocess.run(
        [*command, "--held", str(SURGE), "--out", str(out)], capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tree = json.loads(out.read_text())
    for size in ("2KB", "40KB", "400KB"):
        for arm in ("direct", "noop", "tokenfleet"):
            for clients in ("clients_1", "clients_32"):
                found = tree["overhead"][size][arm][clients]
                assert 0 < found["p50_ms"] <= found["p99_ms"]
                assert found["requests_per_s"] > 0
                assert (found["python_cpu_us_per_request"] == 0) == (arm == "direct")
    assert tree["held"]["requests"] == SURGE
    assert tree["held"]["left_after"] == 0
    assert 1_000 < tree["held"]["bytes_each"] < 200_000
    assert "Aims" in done.stdout
