"""Who may do what: scopes of tokens, what they are limited to, and how often anybody may ask.

Tokens are 256 random bits, so a plain digest of one cannot be reversed; only digests are kept.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

from diloco_shared.protocol.subjects import Id

# Look; submit, change and stop runs, and tell members to leave; inflict faults; make, change and
# revoke tokens, and read the audit log. None includes another.
Scope = Literal["read", "operate", "fault", "administer"]
SCOPES: tuple[Scope, ...] = ("read", "operate", "fault", "administer")
# Up to release 0.2 a token had one of these instead, each of which included those before it.
RUNGS: dict[str, tuple[Scope, ...]] = {
    "viewer": SCOPES[:1],
    "operator": SCOPES[:2],
    "chaos": SCOPES[:3],
    "admin": SCOPES,
}
# A name, or the beginning of names with a * behind it.
Pattern = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z0-9][a-z0-9-]{0,62}\*?)$")]
# SHA-256 in hex, or none: what is compared must be of this alphabet.
Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
# Runs or sites that one token may name: a token is a person's or a machine's, and a record small.
PATTERNS_MAX = 32
# Tokens of one cluster: a person or a machine each.
TOKENS_MAX = 200
# Who has the token of the coordinator's own file. No other token may have this name.
ADMIN = "admin"
# How long a token is good for unless somebody says otherwise, and at most if it ends at all.
EXPIRY_DAYS, EXPIRY_DAYS_MAX = 90.0, 3650.0
DAY_S = 86_400.0
# How long a token's old secret stays good beside the new one, so that its users can be changed over
# one by one; and at most: a secret that is replaced since it leaked must end some day.
OVERLAP_S, OVERLAP_S_MAX = 600.0, 7 * DAY_S
# Secrets that one token may be replacing at a time, beside the newest of them: whoever rotates it
# for want of an answer does so a few times.
EARLIER_MAX = 4


class TokenRecord(BaseModel):
    """A token as it is kept: never the token itself. Times are seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Id
    scopes: tuple[Scope, ...] = Field(min_length=1)
    runs: tuple[Pattern, ...] = Field((), max_length=PATTERNS_MAX)  # none: not limited to any
    sites: tuple[Pattern, ...] = Field((), max_length=PATTERNS_MAX)  # names of members
    digest: Digest
    created_at: float
    created_by: str = ""
    expires_at: float | None = None  # None: never
    used_at: float | None = None  # to some minutes
    rotated_at: float | None = None
    previous_digest: Digest = ""  # what is being replaced, good until `previous_until`
    previous_until: float = 0.0
    # Digests that were being replaced when the token was rotated once more, and their ends: the
    # answer to the first time may have been lost, and nobody has the secret that it made.
    earlier: tuple[tuple[Digest, float], ...] = Field((), max_length=EARLIER_MAX)

    @model_serializer(mode="wrap")
    def _without_what_is_rare(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As an older release can read it, but for tokens that have earlier secrets."""
        found: dict[str, Any] = handler(self)
        if not self.earlier:
            found.pop("earlier", None)
        return found

    @model_validator(mode="before")
    @classmethod
    def _of_a_rung(cls, given: Any) -> Any:
        """A record of release 0.2 has a role: the scopes of that rung."""
        if isinstance(given, dict) and "role" in given and "scopes" not in given:
            rest = {key: value for key, value in given.items() if key != "role"}
            return {**rest, "scopes": RUNGS.get(str(given["role"]), ())}
        return given

    @field_validator("scopes")
    @classmethod
    def _each_once(cls, scopes: tuple[Scope, ...]) -> tuple[Scope, ...]:
        return tuple(scope for scope in SCOPES if scope in scopes)

    @property
    def limited(self) -> bool:
        """Whether it is good for named runs or sites alone."""
        return bool(self.runs or self.sites)

    @property
    def everywhere(self) -> "TokenRecord":
        """Without its limits: what it may do to somebody."""
        return self.model_copy(update={"runs": (), "sites": ()})

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at

    def rotated(self, new_digest: str, now: float, overlap_s: float) -> "TokenRecord":
        """With a new secret for as long again; the old one ends after the overlap."""
        life_s = None
        if self.expires_at is not None:
            life_s = self.expires_at - (self.rotated_at or self.created_at)
        until = (
            now + overlap_s if self.expires_at is None else min(now + overlap_s, self.expires_at)
        )
        before = self.replaced(now) if overlap_s else ()
        return self.model_copy(
            update={
                "digest": new_digest,
                "rotated_at": now,
                "expires_at": None if life_s is None else now + life_s,
                "previous_digest": self.digest if overlap_s else "",
                "previous_until": until if overlap_s else 0.0,
                "earlier": before[:EARLIER_MAX],
            }
        )

    def replaced(self, now: float) -> tuple[tuple[str, float], ...]:
        """(digest, end) of secrets that are being replaced and are still good, newest first."""
        all_of_them = (self.previous_digest, self.previous_until), *self.earlier
        return tuple((digest, until) for digest, until in all_of_them if now < until)


ADMINISTRATOR = TokenRecord(name=ADMIN, scopes=SCOPES, digest="", created_at=0.0)


def digest(token: str) -> str:
    """SHA-256 of a token, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def matches(patterns: Sequence[str], name: str) -> bool:
    """Whether one of the patterns is the name, or its beginning with a * behind it."""
    return any(name.startswith(p[:-1]) if p.endswith("*") else name == p for p in patterns)


def hindrance(
    token: TokenRecord,
    scope: Scope,
    run: str | None = None,
    member: str | None = None,
    *,
    now: float,
) -> str:
    """Why a token may not do what takes `scope` to a run or a member; "" if it may.

    With neither it concerns the cluster. Of a member, `run` is the one that it works for, or "".
    A limit closes all that it does not name: who is limited to runs may tell no member to leave
    unless sites are named as well, and the other way round. Reading is limited by runs alone; what
    is read of the cluster is for the route to leave things out of.
    """
    if token.expired(now):
        return f"the token {token.name!r} has expired: ask an administrator to rotate it"
    if scope not in token.scopes:
        return f"the token {token.name!r} may {' and '.join(token.scopes)}; this needs {scope}"
    foreign_run = f"the token {token.name!r} is limited to the runs {' '.join(token.runs)}"
    if scope == "read":
        return foreign_run if run and token.runs and not matches(token.runs, run) else ""
    if not token.limited:
        return ""
    if member is not None:
        if not matches(token.sites, member):
            named = f"the members {' '.join(token.sites)}" if token.sites else "runs"
            return f"the token {token.name!r} is limited to {named}"
        return foreign_run if run and token.runs and not matches(token.runs, run) else ""
    if run is None:
        return f"the token {token.name!r} is limited to some runs or sites; this is the cluster's"
    if not token.runs:
        return f"the token {token.name!r} is limited to the members {' '.join(token.sites)}"
    return "" if matches(token.runs, run) else foreign_run


def sees(token: TokenRecord | None, run: str) -> bool:
    """Whether what is shown of the cluster to a token's owner may tell of a run. None: of all."""
    return token is None or not run or not token.runs or matches(token.runs, run)


@dataclass(slots=True)
class Keyring:
    """The tokens that there are, expired ones too."""

    tokens: dict[str, TokenRecord] = field(default_factory=dict)

    def find(self, given: str, admins: Sequence[str], now: float) -> TokenRecord | None:
        """Whose the token of this digest is, None if nobody's. Compares all, in constant time.

        `admins`: the digests that are the administrator's.
        """
        found: TokenRecord | None = None
        for record in self.tokens.values():
            for good in (record.digest, *(old for old, _ in record.replaced(now))):
                if hmac.compare_digest(given, good):
                    found = record
        for admin in admins:
            if hmac.compare_digest(given, admin):
                found = ADMINISTRATOR
        return found


# --- who asks -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Asking:
    """One request: who asks for what. What is not known at first is added as it becomes known."""

    address: str
    scope: Scope
    given: str = ""  # digest of the token that came with it
    token: TokenRecord | None = None
    target: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def actor(self) -> str:
        """The token's name; "" if nobody knows it."""
        return self.token.name if self.token else ""


# Of the request that is being answered, and of what it has set going; None where nobody asked.
ASKING: ContextVar[Asking | None] = ContextVar("asking", default=None)


def actor() -> str:
    """Whose request this is done for; "" if for nobody's."""
    asking = ASKING.get()
    return asking.actor if asking else ""


def asker() -> TokenRecord | None:
    """The token of the request that is being answered; None where nobody asked."""
    asking = ASKING.get()
    return asking.token if asking else None


# --- how often ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Meter:
    """A leaky bucket per caller: `burst` requests at once, `per_s` in the long run."""

    per_s: float
    burst: int
    callers_max: int = 1000
    levels: dict[str, tuple[float, float]] = field(default_factory=dict)  # caller -> level, when

    def wait_s(self, caller: str, now: float) -> float:
        """0 if the caller might go on, else the seconds it had to wait. Counts nothing."""
        level = self._level(caller, now)
        return 0.0 if level + 1 <= self.burst else (level + 1 - self.burst) / self.per_s

    def admit(self, caller: str, now: float) -> float:
        """0 if the caller may go on, else the seconds it has to wait."""
        wait_s, level = self.wait_s(caller, now), self._level(caller, now)
        self.levels.pop(caller, None)
        self.levels[caller] = (level if wait_s else level + 1, now)
        while len(self.levels) > self.callers_max:
            self.levels.pop(next(iter(self.levels)))  # the one silent for the longest
        return wait_s

    def _level(self, caller: str, now: float) -> float:
        level, when = self.levels.get(caller, (0.0, now))
        return max(0.0, level - (now - when) * self.per_s)


@dataclass(slots=True)
class Door:
    """Bounds failed attempts per origin, so that nobody can try many tokens.

    It is for tokens that somebody chose, and that may be guessed; who has a random one right does
    not come by here. While an origin has failed too often, a good token from there is refused as a
    bad one is: the answers say nothing about what was tried. A token that came in from there before
    still does, so a stranger behind the same address locks nobody out.
    """

    failures: Meter
    known_max: int = 1000
    known: dict[tuple[str, str], None] = field(default_factory=dict)  # (origin, token's name)

    def knock(self, origin: str, name: str, now: float) -> float:
        """0 if the attempt is to be looked at, else the seconds to wait. `name` "": a bad token."""
        wait_s = self.failures.wait_s(origin, now)
        if wait_s and (origin, name) not in self.known:
            return wait_s
        if name:
            self.known.pop((origin, name), None)
            self.known[origin, name] = None
            while len(self.known) > self.known_max:
                self.known.pop(next(iter(self.known)))
            return 0.0
        return self.failures.admit(origin, now)


def origin_of(address: str) -> str:
    """What attempts from an address count for: of IPv6 its /64, which is one household's."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
