"""Which subjects an identity of the hub may publish and hear: a table of patterns, and no IO.

An identity is a name with a role. A learner's speaks for the members (learners) of one site.

What these patterns cannot tell apart, because it is not a token of a subject:

- **The run.** Patterns name members; a member may speak in every run.
- **The run in a stream's name.** `UP-one` is one token, so whoever may ask for `UP-*` must be let
  ask for every stream; only whole names are withheld (`never`: the coordinator's own buckets).
- **What is in a record.** So everything that a learner may write stands under its own name, and
  readers take the name from there: member record, life, events, joins, progress, contributions.
  Leases of data do not (`KV.shards.<run>.<shard>`): it asks the leader for them, under its name.
- **How many.** Rounds and newcomers are tokens of the subjects on UP and STATE, so one learner may
  have any number there (what the leader does about it: syncer, streams/floods_io.py). Its other
  subjects are a fixed few, of which the streams keep so many messages.

And what no patterns can hold off inside one account of the message server: every request names the
subject of its answer, and the server writes answers with its own rights. Whoever may store a
message and have it read back could have it written anywhere, a token of the API's administrator
among the rest. So sites are **fenced**: each has an account of its own (hub_config.py), from which
only these subjects lead into the hub's, and into which answers are led back, whatever subject was
named. Roles of the hub itself share one account: their patterns hold off mistakes, and no attacker.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from diloco_shared.bus.nats.access import CONSUMER_NEWS, HUB_API
from diloco_shared.bus.nats.keys import check_public_key, inbox_of
from diloco_shared.protocol import subjects
from diloco_shared.protocol.subjects import check_id

Role = Literal["coordinator", "syncer", "supervisor", "learner", "reader"]
ROLES: tuple[Role, ...] = get_args(Role)
# In accounts of their own. A reader fetches published parameters and tapes, and writes nothing.
FENCED: tuple[Role, ...] = ("learner", "reader")

# Each costs some 25 lines of the server's configuration, which is read whole at every change.
IDENTITIES_MAX = 1000
MEMBERS_MAX = 64  # learners of one site
# The one that a site uses, and successors until it has the newest: whoever loses one makes another.
KEYS_MAX = 5

# `ctl.chaos.<member>` and `ctl.<run>.join` are of one form: a member of that name would be reached
# by whoever speaks to a run.
_NOT_MEMBERS = ("beat", "join", "lapsed", "pull")

_READ = (
    "STREAM.INFO.*",
    "STREAM.MSG.GET.*",
    "DIRECT.GET.*",
    "CONSUMER.CREATE.*.*",
    "CONSUMER.DELETE.*.*",
    "CONSUMER.MSG.NEXT.*.*",
)
# Deliveries name this as the place of their acknowledgement. Our consumers want none, so nobody
# listens there; without it the server would note for each delivery that it might be answered.
_ACK = "$JS.ACK.>"
_SNAPSHOT_ACK = "$JS.SNAPSHOT.ACK.>"  # that a part of a backup has come
# Where the server has an account's answers to the hub's requests come. A leaf node says them like
# all else; a client of the hub itself is let answer by the request.
_ANSWERS = "_R_.>"
# What a fenced identity may say in its own account, where nobody else listens. A learner says its
# joins where syncers of release 0.2 hear them, too; what stands in them could be in anybody's name.
LEADING_NOWHERE = (_ACK, _ANSWERS, subjects.unsigned_join("*"))


@dataclass(frozen=True, slots=True)
class Identity:
    """Who may connect. `keys` are public keys, the newest last; none: it is not let in.

    Raises ValueError for what cannot be one.
    """

    name: str
    role: Role
    keys: tuple[str, ...]
    members: tuple[str, ...] = ()  # of a learner's: ids of the site's learners

    def __post_init__(self) -> None:
        check_id(self.name, "identity")
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} of {self.name} is none of {', '.join(ROLES)}")
        for key in self.keys:
            check_public_key(key)
        if len(self.keys) > KEYS_MAX:
            raise ValueError(f"{self.name} has {len(self.keys)} keys; {KEYS_MAX} at most")
        if (self.role == "learner") != bool(self.members):
            raise ValueError(f"{self.name}: a learner's identity names its learners, no other does")
        if len(self.members) > MEMBERS_MAX:
            raise ValueError(f"{self.name} has more than {MEMBERS_MAX} learners: give it several")
        for member in self.spoken_for:
            check_id(member, "member")
            if member in _NOT_MEMBERS:
                raise ValueError(f"a member cannot be called {member!r}: subjects of runs end so")

    @property
    def spoken_for(self) -> tuple[str, ...]:
        """The members in whose name it may speak; a reader is none."""
        if self.role == "learner":
            return self.members
        return () if self.role == "reader" else (self.name,)

    @property
    def fenced(self) -> bool:
        return self.role in FENCED


@dataclass(frozen=True, slots=True)
class Rights:
    """Patterns of subjects, with NATS's wildcards. `never` is taken out of `publish`."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    never: tuple[str, ...] = ()
    answers: bool = False  # whether it may answer requests that reach it

    def may_publish(self, subject: str) -> bool:
        return _any(self.publish, subject) and not _any(self.never, subject)

    def may_subscribe(self, subject: str) -> bool:
        return _any(self.subscribe, subject)


