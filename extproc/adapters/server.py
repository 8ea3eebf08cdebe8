"""gRPC: one coroutine a stream around one session.

The session says what to do; this file does it. ``except Exception`` stands once, here: a broken stream is aborted
while Envoy still needs us (a clean close would let the request through unrouted) and closed clean once it does not (an
abort would cut the running response). The same holds when the server drains.
"""

import asyncio
import itertools
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import structlog
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from extproc import session as table
from extproc.adapters import envoy, logs, openai
from extproc.model import Admit, Ending, Final, Outcome, Refuse, Request
from extproc.policy import Policy
from extproc.ports import Decider

log: structlog.stdlib.BoundLogger = structlog.get_logger()

_UNANSWERED = (table.State.START, table.State.BODY, table.State.DECIDING, table.State.ANSWERING)
_WRITTEN = table.Answered()


@dataclass(slots=True)
class Stats:
    """What this process has seen, for its metrics."""

    streams: int = 0
    open_streams: int = 0
    unreadable: dict[int, int] = field(default_factory=dict)
    passed: int = 0
    broken: int = 0
    verdicts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(kind, class) → count; kind is ``admit``, ``shadow`` or a reason."""


class Processor(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc] # the base is untyped
    """The ext_proc service of one process. *clock* is monotonic seconds."""

    def __init__(self, policy: Policy, decider: Decider, clock: Callable[[], float]) -> None:
        self.policy = policy
        self.decider = decider
        self.clock = clock
        self.reader = openai.Reader(policy)
        self.stats = Stats()
        self.draining = False
        self._streams: set[Stream] = set()
        self._ids = (f"{prefix}{n:x}" for prefix in (secrets.token_hex(8),) for n in itertools.count())

    async def Process(self, _: Any, context: grpc.aio.ServicerContext) -> None:  # noqa: ANN401, N802 - gRPC's own names
        """Serve one HTTP exchange."""
        stream = Stream(self, context, next(self._ids))
        self._streams.add(stream)
        self.stats.streams += 1
        self.stats.open_streams += 1
        try:
            await stream.run()
        finally:
            self.stats.open_streams -= 1
            self._streams.discard(stream)

    def drain(self) -> None:
        """Close every stream that Envoy needs no more, clean: it lets the responses finish.

        Streams in the middle of an answer or of a body finish that first. Held requests keep waiting for their verdict;
        whoever is still held when the server stops is aborted.
        """
        self.draining = True
        for stream in list(self._streams):
            stream.let_go()

    def held(self) -> int:
        """Return streams that have not had their routing answer."""
        return sum(stream.session.state in _UNANSWERED for stream in self._streams)


class Stream:
    """One ext_proc stream."""

    def __init__(self, processor: Processor, context: grpc.aio.ServicerContext, request_id: str) -> None:
        self.session = table.Session(most_bytes=processor.policy.gateway.max_body_bytes)
        self._processor = processor
        self._context = context
        self._id = request_id
        self._headers: dict[str, str] = {}
        self._metadata: dict[str, Any] = {}
        self._call: openai.Call | None = None
        self._request: Request | None = None
        self._bad: openai.BadRequest | None = None
        self._body = b""  # kept while held, if it may be altered
        self._reading: asyncio.Future[Any] | None = None
        self._task = asyncio.current_task()
        self._parked = False
        self._dismissed = False
        percent = processor.policy.gateway.steer_percent
        self._steered = percent >= 100 or random.random() * 100 < percent  # noqa: S311 - a share, not a secret

    async def run(self) -> None:
        """Serve until Envoy ends the stream."""
        try:
            await self._serve()
        except asyncio.CancelledError:
            if self._dismissed:
                return
            self._leave(table.Closed())
            raise
        except Exception:  # the stream boundary: whatever broke, the exchange must end the safe way
            self._processor.stats.broken += 1
            log.exception("stream broke", id=self._id, state=self.session.state.name)
            if any(isinstance(action, table.Abort) for action in self._leave(table.Broken())):
                await self._context.abort(grpc.StatusCode.INTERNAL, "internal error; see the server's log")
        finally:
            if self._reading is not None and not self._reading.done():
                self._reading.cancel()

    def let_go(self) -> None:
        """Close this stream clean if it only waits for Envoy to speak and owes it nothing.

        Its response goes on, so its place stays taken: the access log tells when it ends, or this process ends first.
        """
        if self._parked and self.session.at_rest and self._task is not None:
            self._dismissed = True
            self._task.cancel()

    async def _serve(self) -> None:
        session = self.session
        while session.state is not table.State.DONE:
            if self._processor.draining and session.at_rest:
                return
            message = await self._read()
            if message is grpc.aio.EOF:
                self._leave(table.Closed())
                return
            actions = session.handle(self._event(message))
            del message  # a held request must not keep its body twice
            if actions and isinstance(actions[0], table.Ask):
                found = self._ask(actions[0].body)
                del actions
                answer = found if isinstance(found, table.Decided | table.Unreadable) else await self._wait(found)
                if answer is None:
                    continue  # Envoy spoke first: the next message tells why
                actions = session.handle(answer)
            for action in actions:
                if isinstance(action, table.Cancel):
                    self._settle(Ending.CANCELLED)
                else:
                    await self._context.write(self._response(action))
            if session.state is table.State.ANSWERING:
                session.handle(_WRITTEN)

    async def _read(self) -> Any:  # noqa: ANN401 - a message or EOF
        reading, self._reading = self._reading, None
        self._parked = True
        try:
            return await (self._context.read() if reading is None else reading)
        finally:
            self._parked = False

    def _event(self, message: pb.ProcessingRequest) -> table.Event:
        if not message.HasField("request_headers"):
            return envoy.decode(message)
        processor = self._processor
        self._headers = headers = envoy.headers_of(message.request_headers, processor.reader.headers)
        self._metadata = envoy.metadata_of(message)
        method = headers.get(":method", "")
        self._call = openai.classify_path(method, headers.get(":path", ""))
        if self._call is not None:
            return envoy.decode(message, inference=True)
        refused = self._steered and (processor.policy.gateway.other_paths == "refuse" or not openai.passes(method))
        processor.stats.passed += not refused
        return envoy.decode(message, refused=refused)

    def _response(self, action: table.Action) -> pb.ProcessingResponse:
        match action:
            case table.Steer(phase, admit, body):
                return self._steer(phase, admit, body)
            case table.Continue(phase):
                return envoy.proceed(phase)
            case table.Echo():
                return envoy.echo(action)
            case table.Turn(refuse):
                return _answer(openai.refusal("openai" if self._request is None else self._request.api, refuse))
            case table.Explain() if self._bad is not None:
                return _answer(openai.reply_for(self._bad))
            case table.TooLarge(most):
                api = "openai" if self._call is None else self._call.api
                self._count_unreadable(413)
                message = f"the body has more than {most} bytes; at most that many are taken"
                return _answer(openai.reply_for(openai.BadRequest(413, message, None, "request_too_large", api)))
            case table.NotFound():
                message = f"no such path: {self._headers.get(':method')} {self._headers.get(':path')}"
                return _answer(openai.reply_for(openai.BadRequest(404, message, None, "not_found", "openai")))
            case _:
                raise TypeError(f"no response for {type(action).__name__}")

    def _steer(self, phase: table.Phase, admit: Admit, body: bytes | None) -> pb.ProcessingResponse:
        explained = self._request is not None and self._request.debug
        why = envoy.explain(admit.why, admit.instance, admit.site, admit.klass) if explained else None
        return envoy.steer(phase, admit, self._id, why=why, body=body)

    def _ask(self, body: bytes) -> table.Decided | table.Unreadable | Awaitable[Final]:
        """Return what becomes of the request, or the wait for it."""
        processor = self._processor
        request = processor.reader.read(self._id, self._headers, self._metadata, body, processor.clock())
        if isinstance(request, openai.BadRequest):
            self._count_unreadable(request.status)
            if not self._steered:  # the engine may answer what we cannot read
                return table.Decided(Admit("", "", "", (), "", steer=False, would=f"unreadable_{request.status}"))
            self._bad = request
            return table.Unreadable()
        if not self._steered:
            request = replace(request, steer=False)
        self._request = request
        self._headers, self._metadata = {}, {}  # a held request keeps only what it needs
        if processor.policy.gateway.alter_body != "never":
            self._body = body
        found = processor.decider.offer(request)
        return self._decided(request, found) if isinstance(found, Admit | Refuse) else found

    async def _wait(self, found: Awaitable[Final]) -> table.Decided | None:
        held = asyncio.ensure_future(found)
        self._reading = asyncio.ensure_future(self._context.read())
        await asyncio.wait({held, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        if self._request is None or not held.done() or held.cancelled():
            return None
        return self._decided(self._request, held.result())

    def _decided(self, request: Request, verdict: Final) -> table.Decided:
        self._note(request, verdict)
        body, self._body = self._body, b""
        return table.Decided(verdict, self._altered(verdict, body))

    def _count_unreadable(self, status: int) -> None:
        counts = self._processor.stats.unreadable
        counts[status] = counts.get(status, 0) + 1

    def _altered(self, verdict: Final, body: bytes) -> bytes | None:
        policy = self._processor.policy
        if policy.gateway.alter_body == "never" or not isinstance(verdict, Admit) or not verdict.steer:
            return None
        return openai.with_priority(body, policy.slomax.by_name[verdict.klass].engine_priority)

    def _note(self, request: Request, verdict: Final) -> None:
        """Count the verdict and write its line."""
        if isinstance(verdict, Admit):
            kind = "admit" if verdict.steer else "shadow"
            line = {
                "id": request.id,
                "verdict": kind,
                "tenant": request.tenant,
                "model": request.model,
                "klass": verdict.klass,
                "site": verdict.site,
                "instance": verdict.instance,
                "hosts": verdict.hosts,
                "prompt_tokens": request.prompt_tokens,
                "why": verdict.why,
                "would": verdict.would,
                "alone": verdict.alone,
            }
        else:
            kind = str(verdict.reason)
            line = {
                "id": request.id,
                "verdict": "refuse",
                "reason": kind,
                "tenant": request.tenant,
                "model": request.model,
                "klass": verdict.klass,
                "prompt_tokens": request.prompt_tokens,
                "retry_after_s": verdict.retry_after_s,
                "alone": verdict.alone,
            }
        logs.direct.info("verdict", line)
        key = (kind, verdict.klass)
        self._processor.stats.verdicts[key] = self._processor.stats.verdicts.get(key, 0) + 1

    def _leave(self, event: table.Closed | table.Broken) -> list[table.Action]:
        """End the session and give back what it held."""
        actions = list(self.session.handle(event))
        for action in actions:
            match action:
                case table.Cancel():
                    self._settle(Ending.CANCELLED)
                case table.Settle():
                    self._settle(None)
                case _:
                    pass
        return actions

    def _settle(self, ending: Ending | None) -> None:
        self._processor.decider.settle(self._id, Outcome(ending))


def _answer(reply: openai.Reply) -> pb.ProcessingResponse:
    return envoy.answer(reply.status, reply.headers, reply.body, reply.details)
