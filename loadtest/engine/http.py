"""An instance behind HTTP, looking like vLLM 0.32 from outside.

Headers of a streamed answer leave before its first token, errors after that come inside the 200, a call whose client
goes away is aborted at once.
"""

import asyncio
import socket
import struct
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace

import orjson
import xxhash
from aiohttp import web
from pydantic import ValidationError

from loadtest.engine.calls import READERS, BadCallError, Call, read_embedding
from loadtest.engine.faults import Fault
from loadtest.engine.instance import Answers, Instance, RefusedError
from loadtest.engine.replies import DONE, REPLIES, Reply, error_body, frame

MAX_BODY_BYTES = 256 * 1024 * 1024
INSTANCE: web.AppKey[Instance] = web.AppKey("instance", Instance)
VERSION = "0.32.0"
DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(instance: Instance) -> web.Application:
    """Return the web application of *instance*."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_in_its_way])
    app[INSTANCE] = instance
    app.on_response_prepare.append(_sign)
    for path in READERS:
        app.router.add_post(path, generate)
    app.router.add_post("/v1/embeddings", embed)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_get("/version", version)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/fault", read_fault)
    app.router.add_post("/fault", write_fault)
    app.router.add_get("/calls", calls)
    return app


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer an inference call of any API but embeddings."""
    instance = request.app[INSTANCE]
    instance.admit()
    call = _call(request, READERS[request.path](await _body(request)))
    request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
    reply = REPLIES[request.path](request_id, call.model, int(time.time()))
    answers = instance.start(call)
    try:
        return await (_stream if call.stream else _whole)(request, call, answers, reply)
    finally:
        instance.stop(answers)


async def embed(request: web.Request) -> web.StreamResponse:
    """Answer ``/v1/embeddings``: one unit vector a prompt, which depends on nothing but the prompt."""
    instance = request.app[INSTANCE]
    instance.admit()
    call = _call(request, read_embedding(await _body(request)))
    answers = instance.start(call)
    try:
        await _finished(request, answers)
    finally:
        instance.stop(answers)
    tokens = answers.usage().prompt
    return _json(
        {
            "id": f"embd-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": call.model,
            "data": [
                {"index": i, "object": "embedding", "embedding": unit_vector(prompt.seed)}
                for i, prompt in enumerate(call.prompts)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }
    )


async def models(request: web.Request) -> web.Response:
    """List the one model."""
    instance = request.app[INSTANCE]
    entry = {
        "id": instance.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": instance.model,
        "parent": None,
        "max_model_len": instance.profile.kv_tokens,
    }
    return _json({"object": "list", "data": [entry]})


async def health(_: web.Request) -> web.Response:
    """Answer 200, draining or not, once the model is loaded."""
    return web.Response()


async def version(_: web.Request) -> web.Response:
    """Say which vLLM this looks like."""
    return _json({"version": f"{VERSION}+simulated"})


async def metrics(request: web.Request) -> web.Response:
    """Return the exposition."""
    text = request.app[INSTANCE].exposition()
    return web.Response(body=text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})


async def calls(request: web.Request) -> web.Response:
    """Return the latest calls as they reached the engine; no part of vLLM."""
    return _json({"calls": list(request.app[INSTANCE].calls)})


async def read_fault(request: web.Request) -> web.Response:
    """Return the fault in force; no part of vLLM."""
    return _json(request.app[INSTANCE].fault.model_dump())


async def write_fault(request: web.Request) -> web.Response:
    """Set a fault (:class:`Fault`); no part of vLLM."""
    try:
        fault = Fault.model_validate_json(await request.read())
    except ValidationError as error:
        return _json(error_body(400, str(error), "BadRequestError"), 400)
    request.app[INSTANCE].set_fault(fault)
    return _json(fault.model_dump())


def unit_vector(seed: int, size: int = 64) -> list[float]:
    """Return *size* numbers of length 1, made from *seed*."""
    raw = [xxhash.xxh3_64_intdigest(i.to_bytes(2, "little"), seed) / 2**63 - 1 for i in range(size)]
    length = sum(x * x for x in raw) ** 0.5
    return [x / length for x in raw]


