"""Logging: one line per event on standard error, as text for people or JSON for machines.

Secrets do not reach a log: values under telling names, and credentials within addresses, are
replaced. What libraries say by Python's own logging goes the same way. The size of a log file is
the business of who opened it, and what cannot be written there is lost: a full disk ends no process
that could go on.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, TextIO

import structlog

_SECRET_NAMES = re.compile(r"token|password|secret|authorization", re.IGNORECASE)
# user:password@ or token@ between the scheme and the host of an address.
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# asyncio's word for each encrypted connection of nats-py that the server ends: nothing is wrong.
_IDLE_TALK = "returning true from eof_received() has no effect when using ssl"
_LEVELS = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO)


def configure(level: str = "info", *, json: bool = False, file: TextIO | None = None) -> None:
    """Set up structlog for this process, to `file` instead; ValueError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r}: use debug, info, warning or error")
    renderer = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=False, pad_event_to=28)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            without_secrets,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _Lines(file or sys.stderr),
    )
    _take_in_libraries(max(number, logging.WARNING))


def _take_in_libraries(level: int) -> None:
    """Lines of libraries become lines as ours are, from `level` on: most tell of each request."""
    root = logging.getLogger()
    # Which some libraries set up when they are imported: each line would be there twice.
    plain = (logging.StreamHandler, _Library)
    root.handlers = [h for h in root.handlers if type(h) not in plain] + [_Library(level)]


class _Library(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            said = record.getMessage()
        except (TypeError, ValueError, KeyError):  # its arguments do not fit its text
            said = str(record.msg)
        if said == _IDLE_TALK:
            return
        level = next((n for n in _LEVELS if n <= record.levelno), logging.DEBUG)
        log = structlog.get_logger()
        log.log(level, said, library=record.name, exc_info=record.exc_info or None)


class _Lines(structlog.PrintLogger):
    def msg(self, message: str) -> None:
        with suppress(OSError):  # those that follow are written again once there is room
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def without_secrets(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """structlog processor: see the module's text."""
    for name, value in event.items():
        if isinstance(value, str):
            secret = _SECRET_NAMES.search(name) is not None
            event[name] = "***" if secret and value else _CREDENTIALS.sub("***", value)
    return event