def rights_of(identity: Identity) -> Rights:
    """All that an identity may do."""
    inbox = (f"{inbox_of(identity.name)}.>",)
    match identity.role:
        case "learner":
            found = [_of_learner(member) for member in identity.members]
            return Rights(
                _once(p for f in found for p in f.publish),
                inbox + _once(p for f in found for p in f.subscribe),
                found[0].never,
                answers=True,
            )
        case "reader":
            return Rights(_calls(_READ), inbox, _private())
        case "syncer":
            found_ = _of_syncer(identity.name)
        case "coordinator":
            found_ = _of_coordinator(identity.name)
        case "supervisor":
            found_ = _of_supervisor(identity.name)
    return Rights(found_.publish, inbox + found_.subscribe, found_.never, answers=True)


def of_any_site() -> Rights:
    """The union of what fenced identities may do, whatever their names, without inboxes."""
    return _of_learner("*")


def _of_learner(me: str) -> Rights:
    publish = (
        subjects.progress("*", me),
        subjects.speed("*", me),
        subjects.join("*", me),
        subjects.unsigned_join("*"),  # leads nowhere: see `LEADING_NOWHERE`
        f"up.*.{me}.>",
        f"state.*.{me}.>",  # to newcomers that the syncer named
        subjects.forget_state("*", me),
        subjects.lease("*", me),
        subjects.event_by(me),
        _key(subjects.MEMBERS, subjects.member_key(me, "learner", named=True)),
        _key(subjects.INCARNATIONS, subjects.life_key("", me, named=True)),
        *_calls(_READ),
        _ACK,
        _ANSWERS,
    )
    subscribe = (
        subjects.beat("*"),
        subjects.pull("*"),
        subjects.grant("*", me),
        subjects.donate("*", me),
        subjects.chaos(me),
    )
    return Rights(publish, subscribe, _private())


def _of_syncer(me: str) -> Rights:
    publish = (
        subjects.beat("*"),
        subjects.lapsed_beat("*"),
        subjects.pull("*"),
        subjects.grant("*", "*"),
        subjects.donate("*", "*"),
        subjects.snapshot_wish("*", 0).removesuffix("0") + ">",
        "tape.*.*",
        "dn.>",
        f"state.*.{me}.>",
        subjects.event("*", "*"),
        _key(subjects.MEMBERS, me),
        *(
            _key(bucket, ">")
            for bucket in (subjects.STATUS, subjects.LEASES, subjects.PLACES, subjects.SHARDS)
        ),
        *_calls((*_READ, "STREAM.CREATE.*", "STREAM.UPDATE.*", "STREAM.PURGE.*")),
        _ACK,
    )
    subscribe = (
        subjects.progress("*", "*"),
        subjects.join("*", "*"),
        subjects.unsigned_join("*"),
        subjects.forget_state("*", "*"),
        subjects.lease("*", "*"),
        subjects.snapshot_wish("*", 0).removesuffix("0") + ">",
        subjects.chaos(me),
    )
    kept = (f"KV_{bucket}" for bucket in subjects.BUCKETS)
    purges = _calls(f"STREAM.PURGE.{stream}" for stream in (*kept, subjects.EVENTS_STREAM))
    return Rights(publish, subscribe, _private() + purges)


def _of_coordinator(me: str) -> Rights:
    publish = (
        f"{HUB_API}.>",
        f"{subjects.HUB_KEYS}.*.>",
        subjects.event("*", "*"),
        subjects.chaos("*"),
        _ACK,
        _SNAPSHOT_ACK,
    )
    subscribe = (
        subjects.beat("*"),
        subjects.lapsed_beat("*"),
        subjects.speed("*", "*"),
        subjects.chaos(me),
        CONSUMER_NEWS,
    )
    return Rights(publish, subscribe)


def _of_supervisor(me: str) -> Rights:
    publish = (_key(subjects.MEMBERS, me), subjects.event("*", "*"), *_calls(_READ), _ACK)
    return Rights(publish, (subjects.chaos(me), subjects.chaos("nats")), _private())


def _private() -> tuple[str, ...]:
    """Everything that could be asked of the coordinator's own buckets."""
    return tuple(
        f"{HUB_API}.{call}"
        for bucket in subjects.PRIVATE_BUCKETS
        for call in (
            f"STREAM.*.KV_{bucket}",
            f"STREAM.MSG.*.KV_{bucket}",
            f"DIRECT.GET.KV_{bucket}",
            f"CONSUMER.*.KV_{bucket}.>",
            f"CONSUMER.MSG.NEXT.KV_{bucket}.>",
        )
    )


def _calls(calls: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{HUB_API}.{call}" for call in calls)


def _key(bucket: str, key: str) -> str:
    return f"{subjects.HUB_KEYS}.{bucket}.{key}"


def _once(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(patterns))


def _any(patterns: tuple[str, ...], subject: str) -> bool:
    return any(subjects.matches(pattern, subject) for pattern in patterns)
