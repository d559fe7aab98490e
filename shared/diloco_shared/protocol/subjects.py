"""Every subject, stream and bucket name, and the identifiers in them, in one place.

ctl.* and hb are plain publish/subscribe (lost is lost, repeated by design); up, dn, tape,
state and ev are kept in JetStream streams.
"""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import StringConstraints

# Key-value buckets.
MEMBERS = "members"  # `member_key` -> MemberRecord, per-key TTL
RUNS = "runs"  # <run> -> RunRecord
STATUS = "status"  # <run>, <run>.<syncer shard> from 1 on -> RunStatus
ASSIGNMENTS = "assignments"  # <member> -> Assignment
INCARNATIONS = "incarnations"  # `life_key` -> Incarnation
SHARDS = "shards"  # <run>.<data shard> -> ShardLease
PLACES = "places"  # <run>.<data shard>.<syncer shard> -> Place, by that shard's leader only
LEASES = "leases"  # <run>.<syncer shard> -> LeaderLease, per-key TTL
DELETED = "deleted"  # <id of a run> -> Deleted, per-key TTL
# The coordinator's own: NOTES <member>, TOKENS <name> (who may use its API), REPEATS <digest>.
NOTES, TOKENS, REPEATS = "notes", "tokens", "repeats"
PRIVATE_BUCKETS = (NOTES, TOKENS, REPEATS)
BUCKETS = (MEMBERS, RUNS, STATUS, ASSIGNMENTS, INCARNATIONS, SHARDS, PLACES, LEASES, DELETED)

# Keys of buckets stand below the first of these. Who has an identity at a hub writes them below the
# second one, which the hub's account translates (bus/nats/hub_config.py): a leaf node carries
# nothing of $KV.
KEYS, HUB_KEYS = "$KV", "KV"

EVENTS_STREAM = "EVENTS"
EVENTS_FILTER = "ev.>"

# Names that no run can have, since they stand where a run's name would stand: CLUSTER in subjects
# of events that concern no run, CHAOS in those that ask processes for faults.
CLUSTER, CHAOS = "cluster", "chaos"
NO_RUNS = (CLUSTER, CHAOS)


# Where every process has credentials of its own (`bus.Bus.named`), a learner's place is in its own
# name alone: with the run in it, a site could fill the hub with places in runs that do not exist.
# No run and no member is called so.
_LEARNER, _ANY_RUN, _BY = "LEARNER", "ANY", "BY"


def member_key(member: str, role: str, *, named: bool = False) -> str:
    """Key in MEMBERS. That of a learner says that it is one, and a site may write no other."""
    return f"{_LEARNER}.{member}" if named and role == "learner" else member


def member_of(key: str) -> str:
    """Whose key in MEMBERS it is."""
    return key.removeprefix(f"{_LEARNER}.")


def life_key(run: str, learner: str, *, named: bool = False) -> str:
    """Key in INCARNATIONS. A learner counts its lives through all its runs where it is named."""
    return f"{_ANY_RUN if named else run}.{learner}"


# Key in INCARNATIONS, of no learner: the first life of whoever is in no record. It is there once
# the hub was put back from a backup: who came after the backup may have had lives before.
FIRST_LIFE = "_first"


def up_stream(run: str) -> str:
    return f"UP-{run}"


def dn_stream(run: str) -> str:
    return f"DN-{run}"


def tape_stream(run: str) -> str:
    return f"TAPE-{run}"


def state_stream(run: str) -> str:
    return f"STATE-{run}"


# Of a run's streams: what stands before the run in their names.
STREAM_KINDS = ("UP", "DN", "TAPE", "STATE")


def run_stream(run: str, kind: str) -> str:
    return f"{kind}-{run}"


def run_streams(run: str) -> dict[str, str]:
    """Stream name -> the subject filter it captures."""
    return {
        up_stream(run): f"up.{run}.>",
        dn_stream(run): f"dn.{run}.>",
        tape_stream(run): f"tape.{run}.>",
        state_stream(run): f"state.{run}.>",
    }


def progress(run: str, learner: str) -> str:
    return f"ctl.{run}.progress.{learner}"


def speed(run: str, learner: str) -> str:
    """How fast a learner trains: for people, nobody acts on it."""
    return f"ctl.{run}.speed.{learner}"


def pull(run: str) -> str:
    return f"ctl.{run}.pull"


def beat(run: str) -> str:
    """The syncer's heartbeat: leader, state, versions."""
    return f"ctl.{run}.beat"


def lapsed_beat(run: str) -> str:
    """That of a leader whose lease is in doubt: for people, no learner may go by it."""
    return f"ctl.{run}.lapsed"


