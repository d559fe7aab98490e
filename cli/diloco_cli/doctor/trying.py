"""Which rights an identity has at the hub: what is tried, and what the outcomes say. Pure.

Every try is without effect: subjects of a run that cannot be, or a subscription for a moment. The
table of rights (`bus.nats.rights`) says what must be allowed to each role and what refused; the
role whose row the hub keeps is the identity's.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from diloco_cli.doctor.judging import Finding, failed
from diloco_shared.bus.nats.keys import inbox_of
from diloco_shared.bus.nats.rights import ROLES, Identity, Rights, Role, rights_of
from diloco_shared.protocol import subjects

# No id begins so: nobody is called that, and no run.
NOBODY = "_doctor"
# An id that is not the identity's own, and that nobody needs.
_ANOTHER = "not-this-one"


class Try(NamedTuple):
    """May this identity publish, or subscribe, there?"""

    kind: Literal["publish", "subscribe"]
    subject: str

    def allowed_by(self, rights: Rights) -> bool:
        if self.kind == "publish":
            return rights.may_publish(self.subject)
        return rights.may_subscribe(self.subject)


def tries(me: str) -> tuple[Try, ...]:
    """Of a process with this member id: the first few tell roles apart, the rest nobody may."""
    return (
        Try("publish", upload_subject("learner", me)),
        Try("publish", f"dn.{NOBODY}.x"),
        Try("publish", f"tape.{NOBODY}.x"),
        Try("publish", subjects.chaos(NOBODY)),
        Try("subscribe", subjects.grant(NOBODY, me)),
        Try("subscribe", subjects.progress(NOBODY, NOBODY)),
        Try("subscribe", subjects.lapsed_beat(NOBODY)),
        Try("subscribe", subjects.pull(NOBODY)),
        Try("subscribe", subjects.chaos("nats")),
        Try("subscribe", subjects.chaos(me)),
        Try("publish", upload_subject("learner", NOBODY)),
        Try("subscribe", f"{inbox_of(NOBODY)}.x"),
    )


def upload_subject(role: Role, me: str) -> str:
    """Where a probe may publish payloads that nobody hears; "" for a role that publishes none."""
    match role:
        case "learner":
            return f"up.{NOBODY}.{me}.x"
        case "syncer":
            return f"dn.{NOBODY}.x"
        case "coordinator":
            return subjects.chaos(NOBODY)
        case "supervisor" | "reader":
            return ""


class Outcome(NamedTuple):
    """`role` None: it is none that the table knows, or not this process's."""

    finding: Finding
    role: Role | None


def judged(identity: str, me: str, allowed: Sequence[bool]) -> Outcome:
    """Of an identity, for a process whose id is `me`: `allowed[i]` is the outcome of `tries[i]`."""
    made = tries(me)
    assert len(allowed) == len(made)
    for role in ROLES:
        if _row(role, me, identity, made) == tuple(allowed):
            if role not in ("learner", "reader") and identity != me:
                return Outcome(_not_mine(role, identity, me), None)
            may = sum(allowed)
            text = f"those of a {role}: of {len(made)} tries {may} are allowed, as it must be"
            return Outcome(Finding("rights", "ok", text), role)
    if _row("learner", _ANOTHER, identity, made) == tuple(allowed):
        return Outcome(_not_mine("learner", identity, me), None)
    return Outcome(_odd(identity, me, made, allowed), None)


def _row(role: Role, learner: str, identity: str, made: Sequence[Try]) -> tuple[bool, ...]:
    """What the table allows an identity of that role; of a learner's, one that speaks for it."""
    rights = rights_of(Identity(identity, role, (), (learner,) if role == "learner" else ()))
    return tuple(each.allowed_by(rights) for each in made)


def _not_mine(role: Role, identity: str, me: str) -> Finding:
    if role == "learner":
        return failed(
            "rights",
            f"the identity {identity} may not speak for {me}",
            f"set DILOCO_ID to one of its learners, or let it in at the hub: 'diloco site learners "
            f"{identity} --add {me} --hub FOLDER'",
        )
    return failed(
        "rights",
        f"these are the rights of the {role} {identity}, and DILOCO_ID is {me}",
        f"set DILOCO_ID={identity}, or give this process the credentials of {me}",
    )


def _odd(identity: str, me: str, made: Sequence[Try], allowed: Sequence[bool]) -> Finding:
    """Of no role: where it differs from the one that it resembles most."""
    rows = {role: _row(role, me, identity, made) for role in ROLES}
    role = max(rows, key=lambda r: sum(a == b for a, b in zip(rows[r], allowed, strict=True)))
    amiss = [
        f"may {'' if is_so else 'not '}{each.kind} {each.subject}"
        for each, is_so, wanted in zip(made, allowed, rows[role], strict=True)
        if is_so != wanted
    ]
    return failed(
        "rights",
        f"not those of any role; unlike a {role}, {identity} {', '.join(amiss)}",
        "have the hub's accounts.conf written anew by a 'diloco site' command, and the message "
        "server read it",
    )
