"""What comes of a request, an answer or an error, and how long it is waited for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

# How long an answer is waited for, in seconds, where a coordinator may take more than a moment. It
# limits itself, and says in words what did not answer it. Who gives up earlier never hears that,
# and does not know whether what was asked for is done. So each of these is more than the
# coordinator grants; tests/coordinator/api/test_granted.py compares them.

# On top of what is granted: the way there and back, and the message server, which is asked as well.
MARGIN_S = 10.0

# One checkpoint is looked at, begun, gone back to or exported. Its place is asked twice, for 30
# seconds each: where it is, and what is in it.
CHECKPOINT_S = 2 * 30.0 + MARGIN_S
# Checkpoints are listed: their place is asked where it is, and may take 60 seconds for a page.
LIST_S = 30.0 + 60.0 + MARGIN_S
# A checkpoint is removed, file by file: 300 seconds, after its place was asked twice.
REMOVE_S = 2 * 30.0 + 300.0 + MARGIN_S
# Closed rounds are read. The oldest lie beside the run's checkpoints: that place is asked where it
# is and what is in it, or twice what is in it, to find where the newest rounds begin.
ROUNDS_S = 2 * 30.0 + MARGIN_S
# A run begins, from a checkpoint perhaps: its place is asked twice, its text is counted, and the
# message server makes its streams.
SUBMIT_S = 2 * 30.0 + 60.0 + MARGIN_S
# A run is deleted. The message server removes one key for each data shard, of which there are at
# most 65,536: ten minutes are 9 ms for each.
DELETE_S = 600.0
# Checkpoints are listed by so many: each is a manifest to read within the 60 seconds.
PAGE = 100


# Asks for a page by calling what it is given, as often as it likes.
Asking = Callable[[Callable[[], dict[str, Any]]], dict[str, Any]]


def at_once(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """An `Asking` that asks once."""
    return ask()


# Where a reader of events stands: the number of the newest one that it has read, and that event's
# mark, which tells it from another that may get its number.
Cursor = tuple[int, str]
BEGINNING: Cursor = (0, "")


@dataclass(frozen=True, slots=True)
class Told:
    """Events after a cursor, and the cursor to go on with.

    `again`: events up to the cursor were lost, and others may have their numbers. Forget what was
    read: these are all that there are.
    """

    events: list[dict[str, Any]]
    cursor: Cursor
    again: bool


def began_anew(page: dict[str, Any], after: int) -> bool:
    """Whether a page of events says that those up to the number `after` were lost. A coordinator
    before 0.3 does not say so, and tells of what came instead."""
    events = page["events"]
    return bool(page.get("again")) or bool(events and events[0]["seq"] <= after)


class ApiError(Exception):
    """The server said no: `status`, `title`, `detail`, and per-field `errors` if there are any."""

    def __init__(
        self, status: int, title: str, detail: str, errors: list[dict[str, str]] | None = None
    ) -> None:
        super().__init__(f"{title}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.errors = errors or []


class Unreachable(Exception):
    """Nobody answers at the address."""


class Unanswered(Unreachable):
    """Somebody took the request, and no answer to it came.

    `changes`: whether it asked for a change, which may have been made all the same.
    """

    def __init__(self, message: str, *, changes: bool = False) -> None:
        super().__init__(message)
        self.changes = changes


class Silent(Unanswered):
    """Somebody took the request, and has not answered it in time."""


class Lost(Unanswered):
    """Somebody took the request, and the answer was lost on its way."""


class Untrusted(Unreachable):
    """Somebody answers, and cannot prove to be the server."""


def refusal(response: httpx.Response, url: str) -> ApiError:
    """Of an answer that is no success, from what answers at `url`."""
    if response.has_redirect_location:
        return _moved(response, url)
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):  # a proxy's page, perhaps
        problem = {}
    return ApiError(
        response.status_code,
        str(problem.get("title", response.reason_phrase)),
        str(problem.get("detail", response.text[:500])),
        problem.get("errors"),
    )


def _moved(response: httpx.Response, url: str) -> ApiError:
    """Where to ask instead. A token is sent nowhere but where it was meant to go, so nobody follows
    by himself. What stands behind a ? may be secret, and is not shown."""
    asked, to = response.request.url, response.request.url.join(response.headers["Location"])
    address = f"{to.scheme}://{to.netloc.decode('ascii')}{to.path}"
    below = asked.path.removeprefix(httpx.URL(url).path.rstrip("/"))
    if address.endswith(below):
        text = f"what answers at {url} sends on to {address.removesuffix(below)}: use that address"
    else:
        text = (
            f"what answers at {url} sends on to {address}, which is not where a coordinator "
            "answers that: is the address right, and does somebody have to sign in there?"
        )
    return ApiError(response.status_code, "The address is another one", text)


def read(response: httpx.Response, url: str, has: tuple[str, ...]) -> dict[str, Any]:
    """The JSON object of a success. ApiError for the page of something else, as of a proxy that
    asks for a password, and for JSON without what a coordinator would tell (`has`)."""
    try:
        found = response.json()
    except ValueError:
        found, what = None, "sends no JSON"
    else:
        what = "sends other JSON than a coordinator does"
    if isinstance(found, dict) and all(key in found for key in has):
        return found
    text = f"what answers at {url} {what}: is it the address of a coordinator?"
    raise ApiError(response.status_code, "No API there", text)


def part(name: str) -> str:
    """A name as one part of a path, whatever it contains.

    ApiError for `.` and `..`: whoever reads a path takes them for "here" and "one up", however they
    are written. So the request would reach something else, such as the run instead of its export.
    """
    if name in (".", ".."):
        raise ApiError(404, "No such name", f"nothing is called {name!r}")
    # Bytes of a terminal that are no UTF-8 come as halves of characters, which no name has.
    return quote(name, safe="", errors="backslashreplace") or "-"
