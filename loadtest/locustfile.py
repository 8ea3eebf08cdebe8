"""Conversations against any OpenAI-compatible URL: ``locust -f loadtest/locustfile.py --host http://127.0.0.1:8080``.

Each simulated user talks: a system prompt that its tenant's users share, then turn after turn, each with all that was
said before, so that prefixes grow as they do in life. Beside the POST, whose time is that of the whole answer, stand
rows ``TTFT`` and ``TPOT`` (ms) and ``tokens``, in whose columns of times stand an answer's output tokens. So locust's
tables, charts and CSV files show them, distributed runs too; when the run ends, a summary is printed.
"""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

from locust import FastHttpUser, events

PATH = "/v1/chat/completions"
ROWS = ("TTFT", "TPOT", "tokens")
WORDS = ("river", "budget", "morning", "engine", "letter", "garden", "signal", "market", "window", "harbour", "pepper")


def add_options(parser: Any) -> None:  # noqa: ANN401 - locust's own parser
    """Add our options to locust's command line and web form."""
    ours = parser.add_argument_group("TokenFleet")
    ours.add_argument("--model", env_var="TOKENFLEET_MODEL", default="qwen3-32b", help="Model to ask for.")
    ours.add_argument(
        "--api-keys",
        env_var="TOKENFLEET_API_KEYS",
        default="sk-demo-acme,sk-demo-globex,sk-demo-batchworks",
        help="Keys, one a tenant, comma-separated; users take turns. Empty sends none.",
    )
    ours.add_argument("--turns", type=int, default=6, help="Turns of a conversation before a new one begins.")
    ours.add_argument("--system-words", type=int, default=400, help="Length of the system prompt that a tenant shares.")
    ours.add_argument("--user-words", type=int, default=60, help="Mean length of a user's message.")
    ours.add_argument("--answer-tokens", type=int, default=120, help="max_tokens of each answer.")
    ours.add_argument("--think-s", type=float, default=2.0, help="Mean pause between two turns; exponential.")
    ours.add_argument("--seed", type=int, default=1, help="Seed of what is said; each user has its own stream.")


class Conversation:
    """What was said so far. The system prompt depends on *shared* alone, all else on *rng*."""

    def __init__(self, shared: str, system_words: int, rng: random.Random) -> None:
        self._rng = rng
        text = prose(random.Random(shared), system_words)
        self.messages = [{"role": "system", "content": f"You answer for {shared or 'anyone'}. {text}"}]
        self.turns = 0

    def ask(self, mean_words: int) -> list[dict[str, str]]:
        """Add a question and return all messages."""
        length = max(1, round(self._rng.expovariate(1 / mean_words)))
        self.messages.append({"role": "user", "content": prose(self._rng, length)})
        return self.messages

    def hear(self, answer: str) -> None:
        """Add the answer; the next question stands behind it."""
        self.messages.append({"role": "assistant", "content": answer})
        self.turns += 1


