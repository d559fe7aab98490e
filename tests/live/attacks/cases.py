"""What an attack is here: who tries what, how it is refused, and where that is logged."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from live.attacks.scene import Scene

Play = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class How:
    """A way to be refused; whoever has seen it, with its line in a log, calls `seen`.

    `word`: what the list calls it.
    """

    word: str
    refused: str
    logged: str

    def seen(self, scene: Scene) -> None:
        scene.hows.add(self)


@dataclass(frozen=True, slots=True)
class Attack:
    """`play` carries it out, and asserts that it is refused and logged as `how` says."""

    kind: str
    name: str
    by: str
    how: How
    play: Play


ATTACKS: list[Attack] = []


def attack(kind: str, name: str, by: str, how: How) -> Callable[[Play], Play]:
    """Adds an attack to the list."""

    def add(play: Play) -> Play:
        assert name not in {a.name for a in ATTACKS}, name
        ATTACKS.append(Attack(kind, name, by, how, play))
        return play

    return add


# --------------------------------------------------------------------------------------------------
# Who attacks.

SITE = "credentials stolen from site b"
OWN_SITE = "credentials stolen from site a itself"
READER = "credentials of the role reader"
NOBODY = "somebody without credentials or token"
REVOKED_SITE = "credentials of a site that is revoked"
ROTATED_SITE = "credentials that were replaced"
INVENTED_SITE = "credentials that the hub never gave out"
BETWEEN = "somebody between a process and the hub"
READ = "a stolen token with the scope read"
OPERATE = "a stolen token with the scopes read and operate, for the run r alone"
OPERATOR = "a stolen token with the scopes read and operate"
EXPIRED = "a token that has expired"
REVOKED = "a token that is revoked"
ROTATED = "a token that was replaced"
GUESSER = "somebody who guesses tokens"

# --------------------------------------------------------------------------------------------------
# How they are refused at the message server.

RIGHTS = How(
    "no right",
    "The message server does not let this identity use that subject.",
    "log of the message server: the public key of the identity, its address and the subject",
)
BACK = How(
    "answer comes back",
    "The question is allowed; its answer goes back to who asked, wherever it was to go.",
    "nowhere: a question that is allowed was asked and answered, and nothing else happened",
)
NOT_STORED = How(
    "not stored",
    "The message server refuses to store it.",
    "nowhere but at the attacker: the message server answers who asked, and notes no refusal",
)
NOT_LET_IN = How(
    "not let in",
    "The message server ends the connection: the key is not one of its own.",
    "log of the message server: an authentication error with the address, and the key or name that "
    "was tried; whoever has neither is nobody",
)
NOT_ENCRYPTED = How(
    "TLS alone",
    "The message server talks to nobody without TLS.",
    "nowhere: nobody has said a name, and the message server notes no such connections",
)
SILENT = How(
    "cut off",
    "The message server ends the connection after two seconds.",
    "nowhere: nobody has said a name, and the message server notes no such connections",
)
TOO_LONG = How(
    "too long",
    "The message server takes no message above 2 MiB, and ends the connection.",
    "log of the message server: the excess, with the address of the connection",
)
NOT_TRUSTED = How(
    "not trusted",
    "The process ends the connection before it says who it is.",
    "the error of the process, which names the server; the attacker has said no name",
)

# --------------------------------------------------------------------------------------------------
# How processes refuse what the message server lets pass.

COUNTED = How(
    "counted",
    "The leader of the run refuses it.",
    "event `refused` with the learner, and the run's count of refusals",
)
LEFT_OUT = How(
    "left out",
    "The coordinator leaves it out: what it says of itself is not where it stands.",
    "log of the coordinator: the key or the subject, in which the attacker's learner stands",
)
ANSWERED_NO = How(
    "answered no",
    "The leader of the run answers that it may not, and why.",
    "log of the leading syncer: the learner, the data shard and the reason",
)
TAKEN_BACK = How(
    "taken back",
    "The leader of the run removes all that this learner has there, and the run goes on.",
    "event `flood` with the learner, and log of the leading syncer",
)
WITHOUT_ACTOR = How(
    "without it",
    "The event is shown without it: only what the hub tells says whose request it was.",
    "the event itself, with the learner",
)
UNFIT = How(
    "unfit",
    "The learner opens nothing and imports nothing; the run waits.",
    "the member's reason, which the run shows; the audit log has who submitted the run",
)

# --------------------------------------------------------------------------------------------------
# How the REST interface refuses.

UNKNOWN = How(
    "401, unknown",
    "401: nobody has that token.",
    "audit log: the address; there is no actor, since nobody has that token",
)
ENDED = How(
    "401, expired",
    "401: the token has expired.",
    "audit log: the name of the token, and the address",
)
SCOPE = How(
    "403", "403: the token does not allow it.", "audit log: the name of the token, and the address"
)
WAITS = How(
    "429",
    "429: the address has to wait, also with a right token.",
    "audit log: the address; there is no actor, since nobody has those tokens",
)
INVALID = How(
    "422", "422: what is wrong is named.", "audit log: the name of the token, and the address"
)
UNREADABLE = How(
    "400", "400 or 422: it is no JSON.", "audit log: the name of the token, and the address"
)
TOO_LARGE = How(
    "413",
    "413: a body may have 1 MiB.",
    "audit log: the name of the token, if one came along, and the address",
)
ABSENT = How(
    "404", "404: there is no such thing.", "audit log: the name of the token, and the address"
)
NO_PAGE = How(
    "404, of the page",
    "404: there is no such file of the page.",
    "nowhere: the page's own files are for everybody, and nothing else is looked for",
)
NO_REQUEST = How(
    "no request",
    "400, or the connection is closed: it is no request of HTTP.",
    "log of the coordinator; there is no actor, since no request could be read",
)
SLOW = How(
    "too slow",
    "The coordinator ends the connection.",
    "log of the coordinator: the address; there is no actor, since no request was complete",
)
ALONE = How(
    "no effect",
    "It is answered as if the trick were not there.",
    "audit log: the address that the connection came from, and the name of the token",
)
AS_TEXT = How(
    "text",
    "It is shown as text: the page sets text and no markup, and may run no other script.",
    "the event itself, with the learner",
)
