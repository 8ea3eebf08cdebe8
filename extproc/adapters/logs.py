"""Structured logs: one JSON object a line on standard output."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, BinaryIO

import orjson
import structlog
from structlog.typing import EventDict

_LEVELS = {"exception": "error", "warn": "warning"}
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_UTC_Z

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Direct:
    """Lines of level info that every request writes: the same line as structlog's, at a fraction of its cost."""

    def __init__(self) -> None:
        self._stream: BinaryIO | None = None
        self._configured = False

    def configure(self, stream: BinaryIO | None) -> None:
        """Write to *stream* from now on, nothing if that is ``None``."""
        self._stream, self._configured = stream, True

    def info(self, event: str, fields: dict[str, Any]) -> None:
        """Write one line; *fields* is changed."""
        if self._stream is not None:
            fields["event"] = event
            fields["level"] = "info"
            fields["timestamp"] = datetime.now(UTC)
            self._stream.write(orjson.dumps(fields, default=str, option=_OPTIONS | orjson.OPT_APPEND_NEWLINE))
            self._stream.flush()
        elif not self._configured:
            log.info(event, **fields)


direct = Direct()


def configure(level: str = "info") -> None:
    """Set structlog up for this process. Raises :class:`ValueError` for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}; use debug, info, warning or error")
    structlog.configure(
        processors=[
            structlog.processors.format_exc_info,
            _line,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )
    direct.configure(sys.stdout.buffer if number <= logging.INFO else None)


def _line(_: object, method: str, event: EventDict) -> bytes:
    """Add level and time and write JSON, in one step: a verdict's line costs a request microseconds."""
    event["level"] = _LEVELS.get(method, method)
    event["timestamp"] = datetime.now(UTC)
    return orjson.dumps(event, default=str, option=_OPTIONS)