# --- answering --------------------------------------------------------------------------------------------------------


async def _stream(request: web.Request, call: Call, answers: Answers, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    await response.write(b"")
    opened = False
    while not answers.done or any(one.sent < one.stream.tokens for one in answers.all):
        await _news(answers)
        frames = [] if opened or not answers.tokens else [reply.opening(len(answers.all), answers.usage())]
        opened = opened or bool(answers.tokens)
        frames += _tokens(answers, reply)
        if frames:
            await response.write(b"".join(frames))
        if await _struck(request, answers):
            await response.write(frame(error_body(500, DEATH, "InternalServerError")) + DONE)
            return response
    await response.write(reply.closing([one.choice() for one in answers.all], answers.usage(), call.include_usage))
    return response


async def _whole(request: web.Request, call: Call, answers: Answers, reply: Reply) -> web.StreamResponse:  # noqa: ARG001 - like _stream
    await _finished(request, answers)
    return _json(reply.whole([one.choice() for one in answers.all], answers.usage()))


async def _finished(request: web.Request, answers: Answers) -> None:
    while not answers.done:
        await _news(answers)
        if await _struck(request, answers):
            raise RefusedError(500, DEATH, "InternalServerError")


async def _news(answers: Answers) -> None:
    await answers.changed.wait()
    answers.changed.clear()


def _tokens(answers: Answers, reply: Reply) -> list[bytes]:
    """Return what has left the engine since the last look."""
    frames = []
    for one in answers.all:
        while one.sent < one.stream.tokens:
            last = one.sent + 1 == len(one.words)
            frames.append(reply.token(one.index, one.words[one.sent], one.finish if last else None))
            one.sent += 1
    return frames


async def _struck(request: web.Request, answers: Answers) -> bool:
    """Return whether the engine dies here; reset the connection, and never return, if that is the fault."""
    instance = request.app[INSTANCE]
    if answers.tokens < instance.fault.after_tokens or answers.done:
        return False
    if instance.strikes("reset") and request.transport is not None:
        sock = request.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
        await asyncio.get_running_loop().create_future()  # cancelled when the connection is lost
    return instance.strikes("error_in_stream")


# --- asking -----------------------------------------------------------------------------------------------------------


def _call(request: web.Request, call: Call) -> Call:
    """Return *call* with the priority that its header sets, noted down; raise if the model is not ours."""
    instance = request.app[INSTANCE]
    headers = {name.lower(): value for name, value in request.headers.items()}
    tokens = sum(prompt.tokens for prompt in call.prompts)
    instance.calls.append({"path": request.path_qs, "headers": headers, "prompt_tokens": tokens})
    if call.model != instance.model:
        raise UnknownModelError(call.model)
    if (priority := headers.get("x-vllm-priority")) is None:
        return call
    try:
        return replace(call, priority=int(priority))
    except ValueError:
        raise BadCallError("X-Vllm-Priority must be an integer", "priority") from None


async def _body(request: web.Request) -> dict[str, object]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BadCallError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadCallError("the body must be a JSON object")
    return body


class UnknownModelError(Exception):
    """A model that this instance does not serve."""


@web.middleware
async def _in_its_way(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Hang while the instance hangs, and say every refusal in vLLM's shape."""
    instance = request.app[INSTANCE]
    if request.path == "/fault":
        return await handler(request)
    await instance.moving()
    try:
        if instance.loading:
            instance.admit()
        return await handler(request)
    except RefusedError as error:
        return _json(error_body(error.status, str(error), error.kind), error.status)
    except UnknownModelError as error:
        return _json(error_body(404, f"The model `{error}` does not exist.", "NotFoundError", "model"), 404)
    except BadCallError as error:
        return _json(error_body(400, str(error), "BadRequestError", error.param), 400)
    except ValueError as error:
        return _json(error_body(400, str(error), "BadRequestError"), 400)


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-engine-instance"] = request.app[INSTANCE].name


def _json(data: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")
