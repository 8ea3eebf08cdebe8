"""The two programs: simulated instances, and llama.cpp's server with the generated model."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from extproc.model import Profile
from loadtest.engine.__main__ import Place, read_place
from loadtest.engine.tiny_model import Shape, vocabulary, write_model

ROOT = Path(__file__).parents[3]


@contextmanager
def a_program(module: str, *args: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """Start *module* and yield it with its ports; it is gone afterwards."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            assert program.stdout is not None
            ready = json.loads(program.stdout.readline())
            assert ready["ready"] is True
            yield program, ready["ports"]
        finally:
            program.kill()


def ask(port: int, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "tell me a story " * 20}], "max_tokens": 8} | fields
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read().decode()
    return text if fields.get("stream") else json.loads(text)


def stops(program: subprocess.Popen[str]) -> int:
    program.send_signal(signal.SIGTERM)
    return program.wait(timeout=30)


def test_one_process_hosts_several_instances_and_ends_clean() -> None:
    places = ["--instance", "a-0:0:m", "--instance", "a-1:0:org/m:q4:glm-5-fp8-h200x8-sglang"]
    with a_program("loadtest.engine", *places, "--time-scale", "0.1") as (program, ports):
        assert ask(ports["a-0"], model="m")["usage"]["completion_tokens"] == 8
        assert ask(ports["a-1"], model="org/m:q4")["model"] == "org/m:q4"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(ports["a-1"], model="m")
        assert stops(program) == 0


def test_sigterm_lets_a_running_answer_end() -> None:
    with a_program("loadtest.engine", "--instance", "a-0:0:m", "--drain-s", "30") as (program, ports):
        body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 60, "stream": True}).encode()
        url = f"http://127.0.0.1:{ports['a-0']}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
            answer.readline()
            program.send_signal(signal.SIGTERM)
            assert answer.read().decode().rstrip().endswith("[DONE]")
        assert program.wait(timeout=30) == 0


def test_an_instance_is_named_by_name_port_model_and_perhaps_profile() -> None:
    profiles = {"fast": Profile("fast", 1, 1, 1, 1)}
    assert read_place("a:1:m", profiles) == Place("a", 1, "m", "default")
    assert read_place("a:1:m:fast", profiles) == Place("a", 1, "m", "fast")
    assert read_place("a:1:m:latest", profiles) == Place("a", 1, "m:latest", "default")
    with pytest.raises(ValueError, match="values to unpack"):
        read_place("a:1", profiles)


def test_the_generated_model_is_the_same_each_time_and_knows_every_byte_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_model(tmp_path / f"{name}.gguf", Shape(width=32, hidden=64))
    data = (tmp_path / "one.gguf").read_bytes()
    assert data == (tmp_path / "two.gguf").read_bytes()
    assert data[:4] == b"GGUF"
    assert len(set(vocabulary())) == 259
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.gguf", "two.gguf"]


def test_llama_cpp_streams_and_finds_a_repeated_prompt_in_its_cache() -> None:
    pytest.importorskip("xllamacpp")
    with a_program("loadtest.engine.llamacpp", "--alias", "tiny") as (program, ports):
        first = ask(ports["tiny"], model="tiny")
        again = ask(ports["tiny"], model="tiny")
        streamed = ask(ports["tiny"], model="tiny", stream=True, stream_options={"include_usage": True})
        assert stops(program) == 0
    assert first["usage"]["completion_tokens"] == 8
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    assert len([line for line in streamed.splitlines() if '"content":"' in line]) == 8
    assert streamed.rstrip().endswith("[DONE]")
