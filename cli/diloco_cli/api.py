"""What commands ask of a cluster's API, and what its refusals say to whoever typed them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from diloco_cli.cluster import Where, endpoint_of, token_of
from diloco_cli.words import CONFLICT, FAILED, INVALID, NO_CLUSTER, REFUSED, UNKNOWN, CliError
from diloco_client import ApiError, Client, Silent, Unanswered, Unreachable, Untrusted

_STATUSES = {
    401: REFUSED,
    403: REFUSED,
    404: UNKNOWN,
    409: CONFLICT,
    422: INVALID,
    502: NO_CLUSTER,
    503: NO_CLUSTER,
    504: NO_CLUSTER,
}


@contextmanager
def connect(where: Where) -> Iterator[Client]:
    """A client, for as long as it is needed; CliError says what is missing, was refused, or does
    not answer."""
    with _client(where) as client:
        try:
            yield client
        except (ApiError, Unreachable) as error:
            raise explained(error, where) from None


def answers(data: Path) -> bool:
    """Whether the coordinator of the cluster in `data` is ready. It knows that cluster's token. The
    coordinator of another cluster does not, which may have been quicker to take the port."""
    try:
        with connect(Where(data=data)) as client:
            return client.ready() and bool(client.access())
    except CliError:
        return False


def _client(where: Where) -> Client:
    if where.url and "://" not in where.url:
        raise CliError(f"--url {where.url}: begin it with http:// or https://", INVALID)
    url = where.url or endpoint_of(where.data)["url"]
    try:
        return Client(url, token_of(where), ca=where.ca)
    except ValueError as error:  # the authority's file, or an address
        raise CliError(str(error), INVALID) from None
    except ImportError as error:
        text = f"the proxy that ALL_PROXY, HTTPS_PROXY or HTTP_PROXY names cannot be used: {error}"
        raise CliError(f"{text} Or name the server's host in NO_PROXY", INVALID) from None


def explained(error: ApiError | Unreachable, where: Where) -> CliError:
    """The server's own words, fault by fault."""
    if isinstance(error, Untrusted):
        return CliError(str(error), NO_CLUSTER)
    if isinstance(error, Unanswered):
        return CliError(f"{error}: {_unanswered(error)}", NO_CLUSTER)
    if isinstance(error, Unreachable):
        return CliError(f"{error}: {_way_out(where)}", NO_CLUSTER)
    lines = [str(error)]
    lines += [f"  {fault['path']}: {fault['message']}" for fault in error.errors]
    if error.status == 401:
        expired = "has expired" in error.detail
        lines[0] = error.detail if expired else "the cluster does not know this token"
        lines[0] += ": give one with --token-file, DILOCO_TOKEN_FILE or DILOCO_TOKEN"
        lines[0] += "" if expired else "; the admin token is in the coordinator's data folder"
    return CliError("\n".join(lines), _STATUSES.get(error.status, FAILED))


def _unanswered(error: Unanswered) -> str:
    """What to do where a request was taken, and nobody knows what became of it."""
    if error.changes:
        return "what was asked for may have been done all the same, so look before you ask again"
    if isinstance(error, Silent):
        return "it may be busy, or wait for something itself, so try again in a few seconds"
    return "try again in a few seconds, and if that is no help, see that the address is right"


def _way_out(where: Where) -> str:
    """What to do where nobody answers."""
    if where.url:
        return "is it running there, and is the address right?"
    from diloco_cli.up.folder import supervisor_of

    if pid := supervisor_of(where.data):
        return (
            f"'diloco up' is running here (process {pid}) and starts a coordinator again that has "
            "ended: try again in a few seconds"
        )
    return "its 'diloco up' is not running any more: start it again"


def only_run(client: Client, name: str) -> dict[str, Any]:
    """The run of that name; without a name the one that people mean: the newest that is going on,
    or else the newest."""
    if name:
        return client.run(name)
    runs = sorted(client.runs(), key=lambda run: float(run["created_at"]))
    if not runs:
        raise CliError("there is no run: submit one with 'diloco submit run.toml'", UNKNOWN)
    going = [run for run in runs if run["state"] not in ("queued", "finished", "stopped")]
    return (going or runs)[-1]


def newest_rounds(client: Client, run: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The last `count` closed rounds, without reading the whole tape."""
    if run["status"] is None:
        return []  # before that there is no tape
    return client.rounds(run["name"], newest=count)


# Answers that a moment's trouble gives: the message server, or what stands before the API, is away.
PASSING = (502, 503, 504)
# What a coordinator answers that cannot read a record of the tape.
UNREADABLE = 409
# What a coordinator does that is there and tells no rounds: it reads them there.
WAITS = "it may be waiting for the message server, so try again in a few seconds"
T = TypeVar("T")
# Between two questions to a cluster that is restarted, in seconds.
AGAIN_S = 1.0


def passes(error: ApiError | Unreachable) -> bool:
    """Whether it may help to ask again in a moment."""
    if isinstance(error, ApiError):
        return error.status in PASSING
    return not isinstance(error, Untrusted)


class Unread(NamedTuple):
    """Why rounds could not be read. `passes`: they may be readable in a while."""

    why: str
    passes: bool


def rounds_or_why(
    ask: Callable[[], list[T]], *, damaged: bool = True
) -> tuple[list[T], Unread | None]:
    """The rounds and None, or none and why there are none: a coordinator reads them from the
    message server, and while that is away it tells all the same what it has heard.

    `damaged`: likewise of a tape that holds a record which it cannot read. That does not pass.
    """
    try:
        return ask(), None
    except Silent as error:
        return [], Unread(f"{error}: {WAITS}", passes=True)
    except ApiError as error:
        if error.status in PASSING or (damaged and error.status == UNREADABLE):
            return [], Unread(str(error), passes=error.status in PASSING)
        raise


class Patience:
    """Asks again where the cluster does not answer for a moment: it is being restarted."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.answered_at = limit_s, time.monotonic()

    @property
    def silent_s(self) -> float:
        """For how long there was no answer."""
        return time.monotonic() - self.answered_at

    def ask(self, what: Callable[[], T]) -> T | None:
        """The answer; None where there is none now. Raises what it raised once that lasts."""
        try:
            found = what()
        except (ApiError, Unreachable) as error:
            if not passes(error) or self.silent_s > self.limit_s:
                raise
            return None
        self.answered_at = time.monotonic()
        return found

    def insist(self, what: Callable[[], T]) -> T:
        """The answer, asked for until it comes. Raises what it raised once that lasts."""
        while (found := self.ask(lambda: (what(),))) is None:
            time.sleep(AGAIN_S)
        return found[0]
