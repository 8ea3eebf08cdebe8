"""Readings in Redis: one hash, field = instance name, value = when it ends (Redis's clock, ms) and the msgpack row.

One hash because it is read in one round trip, written atomically, and stays on one node of a Redis Cluster. Fields
expire by that number and not by Redis itself, whose hash fields have had an expiry only since 7.4; the hash as a whole
expires with its last field. Works on Redis 5 and newer, and on Valkey.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from extproc.model import Reading
from extproc.ports import StoreAway

T = TypeVar("T")

KEY = "tokenfleet:readings"

# Rows that nobody renews (a collector that was restarted under another policy) are swept by whoever writes.
_WRITE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ends = string.format('%.0f:', now + ARGV[1])
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ends .. ARGV[i + 1]) end
if redis.call('HLEN', KEYS[1]) > (#ARGV - 1) / 2 then
  local rows = redis.call('HGETALL', KEYS[1])
  for i = 1, #rows, 2 do
    local till = tonumber(string.match(rows[i + 1], '^(%d+):'))
    if till == nil or till <= now then redis.call('HDEL', KEYS[1], rows[i]) end
  end
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return #ARGV
"""


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """How to reach Redis. ``rediss://`` speaks TLS; ``unix://`` a socket; a password may stand in the URL or a file."""

    url: str
    password_file: Path | None = None
    """Read at every connect, so that a rotated password is picked up."""
    ca: Path | None = None
    """Whom to trust; none takes the system's."""
    cert: Path | None = None
    key: Path | None = None
    """Our own certificate and key, where Redis asks for one."""


class RedisStore:
    """A :class:`extproc.ports.Store` in Redis. Reconnects by itself; no call takes longer than *timeout_s*."""

    def __init__(self, access: RedisAccess, *, timeout_s: float = 1.0, key: str = KEY) -> None:
        """Connect when first used. Raises :class:`ValueError` for a URL that is none."""
        self._timeout_s = timeout_s
        self._key = key
        self._redis: Redis = Redis.from_url(access.url, **_options(access, timeout_s))
        self._put = self._redis.register_script(_WRITE)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reading)
        self._decoded: dict[bytes, tuple[bytes, Reading | None]] = {}

    async def write(self, readings: Sequence[Reading], expire_s: float) -> None:
        """See :class:`extproc.ports.Store`."""
        if not readings:
            return
        rows: list[bytes | str | int] = [max(1, round(expire_s * 1000))]
        for reading in readings:
            rows += (reading.instance.name, self._encoder.encode(reading))
        await self._ask(self._put(keys=[self._key], args=rows))

    async def drop(self, names: Sequence[str]) -> None:
        """See :class:`extproc.ports.Store`."""
        if names:
            await self._ask(self._redis.hdel(self._key, *names))

    async def read(self) -> Sequence[Reading]:
        """See :class:`extproc.ports.Store`. Rows that this version cannot read are left out."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.time()
        pipe.hgetall(self._key)
        (seconds, micros), rows = await self._ask(pipe.execute())
        now = seconds * 1000 + micros // 1000
        living = {name: row for name, value in rows.items() if (row := _living(value, now)) is not None}
        # Most rows are as they were 100 ms ago: decode what changed.
        self._decoded = {name: self._decode(name, row) for name, row in living.items()}
        return [reading for name in sorted(self._decoded) if (reading := self._decoded[name][1]) is not None]

    async def close(self) -> None:
        """See :class:`extproc.ports.Store`."""
        try:
            await self._ask(self._redis.aclose())
        except StoreAway:
            return

    def _decode(self, name: bytes, row: bytes) -> tuple[bytes, Reading | None]:
        known = self._decoded.get(name)
        if known is not None and known[0] == row:
            return known
        try:
            return row, self._decoder.decode(row)
        except msgspec.MsgspecError:
            return row, None

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreAway(str(error) or type(error).__name__) from error


def _living(value: bytes, now_ms: int) -> bytes | None:
    ends, _, row = value.partition(b":")
    return row if ends.isdigit() and int(ends) > now_ms else None


def _options(access: RedisAccess, timeout_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # Once again, on a new connection: the pooled one may be from before a restart of Redis.
        "retry": Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        "client_name": "tokenfleet",
        "protocol": 2,  # understood by every version and by proxies
    }
    if access.password_file is not None:
        options["credential_provider"] = _PasswordFile(access.password_file, parse_url(access.url).get("username"))
    if access.url.startswith("rediss://"):
        options |= {"ssl_min_version": ssl.TLSVersion.TLSv1_2}
        files = {"ssl_ca_certs": access.ca, "ssl_certfile": access.cert, "ssl_keyfile": access.key}
        options |= {name: str(path) for name, path in files.items() if path is not None}
    return options


class _PasswordFile(CredentialProvider):
    def __init__(self, path: Path, username: str | None) -> None:
        self._path = path
        self._username = username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._path.read_text(encoding="utf-8").strip()
        except OSError as error:
            # As an OSError the client would report it as one of the connection, and name the socket.
            raise AuthenticationError(f"password file: {error}") from error
        return (password,) if self._username is None else (self._username, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()
