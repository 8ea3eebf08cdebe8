"""Static lists, DNS names, watched files, and all of them together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from extproc.adapters.discovery import Discovery, Found, Resolve, clusters, listed, resolve
from extproc.policy import Policy
from tests.builders import CHAT, a_policy, a_profile
from tests.polling import eventually

ONE = [{"name": "s-0", "address": "127.0.0.1:9000"}]


def a_fleet(*groups: dict[str, Any], **files: Any) -> Policy:
    site = {"name": "a", "instances": [{"models": [CHAT], **group} for group in groups]}
    return a_policy(fleet={"sites": [site], "models": {CHAT: {}, "m2": {}}}, **files)


class Names:
    """A resolver that answers what the test sets; an exception is raised."""

    def __init__(self, *answer: str) -> None:
        self.answer: Sequence[str] | Exception = answer
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@asynccontextmanager
async def discovering(policy: Policy, folder: Path = Path(), names: Resolve = resolve) -> AsyncIterator[list[Found]]:
    told: list[Found] = []
    task = asyncio.ensure_future(Discovery(policy, folder, names, file_s=0.005, dns_s=0.005).run(told.append))
    try:
        await eventually(lambda: bool(told))
        yield told
        assert not task.done() or task.exception() is None
    finally:
        task.cancel()
        await asyncio.wait([task])


def addresses(found: Found) -> list[str]:
    return [one.address for one in found.instances]


def test_the_policys_own_list_is_described_with_the_groups_defaults_and_own_exceptions() -> None:
    profile = {"source": "test", "a_ms": 10.0, "c_ms": 0.1, "d_ms": 0.02, "e_ms": 40.0}
    policy = a_fleet(
        {
            "dialect": "vllm",
            "static": [
                {"name": "x", "address": "10.0.0.1:8000"},
                {"name": "y", "address": "[::1]:8000", "models": ["m2"], "profile": "fast", "draining": True},
            ],
        },
        {"dns": "engines.test:8000"},
        profiles={"default": profile, "fast": profile | {"a_ms": 1.0}},
    )
    x, y = listed(policy)
    assert (x.name, x.site, x.address, x.models, x.dialect, x.draining) == (
        "x",
        "a",
        "10.0.0.1:8000",
        (CHAT,),
        "vllm",
        False,
    )
    assert x.profile == a_profile()
    assert (y.address, y.models, y.profile.name, y.profile.a_ms, y.draining) == (
        "[::1]:8000",
        ("m2",),
        "fast",
        1.0,
        True,
    )


async def test_a_static_fleet_is_told_once() -> None:
    policy = a_fleet({"static": ONE})
    told: list[Found] = []
    await Discovery(policy, Path()).run(told.append)
    assert told == [Found(listed(policy), frozenset({"a"}))]


async def test_every_address_of_a_name_is_an_instance_named_by_site_and_address() -> None:
    names = Names("10.0.0.1", "fd00::1")
    async with discovering(a_fleet({"dns": "engines.test:8000"}), names=names) as told:
        assert [(one.name, one.address) for one in told[0].instances] == [
            ("a-10.0.0.1-8000", "10.0.0.1:8000"),
            ("a-fd00::1-8000", "[fd00::1]:8000"),
        ]
    assert names.asked[0] == ("engines.test", 8000)


async def test_a_name_is_asked_again_and_its_changes_are_told() -> None:
    names = Names("10.0.0.1")
    async with discovering(a_fleet({"dns": "engines.test:8000"}), names=names) as told:
        names.answer = ("10.0.0.1", "10.0.0.2")
        await eventually(lambda: addresses(told[-1]) == ["10.0.0.1:8000", "10.0.0.2:8000"])
        names.answer = ("10.0.0.2",)
        await eventually(lambda: addresses(told[-1]) == ["10.0.0.2:8000"])
    assert len(told) == 3


@pytest.mark.parametrize("fault", [OSError("no such name"), TimeoutError(), ()])
async def test_a_name_that_fails_keeps_its_last_answer_and_is_reported_once(fault: Any) -> None:
    names = Names("10.0.0.1")
    with capture_logs() as logs:
        async with discovering(a_fleet({"dns": "engines.test:8000"}), names=names) as told:
            names.answer = fault
            count = len(names.asked)
            await eventually(lambda: len(names.asked) > count + 5)
            assert len(told) == 1
            names.answer = ("10.0.0.9",)
            await eventually(lambda: addresses(told[-1]) == ["10.0.0.9:8000"])
    assert [log["event"] for log in logs] == ["instances_source_broken", "instances_source_back"]


async def test_a_name_never_resolved_leaves_its_site_unknown_and_hides_no_other_source() -> None:
    names = Names()
    async with discovering(a_fleet({"static": ONE}, {"dns": "engines.test:8000"}), names=names) as told:
        assert (addresses(told[0]), told[0].known) == (["127.0.0.1:9000"], frozenset())
        names.answer = ("10.0.0.1",)
        await eventually(lambda: told[-1].known == {"a"})
        assert addresses(told[-1]) == ["127.0.0.1:9000", "10.0.0.1:8000"]


async def test_names_are_resolved_as_the_machine_does() -> None:
    assert "127.0.0.1" in await resolve("localhost", 80)
    assert await resolve("127.0.0.2", 80) == ["127.0.0.2"]
    with pytest.raises(OSError, match="no host name"):
        await resolve("name..invalid", 80)


async def test_a_watched_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- {name: f-0, address: '10.0.0.1:8000'}")
    async with discovering(a_fleet({"file": "list.yaml"}), tmp_path) as told:
        assert addresses(told[0]) == ["10.0.0.1:8000"]
        path.write_text("- {name: f-0, address: '10.0.0.1:8000'}\n- {name: f-1, address: '10.0.0.2:8000'}")
        await eventually(lambda: addresses(told[-1]) == ["10.0.0.1:8000", "10.0.0.2:8000"])
        beside = tmp_path / "new"
        beside.write_text("- {name: f-2, address: '10.0.0.3:8000', draining: true}")
        beside.replace(path)
        await eventually(lambda: addresses(told[-1]) == ["10.0.0.3:8000"])
        assert told[-1].instances[0].draining
        path.write_text("[]")
        await eventually(lambda: addresses(told[-1]) == [])
        assert told[-1].known == {"a"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("- {name: f-0, address: '10.0.0.1:8000'", ""),
        ("- {name: f-0, address: somewhere}", "address"),
        ("- {name: f-0, address: '10.0.0.1:8000', colour: red}", "colour"),
        ("- {name: f-0, address: '10.0.0.1:8000', profile: unheard}", "unheard"),
        ("- {name: f-0, address: '10.0.0.1:8000', models: [unheard]}", "unheard"),
        ("12", ""),
        (None, "list.yaml"),
    ],
)
async def test_a_broken_file_keeps_the_last_good_list_and_is_reported_once(
    tmp_path: Path, text: str | None, word: str
) -> None:
    path = tmp_path / "list.yaml"
    good = "- {name: f-0, address: '10.0.0.1:8000'}"
    path.write_text(good)
    with capture_logs() as logs:
        async with discovering(a_fleet({"file": "list.yaml"}), tmp_path) as told:
            if text is None:
                path.unlink()
            else:
                path.write_text(text)
            await eventually(lambda: len(logs) == 1)
            await asyncio.sleep(0.05)  # ten more looks, none of which may say anything
            path.write_text(good + "\n")
            await eventually(lambda: len(logs) == 2)
            assert [addresses(one) for one in told] == [["10.0.0.1:8000"]]
    assert [log["event"] for log in logs] == ["instances_source_broken", "instances_source_back"]
    assert word in logs[0]["error"]


async def test_a_file_that_was_away_and_comes_back_unchanged_is_good_again(tmp_path: Path) -> None:
    path, aside = tmp_path / "list.yaml", tmp_path / "aside"
    path.write_text("- {name: f-0, address: '10.0.0.1:8000'}")
    with capture_logs() as logs:
        async with discovering(a_fleet({"file": "list.yaml"}), tmp_path):
            path.rename(aside)
            await eventually(lambda: len(logs) == 1)
            aside.rename(path)
            await eventually(lambda: len(logs) == 2)
    assert [log["event"] for log in logs] == ["instances_source_broken", "instances_source_back"]


async def test_of_two_instances_with_one_address_or_name_the_first_stands_and_is_reported(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text(
        "- {name: other, address: '127.0.0.1:9000'}\n- {name: s-0, address: '127.0.0.1:1'}\n"
        "- {name: fine, address: '127.0.0.1:2'}"
    )
    with capture_logs() as logs:
        async with discovering(a_fleet({"static": ONE}, {"file": "list.yaml"}), tmp_path) as told:
            assert [one.name for one in told[0].instances] == ["s-0", "fine"]
            (tmp_path / "list.yaml").write_text("- {name: other, address: '127.0.0.1:9000'}")
            await eventually(lambda: [one.name for one in told[-1].instances] == ["s-0"])
    assert [(log["event"], log["instance"]) for log in logs] == [
        ("instance_listed_twice", "other"),
        ("instance_listed_twice", "s-0"),
    ]


async def test_clusters_are_the_sites_addresses_in_order_and_unknown_sites_are_left_out() -> None:
    policy = a_policy()
    everything = Found(listed(policy), frozenset({"a", "b"}))
    assert clusters(policy, everything) == {
        "site-a": ("127.0.0.1:9100", "127.0.0.1:9101"),
        "site-b": ("127.0.0.1:9200", "127.0.0.1:9201"),
    }
    assert clusters(policy, Found(everything.instances, frozenset({"b"}))).keys() == {"site-b"}
    assert clusters(policy, Found((), frozenset({"a", "b"}))) == {"site-a": (), "site-b": ()}