def join(run: str, learner: str) -> str:
    return f"ctl.{run}.join.{learner}"


def unsigned_join(run: str) -> str:
    """Where joins went up to release 0.2: anybody could join there in anybody's name."""
    return f"ctl.{run}.join"


def grant(run: str, learner: str) -> str:
    return f"ctl.{run}.grant.{learner}"


def donate(run: str, donor: str) -> str:
    return f"ctl.{run}.donate.{donor}"


def lease(run: str, learner: str) -> str:
    """A learner wants the lease of a data shard, or gives it back: asked of the leader of shard 0,
    who writes it (bucket SHARDS)."""
    return f"ctl.{run}.lease.{learner}"


def forget_state(run: str, newcomer: str) -> str:
    """The state that was sent to a learner is in use: asked of leaders, who remove it."""
    return f"ctl.{run}.forget.{newcomer}"


def states_of(run: str, newcomer: str) -> str:
    """Filter of all that was sent to a newcomer, or to a standby."""
    return f"state.{run}.*.{newcomer}.>"


def chaos(target: str) -> str:
    """Faults for one process; answered by its agent. Not tied to a run."""
    return f"ctl.{CHAOS}.{target}"


def tape(run: str, shard: int) -> str:
    return f"tape.{run}.{shard}"


def leader_lease(run: str, shard: int) -> str:
    """Key in LEASES."""
    return f"{run}.{shard}"


def status_key(run: str, shard: int) -> str:
    """Key in STATUS."""
    return f"{run}.{shard}" if shard else run


def snapshot_wish(run: str, shard: int) -> str:
    """A standby asks the leader for its newest snapshot; answered at once, sent later."""
    return f"ctl.{run}.snapshot.{shard}"


def snapshot_wish_to(run: str, shard: int, syncer: str) -> str:
    """The same, of one syncer, whether it leads or not."""
    return f"{snapshot_wish(run, shard)}.{syncer}"


def event(run: str, kind: str) -> str:
    """`run` is CLUSTER for what concerns no run."""
    return f"ev.{run}.{kind}"


def event_by(learner: str) -> str:
    """Where a learner's own events go that has credentials of its own: one subject for all of them,
    of which the stream keeps so many."""
    return f"ev.{_BY}.{learner}"


def told_by(subject: str) -> str:
    """The learner whose subject of events it is; "" for one that is of no learner alone."""
    kind, _, rest = subject.partition(".")
    by, _, learner = rest.partition(".")
    return learner if (kind, by) == ("ev", _BY) else ""


def contribution(run: str, learner: str, epoch: int, fragment: int, round_: int, term: int) -> str:
    """Without a trailing `.m`; a learner answers each (term, round) once."""
    return f"up.{run}.{learner}.{epoch}.{fragment}.{round_}.{term}"


def initial(run: str, learner: str, incarnation: int, fragment: int | str) -> str:
    """Initial parameters: `init` stands where a contribution has its epoch. "*": any fragment."""
    return f"up.{run}.{learner}.init.{fragment}.{incarnation}"


def publication(run: str, epoch: int, fragment: int, version: int, term: int) -> str:
    """The term is part of it: a deposed leader's chunks lie elsewhere."""
    return f"dn.{run}.{epoch}.{fragment}.{version}.{term}"


def state(run: str, donor: str, newcomer: str, nonce: str) -> str:
    return f"state.{run}.{donor}.{newcomer}.{nonce}"


def matches(pattern: str, subject: str) -> bool:
    """Whether `subject` matches `pattern` with NATS wildcards: `*` one token, `>` all the rest."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


@dataclass(frozen=True, slots=True)
class PublicationSubject:
    """The parts of a publication's subject."""

    epoch: int
    fragment: int
    version: int
    term: int


def parse_publication(subject: str) -> PublicationSubject:
    """Inverse of `publication`; a trailing `.m` is allowed. Raises ValueError."""
    parts = subject.removesuffix(".m").split(".")
    if len(parts) != 6 or parts[0] != "dn":
        raise ValueError(f"not a publication's subject: {subject!r}")
    return PublicationSubject(*(int(part) for part in parts[2:]))


# --------------------------------------------------------------------------------------------------
# Identifiers that appear in subjects, keys and file names.

# One NATS subject token, one DNS label, one file name: valid in all three.
ID_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


def check_id(value: str, what: str) -> str:
    """Return `value`, or raise ValueError naming `what`, the value and the rule."""
    if not re.fullmatch(ID_PATTERN, value):
        raise ValueError(
            f"{what} {value!r} is not a valid id: use 1 to 63 lower-case letters, digits and "
            "hyphens, beginning and ending with a letter or digit"
        )
    return value
