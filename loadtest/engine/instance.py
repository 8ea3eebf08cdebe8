"""One simulated instance: its engine, its health, its faults. Knows no HTTP but the status of a refusal."""

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from extproc.model import Profile
from loadtest.engine.calls import Call
from loadtest.engine.core import Core, Order
from loadtest.engine.faults import Fault
from loadtest.engine.live import LiveCore, Stream
from loadtest.engine.metrics import EngineMetrics
from loadtest.engine.replies import Choice, Finish, Usage
from loadtest.engine.request import EngineRequest, Timing
from loadtest.engine.text import TOKEN_BYTES, Prompt, block_names, natural_length, words


class RefusedError(Exception):
    """The instance does not take a call: *status* and vLLM's error type say how."""

    def __init__(self, status: int, message: str, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """One choice under way."""

    index: int
    prompt: int
    """Which of the call's prompts it answers."""
    finish: Finish
    words: list[str]
    stream: Stream
    sent: int = 0

    @property
    def done(self) -> bool:
        """Whether the last token has left the engine."""
        return self.stream.timing is not None

    def choice(self) -> Choice:
        """Return the finished answer."""
        return Choice(self.index, "".join(self.words), self.finish)


@dataclass(slots=True)
class Answers:
    """All choices of one call; *changed* is set when any has news."""

    changed: asyncio.Event
    all: list[Answer] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether every choice is complete."""
        return all(one.done for one in self.all)

    @property
    def tokens(self) -> int:
        """Tokens that have left the engine."""
        return sum(one.stream.tokens for one in self.all)

    def usage(self) -> Usage:
        """Count the tokens; a prompt counts once however many choices it has, as in vLLM."""
        prompts = {one.prompt: one.stream for one in self.all}.values()
        return Usage(
            prompt=sum(one.request.prompt_tokens for one in prompts),
            cached=sum(one.cached_tokens for one in prompts),
            output=self.tokens,
        )


class Instance:
    """A named engine on a port.

    Parameters
    ----------
    scale
        Wall seconds per virtual second.
    load_s
        Wall seconds after the start during which everything is answered with 503.
    max_queued
        Waiting requests beyond which a call is refused with 503; ``None`` for no limit, as vLLM by default.
    """

    def __init__(
        self,
        name: str,
        model: str,
        profile: Profile,
        *,
        scale: float = 1.0,
        order: Order = "priority",
        load_s: float = 0.0,
        max_queued: int | None = None,
    ) -> None:
        self.name, self.model, self.profile = name, model, profile
        core = Core(profile, order)
        self.metrics = EngineMetrics(core, model, scale)
        self.live = LiveCore(core, scale, self._ended, self.metrics.stepped)
        self.fault = Fault()
        self.draining = False
        self.calls: deque[dict[str, Any]] = deque(maxlen=256)
        """The latest calls as they arrived, for tests that ask what reached the engine."""
        self._ready_at = monotonic() + load_s
        self._max_queued = max_queued
        self._reasons: dict[Hashable, Finish] = {}
        self._number = 0
        self._stale = b""
        self._moving = asyncio.Event()
        self._moving.set()
        self._recovery: asyncio.TimerHandle | None = None

    # --- health -------------------------------------------------------------------------------------------------------

    @property
    def loading(self) -> bool:
        """Whether the model is not there yet."""
        return monotonic() < self._ready_at or self.fault.kind == "loading"

    async def moving(self) -> None:
        """Return at once, or when a hang is over."""
        await self._moving.wait()

    def exposition(self) -> bytes:
        """Return the text of ``/metrics``."""
        return self._stale if self.fault.kind == "stale_metrics" else self.metrics.text()

    def set_fault(self, fault: Fault) -> None:
        """Put *fault* in place of the last one."""
        if self._recovery:
            self._recovery.cancel()
            self._recovery = None
        self._stale = self.metrics.text() if fault.kind == "stale_metrics" else b""
        self.fault = fault
        self.draining = fault.kind == "drain"
        self.live.set_slowdown(fault.factor if fault.kind == "slow" else 1.0)
        if fault.kind == "hang":
            self._moving.clear()
            self.live.freeze()
        else:
            self._moving.set()
            self.live.thaw()
        if fault.seconds is not None:
            self._recovery = asyncio.get_running_loop().call_later(fault.seconds, self.set_fault, Fault())

    def strikes(self, kind: str) -> bool:
        """Return whether the fault *kind* hits this call, and count it."""
        if self.fault.kind != kind:
            return False
        if self.fault.times == 1:
            self.set_fault(Fault())
        elif self.fault.times is not None:
            self.fault = self.fault.model_copy(update={"times": self.fault.times - 1})
        return True

    # --- work ---------------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Raise :class:`RefusedError` if no call can be taken now."""
        if self.loading:
            raise RefusedError(503, "The model is loading.", "ServiceUnavailableError")
        if self.draining:
            raise RefusedError(500, "cannot schedule new futures after shutdown", "InternalServerError")
        if self.strikes("503"):
            raise RefusedError(503, "The engine is overloaded.", "ServiceUnavailableError")
        if self._max_queued is not None and self.live.core.waiting >= self._max_queued:
            self.metrics.rejected += 1
            raise RefusedError(503, "The request queue is full.", "ServiceUnavailableError")

    def start(self, call: Call) -> Answers:
        """Put every choice of *call* into the engine. ``ValueError``, and none started, if one cannot fit."""
        self.metrics.asked(call.choices, call.limit)
        answers = Answers(asyncio.Event())
        try:
            for place, prompt in enumerate(call.prompts):
                names = self._names(prompt.data)
                for choice in range(call.choices):
                    request, text = self._request(call, prompt, names, choice)
                    finish: Finish = "length" if call.limit else "stop"
                    stream = self.live.submit(request, answers.changed)
                    self._reasons[request.id] = finish
                    answers.all.append(Answer(len(answers.all), place, finish, text, stream))
        except ValueError:
            self.stop(answers)
            raise
        return answers

    def stop(self, answers: Answers) -> None:
        """Abort what is still running."""
        for answer in answers.all:
            if not answer.done:
                self.live.abort(answer.stream.request.id)

    def close(self) -> None:
        """Stop for good."""
        if self._recovery:
            self._recovery.cancel()
        self.live.close()

    def _request(
        self, call: Call, prompt: Prompt, names: tuple[int, ...], choice: int
    ) -> tuple[EngineRequest, list[str]]:
        """Return a choice's request and the words of its answer."""
        length = call.limit or natural_length(prompt, choice)
        if prompt.tokens + length > self.profile.kv_tokens:
            raise ValueError(
                f"This model's maximum context length is {self.profile.kv_tokens} tokens. However, you requested "
                f"{length} output tokens and your prompt contains {prompt.tokens} input tokens."
            )
        text = words(prompt, length, choice)
        self._number += 1
        request = EngineRequest(
            id=self._number,
            prompt_tokens=prompt.tokens,
            output_tokens=length,
            blocks=names,
            output_blocks=self._names("".join(text).encode(), prompt.data, names),
            priority=call.priority,
        )
        return request, text

    def _names(self, data: bytes, before: bytes = b"", known: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Name the blocks of *data*, or those that *data* fills behind a prompt whose blocks are *known*."""
        size = self.profile.block_tokens * TOKEN_BYTES
        rest = before[len(known) * size :] + data
        return block_names(rest, self.profile.block_tokens, known[-1] if known else None)

    def _ended(self, timing: Timing) -> None:
        reason = self._reasons.pop(timing.id)
        self.metrics.ended(timing, "abort" if timing.ending == "aborted" else reason)