class Answer:
    """A streamed answer as it comes. Times are ``perf_counter`` seconds."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._first: float | None = None
        self._last = began
        self._chunks = 0
        self._counted: int | None = None
        self.text = ""
        self.error: str | None = None

    def take(self, event: dict[str, Any], now: float) -> None:
        """Take one event. An error inside a 200 is an error."""
        if "error" in event:
            self.error = str(event["error"])
            return
        if usage := event.get("usage"):
            self._counted = usage.get("completion_tokens")
        delta = (event.get("choices") or [{}])[0].get("delta") or {}
        said = delta.get("content") or delta.get("reasoning_content") or ""
        if said or delta.get("tool_calls"):
            self._first = self._first or now
            self._last = now
            self._chunks += 1
            self.text += said

    @property
    def tokens(self) -> int:
        """Output tokens as the engine counted them; chunks where it did not."""
        return self._chunks if self._counted is None else self._counted

    def rows(self) -> Iterator[tuple[str, float]]:
        """Yield (row, value): milliseconds, or tokens."""
        if self._first is None:
            return
        yield "TTFT", (self._first - self._began) * 1000
        if self.tokens > 1:
            yield "TPOT", (self._last - self._first) * 1000 / (self.tokens - 1)
        yield "tokens", float(self.tokens)


class Talker(FastHttpUser):  # type: ignore[misc] # locust is untyped
    """One user of one tenant."""

    started = 0
    network_timeout = 600.0

    def on_start(self) -> None:
        """Take a key and begin to talk."""
        options = self.environment.parsed_options
        keys = [key.strip() for key in options.api_keys.split(",") if key.strip()] or [""]
        number, Talker.started = Talker.started, Talker.started + 1
        runner = self.environment.runner
        worker = getattr(runner, "worker_index", 0)
        self.key = keys[number % len(keys)]
        self.rng = random.Random(f"{options.seed}/{worker}/{number}")
        self.talk = self._new_talk()

    def wait_time(self) -> float:
        """Return how long the user thinks, seconds."""
        mean = self.environment.parsed_options.think_s
        return self.rng.expovariate(1 / mean) if mean > 0 else 0.0

    def turn(self) -> None:
        """Ask once; begin anew after the last turn, and after a failure, as people do."""
        options = self.environment.parsed_options
        body = {
            "model": options.model,
            "messages": self.talk.ask(options.user_words),
            "max_tokens": options.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = self._stream(body)
        if answer is None:
            self.talk = self._new_talk()
            return
        self.talk.hear(answer.text)
        for row, value in answer.rows():
            self._report(row, value)
        if self.talk.turns >= options.turns:
            self.talk = self._new_talk()

    tasks = [turn]  # noqa: RUF012 - locust's own convention

    def _stream(self, body: dict[str, Any]) -> Answer | None:
        """Return the whole answer, or ``None`` for a failure, which is reported."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        began = time.perf_counter()
        with self.client.post(PATH, json=body, headers=headers, stream=True, catch_response=True) as response:
            answer = Answer(began)
            try:
                problem = _read(response, answer)
            except OSError as error:
                problem = f"cut while streaming: {type(error).__name__}"
            response.request_meta["response_time"] = (time.perf_counter() - began) * 1000
            response.request_meta["response_length"] = len(answer.text)
            if problem is not None:
                response.failure(problem)
                return None
        return answer

    def _report(self, row: str, value: float) -> None:
        self.environment.events.request.fire(
            request_type=row, name=PATH, response_time=value, response_length=0, exception=None, context={}
        )

    def _new_talk(self) -> Conversation:
        return Conversation(self.key, self.environment.parsed_options.system_words, self.rng)


def _read(response: Any, answer: Answer) -> str | None:  # noqa: ANN401 - locust is untyped
    """Read a stream to its end into *answer*; return what went wrong, or ``None``."""
    if response.status_code != 200:
        return f"{response.status_code or 'no answer'}: {_reason(response)}"
    done = False
    # Line by line: locust's iter_content waits until a whole block is there, and no first token would be seen in time.
    while line := response.stream.readline(b"\n"):
        data = bytes(line).strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            done = True
        elif data.startswith(b"{"):
            answer.take(json.loads(data), time.perf_counter())
    response.release()
    return answer.error or (None if done else "the stream ended without [DONE]")


def _reason(response: Any) -> str:  # noqa: ANN401 - locust is untyped
    """Return the error's code, the same for all alike: locust counts failures by their text."""
    try:
        error = json.loads(response.content or b"{}").get("error") or {}
        return str(error.get("code") or error.get("type") or error.get("message") or "no reason given")
    except (ValueError, AttributeError, OSError):
        return "no reason given"


def prose(rng: random.Random, words: int) -> str:
    """Return so many words."""
    return " ".join(rng.choices(WORDS, k=words))


def summary(stats: Any) -> str:  # noqa: ANN401 - locust is untyped
    """Return the run in a few lines; *stats* are locust's own, whose percentiles are rounded to two digits."""
    rows = {row: stats.get(PATH, row) for row in ROWS}
    asked = stats.get(PATH, "POST")
    if not rows["tokens"].num_requests:
        return f"TokenFleet: no answer of {asked.num_requests} requests had a token"
    lines = [f"TokenFleet: {asked.num_requests} requests, {asked.num_failures} failed"]
    for row in ("TTFT", "TPOT"):
        at = [rows[row].get_response_time_percentile(share) or 0 for share in (0.5, 0.95, 0.99)]
        lines.append(f"  {row} ms: p50 {at[0]:.0f}, p95 {at[1]:.0f}, p99 {at[2]:.0f}")
    tokens = rows["tokens"].total_response_time
    seconds = max((stats.last_request_timestamp or 0) - stats.start_time, 1e-3)
    lines.append(f"  output tokens: {tokens:.0f}, {tokens / seconds:.1f} a second")
    return "\n".join(lines)


def print_summary(environment: Any, **_: object) -> None:  # noqa: ANN401 - locust is untyped
    """Print the summary where the figures of the whole run are: on a worker they are not."""
    if type(environment.runner).__name__ != "WorkerRunner":
        print(summary(environment.stats))  # noqa: T201 - the end of a command-line run


events.init_command_line_parser.add_listener(add_options)
events.quitting.add_listener(print_summary)
