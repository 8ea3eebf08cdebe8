"""Three real llama.cpp servers behind us: a real model answers, is cancelled, and reuses a prefix."""

import json
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import fetch, wait_for
from tests.e2e.test_up import Up, an_up

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_spec("xllamacpp") is None, reason="pip install 'tokenfleet[llama]'"),
]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with an_up(tmp_path_factory.mktemp("llama"), "--engines", "llama.cpp") as running:
        running.greeted()
        yield running


def url_of(up: Up, name: str) -> str:
    line = next(line for line in up.text.splitlines() if line.strip().startswith(name))
    return next(word for word in line.split() if word.startswith("http"))


def ask(up: Up, text: str, **fields: Any) -> urllib.request.Request:
    body = {"model": fleet(up)["models"][0], "max_tokens": 8, "messages": [{"role": "user", "content": text}]} | fields
    return urllib.request.Request(
        f"{url_of(up, 'TokenFleet is up:')}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "tokenfleet-debug": "1"},
    )


def fleet(up: Up) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fetch(url_of(up, "fleet"))[1])
    return found


def running_of(up: Up) -> float:
    return sum(float(one["running"] + one["waiting"]) for site in fleet(up)["sites"] for one in site["instances"])


def test_a_real_model_streams_an_answer(up: Up) -> None:
    with urllib.request.urlopen(ask(up, "Tell me a story", stream=True), timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line]
    assert "site=paris" in answer.headers["x-tokenfleet-why"]
    assert lines[-1] == "data: [DONE]"
    assert len([line for line in lines if '"content"' in line]) >= 8


def test_a_cancelled_answer_frees_the_engine_and_our_count(up: Up) -> None:
    answer = urllib.request.urlopen(
        ask(up, "Go on for ever", stream=True, max_tokens=4000, ignore_eos=True), timeout=30
    )
    answer.readline()
    assert fleet(up)["in_flight"] == 1
    answer.close()
    wait_for(lambda: fleet(up)["in_flight"] == 0, "our count is zero")
    wait_for(lambda: running_of(up) == 0, "the engine is idle")


def test_a_prefix_is_reused_on_the_instance_that_has_it(up: Up) -> None:
    story = "A long introduction that every question shares. " * 60
    served: list[str] = []
    cached = 0
    for question in ("first", "second", "third"):
        with urllib.request.urlopen(ask(up, story + question), timeout=30) as answer:
            usage = json.loads(answer.read())["usage"]
        served.append(answer.headers["x-tokenfleet-why"].partition("instance=")[2].split()[0])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert len(set(served)) == 1
    assert cached > 200


def test_both_sites_are_seen_ready(up: Up) -> None:
    states = {one["name"]: one["state"] for site in fleet(up)["sites"] for one in site["instances"]}
    assert states == {"paris-1": "ready", "paris-2": "ready", "virginia-1": "ready"}
    assert Path(up.folder / "run" / "paris-1.log").exists()
