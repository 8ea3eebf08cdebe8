"""One scrape of one instance over HTTP: what was answered, as a value; nothing raised.

An engine may be ready, loading (503 or another 5xx on ``/health`` or the metrics page) or silent. One that answers but
publishes no metrics (404 and the like) is ready without numbers: the gateway's own counts must do.
"""

import errno
from dataclasses import dataclass

import aiohttp
import msgspec

from extproc.adapters.telemetry import dialects
from extproc.adapters.telemetry.dialect import Numbers
from extproc.model import Instance

_MOST_BYTES = 8 * 1024 * 1024
_NO_PAGE = frozenset({401, 403, 404, 405, 501})


@dataclass(frozen=True, slots=True)
class Good:
    """The instance serves."""

    numbers: Numbers
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """The instance says that it is not ready."""

    error: str


@dataclass(frozen=True, slots=True)
class Silent:
    """No usable answer; *refused* if nothing listens there."""

    error: str
    refused: bool = False


Answer = Good | Loading | Silent


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_MODELS = msgspec.json.Decoder(_Models)


async def numbers(session: aiohttp.ClientSession, instance: Instance) -> Answer:
    """Ask for the metrics page."""
    said = "no page asked for"
    for path in dialects.paths(instance.dialect):
        try:
            status, body = await _get(session, instance, path)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _silent(error)
        if status == 200:
            if (read := dialects.read(body.decode(errors="replace"), instance.dialect)) is not None:
                return Good(read)
            said = f"{path} speaks no known dialect"
        elif status in _NO_PAGE:
            said = f"{path} answered {status}"
        elif status == 503:
            return Loading(f"{path} answered 503")
        else:
            return Silent(f"{path} answered {status}")
    return Good(Numbers(), error=f"no metrics: {said}")


async def health(session: aiohttp.ClientSession, instance: Instance) -> Answer:
    """Ask whether the instance is well; one without such a path is."""
    try:
        status, _ = await _get(session, instance, "/health")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return _silent(error)
    return Loading(f"/health answered {status}") if status >= 500 and status not in _NO_PAGE else Good(Numbers())


async def models(session: aiohttp.ClientSession, instance: Instance) -> tuple[str, ...] | None:
    """Ask which models and adapters are loaded; ``None`` if the engine does not say. Raises :class:`TimeoutError`."""
    try:
        status, body = await _get(session, instance, "/v1/models")
        return tuple(one.id for one in _MODELS.decode(body).data) if status == 200 else None
    except msgspec.MsgspecError:
        return None
    except (aiohttp.ClientError, OSError) as error:
        raise TimeoutError(str(error)) from error


async def _get(session: aiohttp.ClientSession, instance: Instance, path: str) -> tuple[int, bytes]:
    async with session.get(f"http://{instance.address}{path}", allow_redirects=False) as answer:
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > _MOST_BYTES:
                raise aiohttp.ClientPayloadError(f"{path} is longer than {_MOST_BYTES} bytes")
        return answer.status, bytes(body)


def _silent(error: Exception) -> Silent:
    refused = isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED
    return Silent(str(error) or type(error).__name__, refused=refused)
