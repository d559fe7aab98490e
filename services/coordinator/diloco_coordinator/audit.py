"""What was changed and what was refused, by whom: rows of the audit log, and how many of them.

Every change is a row. Refused requests are rows as well, as many as a stranger cannot fill a disk
with; how many were left out stands in the next row.
"""

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco_coordinator.access import Asking, Meter

# Rows that are answered from memory; those before them are in the files.
ROWS_KEPT = 1000
# Refused requests that become rows: so many at once, and one a second in the long run.
REFUSED_BURST, REFUSED_PER_S = 60, 1.0
# Of a value that a request brought: names have 63 characters, and no row is to grow beyond a line.
VALUE_MAX = 63
# Statuses of requests that were turned away at the door; of nobody's requests, all are.
REFUSED = (401, 403, 429)

Outcome = Literal["done", "refused", "failed"]


class AuditRow(BaseModel):
    """One request, as a line of JSON. `actor` is the token's name, "" if nobody knows it."""

    model_config = ConfigDict(frozen=True)
    seq: int
    at: float
    actor: str
    address: str
    method: str
    route: str
    target: dict[str, str] = Field(default_factory=dict)
    status: int
    outcome: Outcome
    why: str = ""  # title of the problem
    left_out: int = 0  # refused requests before this row that are no rows

    @property
    def line(self) -> bytes:
        """The row as a line of JSON, with its end. Fields that have their default are left out."""
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


def _readable(value: str) -> str:
    """Its beginning; half a character of JSON, which UTF-8 cannot say, as its number."""
    return value[:VALUE_MAX].encode("utf-8", "backslashreplace").decode()


@dataclass(slots=True)
class AuditTrail:
    """The newest rows, and the number of the next."""

    rows: deque[AuditRow] = field(default_factory=lambda: deque(maxlen=ROWS_KEPT))
    next_seq: int = 1
    left_out: int = 0
    refusals: Meter = field(default_factory=lambda: Meter(REFUSED_PER_S, REFUSED_BURST))

    def restore(self, lines: list[bytes]) -> None:
        """Rows of before; a line that was cut off, or is not ours, is passed over."""
        for line in lines:
            try:
                row = AuditRow.model_validate_json(line)
            except ValidationError:
                continue
            self.rows.append(row)
            self.next_seq = max(self.next_seq, row.seq + 1)

    def add(
        self, asking: Asking, method: str, route: str, status: int, *, at: float, now: float
    ) -> AuditRow | None:
        """The row of a request that was answered; None where it becomes none.

        `at` in seconds since 1970, `now` in those of a clock that never goes back.
        """
        refused = status in REFUSED or asking.token is None
        if not refused and (method in ("GET", "HEAD") or asking.scope == "read"):
            return None
        if refused and self.refusals.admit("", now):
            self.left_out += 1
            return None
        row = AuditRow(
            seq=self.next_seq,
            at=at,
            actor=asking.actor,
            address=asking.address[:VALUE_MAX],
            method=method,
            route=route,
            target={name: _readable(value) for name, value in asking.target.items()},
            status=status,
            outcome="refused" if refused else "done" if status < 400 else "failed",
            why=asking.problem,
            left_out=self.left_out,
        )
        self.next_seq, self.left_out = self.next_seq + 1, 0
        self.rows.append(row)
        return row

    def newest(self, limit: int, after: int, actor: str) -> list[AuditRow]:
        """The first `limit` rows after `after`, oldest first; after 0, the last ones."""
        found = [r for r in self.rows if r.seq > after and (not actor or r.actor == actor)]
        return found[:limit] if after else found[-limit:]


def row_view(row: AuditRow) -> dict[str, Any]:
    """For people and programs: every field."""
    view: dict[str, Any] = json.loads(row.model_dump_json())
    return view
