"""The next release, as far as others can tell: it says so, and every message of it has more fields.

python tests/next_release.py MODULE [ARGUMENT ...]     starts a process of it
"""

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import diloco_shared
from diloco_shared.protocol import wire
from diloco_shared.protocol.messages import Message

VERSION = "9.9.0"
# In every message, and in every message within one.
MORE = {"of_the_next_release": {"a": [1, 2], "b": "text"}, "more": 1}


def with_more(message: Message, body: dict[str, Any]) -> dict[str, Any]:
    """`body` as the next release may write it."""
    for name in type(message).model_fields:
        body[name] = _inside(getattr(message, name), body[name])
    return {**body, **MORE}


def _inside(value: Any, written: Any) -> Any:
    if isinstance(value, Message):
        return with_more(value, written)
    if isinstance(value, tuple):
        return tuple(_inside(v, w) for v, w in zip(value, written, strict=True))
    return written


@contextmanager
def speaking(every: int = 1) -> Iterator[None]:
    """So many-th a message that is put into bytes meanwhile is one of the next release."""
    plain: Callable[..., dict[str, Any]] = Message.model_dump
    number = count()

    def dumped(self: Message, **options: Any) -> dict[str, Any]:
        body = plain(self, **options)
        asked = sys._getframe(1).f_globals["__name__"] == wire.__name__
        return with_more(self, body) if asked and next(number) % every == 0 else body

    Message.model_dump = dumped  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Message.model_dump = plain  # type: ignore[method-assign]


if __name__ == "__main__":
    diloco_shared.VERSION = VERSION
    del sys.argv[0]
    with speaking():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
