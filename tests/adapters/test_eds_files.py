import json
from pathlib import Path

import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import json_format

from extproc.adapters import eds_files


def read(path: Path) -> tuple[str, endpoint_pb2.ClusterLoadAssignment]:
    """Return version and assignment, parsed as Envoy's own messages."""
    response = json_format.Parse(path.read_text(), discovery_pb2.DiscoveryResponse())
    assignment = endpoint_pb2.ClusterLoadAssignment()
    assert response.resources[0].Unpack(assignment)
    return response.version_info, assignment


def addresses(path: Path) -> list[tuple[str, int]]:
    found = [one.endpoint.address.socket_address for one in read(path)[1].endpoints[0].lb_endpoints]
    return [(one.address, one.port_value) for one in found]


def test_each_cluster_has_its_own_file_with_its_addresses(tmp_path: Path) -> None:
    eds_files.write(tmp_path / "new", {"site-a": ["127.0.0.1:9000", "127.0.0.2:9001"], "site-b": []})
    assert read(tmp_path / "new" / "site-a.json")[1].cluster_name == "site-a"
    assert addresses(tmp_path / "new" / "site-a.json") == [("127.0.0.1", 9000), ("127.0.0.2", 9001)]
    assert addresses(tmp_path / "new" / "site-b.json") == []


def test_an_ipv6_address_loses_its_brackets(tmp_path: Path) -> None:
    eds_files.write(tmp_path, {"site-a": ["[2001:db8::1]:9000"]})
    assert addresses(tmp_path / "site-a.json") == [("2001:db8::1", 9000)]


def test_only_what_changed_is_written_and_under_a_new_version(tmp_path: Path) -> None:
    eds_files.write(tmp_path, {"site-a": ["127.0.0.1:1", "127.0.0.1:2"], "site-b": ["127.0.0.1:3"]})
    before = {path.name: (path.stat().st_ino, read(path)[0]) for path in tmp_path.iterdir()}
    eds_files.write(tmp_path, {"site-a": ["127.0.0.1:2", "127.0.0.1:1", "127.0.0.1:1"], "site-b": []})
    after = {path.name: (path.stat().st_ino, read(path)[0]) for path in tmp_path.iterdir()}
    assert after["site-a.json"] == before["site-a.json"]
    assert after["site-b.json"][1] != before["site-b.json"][1]
    assert after.keys() == before.keys()


def test_a_slash_in_a_name_makes_no_folder(tmp_path: Path) -> None:
    eds_files.write(tmp_path, {"outbound/8000": []})
    assert [path.name for path in tmp_path.iterdir()] == ["outbound%2F8000.json"]
    assert json.loads(eds_files.file_of(tmp_path, "outbound/8000").read_text())["resources"]


@pytest.mark.parametrize("address", ["127.0.0.1", ":9000", "127.0.0.1:http", ""])
def test_a_wrong_address_leaves_every_file_as_it_was(tmp_path: Path, address: str) -> None:
    eds_files.write(tmp_path, {"site-a": ["127.0.0.1:1"]})
    with pytest.raises(ValueError, match="is not ip:port"):
        eds_files.write(tmp_path, {"site-a": [], "site-b": [address]})
    assert addresses(tmp_path / "site-a.json") == [("127.0.0.1", 1)]


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        eds_files.write(tmp_path / "file", {"site-a": []})
