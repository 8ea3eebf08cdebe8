"""A client of a gateway."""

import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e.gateway import MODEL, Gateway

CHAT = "/v1/chat/completions"


def a_body(text: str = "Hello there, how are you today?", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": text}]} | fields


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def instance(self) -> str:
        return self.headers.get("x-engine-instance", "")

    @property
    def why(self) -> str:
        return self.headers.get("x-tokenfleet-why", "")


class Client:
    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.http = http

    async def post(self, body: Any, path: str = CHAT, headers: Mapping[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        # A file, since aiohttp warns of large bodies given as bytes.
        async with self.http.post(f"{self.gateway.url}{path}", data=io.BytesIO(data), headers=sent) as answer:
            text = await answer.text()
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
            return Answer(answer.status, answer.headers, text, [json.loads(line) for line in lines])

    async def call(self, method: str, path: str) -> Answer:
        async with self.http.request(method, f"{self.gateway.url}{path}") as answer:
            return Answer(answer.status, answer.headers, await answer.text())

    @asynccontextmanager
    async def stream(
        self, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give a streaming answer whose first token has come; leaving closes its connection."""
        sent = {"content-type": "application/json", **(headers or {})}
        data = json.dumps(body | {"stream": True}).encode()
        async with self.http.post(f"{self.gateway.url}{CHAT}", data=data, headers=sent) as answer:
            assert answer.status == 200, await answer.text()
            await answer.content.readline()
            yield answer
            answer.close()


@asynccontextmanager
async def a_client(gateway: Gateway) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=50)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        yield Client(gateway, http)
