"""gRPC: one coroutine a stream around one session.

The session says what to do; this file does it. ``except Exception`` stands once, here: a broken stream is aborted
before the routing answer (a clean close would let the request through unrouted) and closed clean after it (an abort
would cut the running response). The same holds when the server drains.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from extproc import session as table
from extproc.adapters import envoy, openai
from extproc.model import Admit, Ending, Final, Outcome, Refuse, Request
from extproc.policy import Policy
from extproc.ports import Decider

log: structlog.stdlib.BoundLogger = structlog.get_logger()

_ANSWERED = (table.State.ROUTED, table.State.PASSING)
"""Envoy has its answer: a clean close now lets the exchange finish."""


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
        self._streams: dict[Stream, asyncio.Task[None]] = {}

    async def Process(self, _: Any, context: grpc.aio.ServicerContext) -> None:  # noqa: ANN401, N802 - gRPC's own names
        """Serve one HTTP exchange."""
        stream = Stream(self, context)
        task = asyncio.current_task()
        if task is not None:
            self._streams[stream] = task
        self.stats.streams += 1
        self.stats.open_streams += 1
        try:
            await stream.run()
        finally:
            self.stats.open_streams -= 1
            self._streams.pop(stream, None)

    def drain(self) -> None:
        """Close every stream that has its routing answer, clean: Envoy lets the responses finish.

        Held requests keep waiting for their verdict; whoever is still held when the server stops is aborted.
        """
        self.draining = True
        for stream, task in list(self._streams.items()):
            if stream.session.state in _ANSWERED:
                task.cancel()

    def held(self) -> int:
        """Return streams that have not had their routing answer."""
        open_states = (table.State.START, table.State.BODY, table.State.DECIDING)
        return sum(stream.session.state in open_states for stream in self._streams)


class Stream:
    """One ext_proc stream."""

    def __init__(self, processor: Processor, context: grpc.aio.ServicerContext) -> None:
        self.session = table.Session(refuse_others=processor.policy.gateway.other_paths == "refuse")
        self._processor = processor
        self._context = context
        self._id = secrets.token_hex(8)
        self._headers: dict[str, str] = {}
        self._metadata: dict[str, Any] = {}
        self._call: openai.Call | None = None
        self._request: Request | None = None
        self._bad: openai.BadRequest | None = None
        self._reading: asyncio.Future[Any] | None = None

    async def run(self) -> None:
        """Serve until Envoy ends the stream."""
        try:
            await self._serve()
        except asyncio.CancelledError:
            if self._let_go():
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

    async def _serve(self) -> None:
        while self.session.state is not table.State.DONE:
            if self._let_go():
                return
            message = await self._read()
            if message is grpc.aio.EOF:
                self._leave(table.Closed())
                return
            event = self._event(message)
            del message  # a held request must not keep its body twice
            await self._advance(event)

    def _let_go(self) -> bool:
        """Tell whether to close this stream clean because the server drains.

        Its response goes on, so its place stays taken: the access log tells when it ends, or this process ends first.
        """
        return self._processor.draining and self.session.state in _ANSWERED

    async def _read(self) -> Any:  # noqa: ANN401 - a message or EOF
        if self._reading is None:
            return await self._context.read()
        reading, self._reading = self._reading, None
        return await reading

    def _event(self, message: pb.ProcessingRequest) -> table.Event:
        if message.WhichOneof("request") != "request_headers":
            return envoy.decode(message)
        self._headers = envoy.headers_of(message.request_headers)
        self._metadata = envoy.metadata_of(message)
        self._call = openai.classify_path(self._headers.get(":method", ""), self._headers.get(":path", ""))
        if self._call is None:
            self._processor.stats.passed += 1
        return envoy.decode(message, inference=self._call is not None)

    async def _advance(self, event: table.Event) -> None:
        """Handle *event* and all that follows from it."""
        todo: deque[table.Action] = deque(self.session.handle(event))
        while todo:
            match todo.popleft():
                case table.Ask(body):
                    answer = await self._ask(body)
                    if answer is not None:
                        todo.extend(self.session.handle(answer))
                case table.Cancel():
                    self._settle(Ending.CANCELLED)
                case action:
                    await self._context.write(self._response(action))

    def _response(self, action: table.Action) -> pb.ProcessingResponse:
        match action:
            case table.Continue(phase):
                return envoy.proceed(phase)
            case table.Echo():
                return envoy.echo(action)
            case table.Steer(phase, admit, body):
                return self._steer(phase, admit, body)
            case table.Turn(refuse):
                return _answer(openai.refusal("openai" if self._request is None else self._request.api, refuse))
            case table.Explain() if self._bad is not None:
                return _answer(openai.reply_for(self._bad))
            case table.NotFound():
                message = f"no such path: {self._headers.get(':method')} {self._headers.get(':path')}"
                return _answer(openai.reply_for(openai.BadRequest(404, message, None, "not_found", "openai")))
            case _:
                raise TypeError(f"no response for {type(action).__name__}")

    def _steer(self, phase: table.Phase, admit: Admit, body: bytes | None) -> pb.ProcessingResponse:
        explained = self._request is not None and self._request.debug
        why = envoy.explain(admit.why, admit.instance, admit.site, admit.klass) if explained else None
        return envoy.steer(phase, admit, self._id, why=why, body=body)

    async def _ask(self, body: bytes) -> table.Event | None:
        """Return what the decider says, or ``None`` when Envoy spoke first: the next message tells why."""
        processor = self._processor
        request = processor.reader.read(self._id, self._headers, self._metadata, body, processor.clock())
        if isinstance(request, openai.BadRequest):
            self._bad = request
            processor.stats.unreadable[request.status] = processor.stats.unreadable.get(request.status, 0) + 1
            return table.Unreadable()
        self._request = request
        self._headers, self._metadata = {}, {}  # a held request keeps only what it needs
        if processor.policy.gateway.alter_body == "never":
            body = b""
        found = processor.decider.offer(request)
        verdict = found if isinstance(found, Admit | Refuse) else await self._wait(asyncio.ensure_future(found))
        if verdict is None:
            return None
        self._note(request, verdict)
        return table.Decided(verdict, self._altered(verdict, body))

    async def _wait(self, held: asyncio.Future[Final]) -> Final | None:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._context.read())
        await asyncio.wait({held, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        return held.result() if held.done() and not held.cancelled() else None

    def _altered(self, verdict: Final, body: bytes) -> bytes | None:
        policy = self._processor.policy
        if policy.gateway.alter_body == "never" or not isinstance(verdict, Admit) or not verdict.steer:
            return None
        return openai.with_priority(body, policy.slomax.by_name[verdict.klass].engine_priority)

    def _note(self, request: Request, verdict: Final) -> None:
        """Count the verdict and write its line."""
        if isinstance(verdict, Admit):
            kind = "admit" if verdict.steer else "shadow"
            log.info(
                "verdict",
                id=request.id,
                verdict=kind,
                tenant=request.tenant,
                model=request.model,
                klass=verdict.klass,
                site=verdict.site,
                instance=verdict.instance,
                hosts=verdict.hosts,
                prompt_tokens=request.prompt_tokens,
                why=verdict.why,
                alone=verdict.alone,
            )
        else:
            kind = str(verdict.reason)
            log.info(
                "verdict",
                id=request.id,
                verdict="refuse",
                reason=kind,
                tenant=request.tenant,
                model=request.model,
                klass=verdict.klass,
                prompt_tokens=request.prompt_tokens,
                retry_after_s=verdict.retry_after_s,
                alone=verdict.alone,
            )
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
