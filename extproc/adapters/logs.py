"""Structured logs: one JSON object a line on standard output."""

import logging
import sys

import orjson
import structlog


def configure(level: str = "info") -> None:
    """Set structlog up for this process. Raises :class:`ValueError` for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}; use debug, info, warning or error")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )


def _dumps(value: object, default: object = None, **_: object) -> bytes:  # noqa: ARG001 - structlog's own signature
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
