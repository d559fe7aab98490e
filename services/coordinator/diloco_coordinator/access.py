"""Who may do what: roles of tokens, and how often a token may ask.

Tokens are 256 random bits, so a plain digest of one cannot be reversed; only digests are kept.
"""

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

from diloco_shared.protocol.subjects import Id

# Each may do what the ones before it may: look; create, pause and stop runs; inflict faults;
# make and revoke tokens.
Role = Literal["viewer", "operator", "chaos", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "operator", "chaos", "admin")
# Tokens of one cluster: a person or a machine each.
TOKENS_MAX = 200


class TokenRecord(BaseModel):
    """A token as it is kept: never the token itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Id
    role: Role
    digest: str  # SHA-256 in hex
    created_at: float


def digest(token: str) -> str:
    """SHA-256 of a token, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def allows(role: Role, needed: Role) -> bool:
    """Whether a token of `role` may do what takes `needed`."""
    return ROLES.index(role) >= ROLES.index(needed)


@dataclass(slots=True)
class Keyring:
    """The tokens that are good now."""

    admin_digest: str
    tokens: dict[str, TokenRecord] = field(default_factory=dict)

    def role(self, token: str) -> tuple[str, Role] | None:
        """Name and role of a token, None if it is not good. Compares all, in constant time."""
        given = digest(token)
        found: tuple[str, Role] | None = None
        for record in self.tokens.values():
            if hmac.compare_digest(given, record.digest):
                found = (record.name, record.role)
        if hmac.compare_digest(given, self.admin_digest):
            found = ("admin", "admin")
        return found


@dataclass(slots=True)
class Meter:
    """A leaky bucket per caller: `burst` requests at once, `per_s` in the long run."""

    per_s: float
    burst: int
    callers_max: int = 1000
    levels: dict[str, tuple[float, float]] = field(default_factory=dict)  # caller -> level, when

    def admit(self, caller: str, now: float) -> float:
        """0 if the caller may go on, else the seconds it has to wait."""
        level, when = self.levels.pop(caller, (0.0, now))
        level = max(0.0, level - (now - when) * self.per_s)
        wait_s = 0.0 if level + 1 <= self.burst else (level + 1 - self.burst) / self.per_s
        self.levels[caller] = (level if wait_s else level + 1, now)
        while len(self.levels) > self.callers_max:
            self.levels.pop(next(iter(self.levels)))  # the one silent for the longest
        return wait_s
