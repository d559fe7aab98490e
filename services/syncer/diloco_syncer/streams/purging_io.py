"""Removes from UP what a snapshot covers, once the standbys have executed it too; and from STATE
what was sent to learners, once they say that it is in use: they may have no right to remove it.
What was sent to those that died before they could say so is removed, too, and what was sent to an
earlier life of one that is back.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import Bus, Delivery, Held, Unavailable
from diloco_shared.bus.repeating import again_and_again, left_undone, until_done
from diloco_shared.bus.stored_records import members_of
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_shared.protocol.records import MemberRecord, StreamUse
from diloco_shared.spec.algorithm import MEMBERS_MAX
from diloco_syncer.context import RunContext
from diloco_syncer.members.roster import GONE_S
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.streams.storage_io import Storage

log = structlog.get_logger()

# Between two looks at how far the standbys are, in seconds; they tell about as often. And at what
# nobody needs on a STATE that is crowded.
LOOK_S = 1.0
# For the sake of a slow standby TAPE is never more than this full, for it has room for all that it
# needs twice. And of UP, however small, no more than this is kept free while one is waited for.
FULL = 0.5
# What a syncer's member record shows while it executes the tape.
FOLLOWING = ("standby", "catching up")
# Between two looks at what the dead have left on STATE, in seconds: it is there for minutes.
LEFT_LOOK_S = 30.0
# Where more than this share of STATE is held, what nobody needs goes at once: before it is CROWDED,
# for then a donor whose state stays for too long is taken for one that floods (floods_io.py).
LEFT_CROWDED = 0.5
# So many times as long as it took to read what is on STATE, it is not read again: the server reads
# the headers of every chunk for that.
LEFT_REST = 9.0
# Messages beside the chunks that such a look reads the subjects of: two of each state.
LEFT_EXTRA_MAX = 10_000
# Members whose states are removed at a look, and states that nobody waits for: a site may invent
# names, and each is one request.
LEFT_REMOVED_MAX = 100
# For so many seconds it is tried to remove what a learner says it uses.
FORGET_S = 600.0

# (donor, nonce) of states.
Over = Callable[[], Collection[tuple[str, str]]]
# Learners.
Using = Callable[[], set[str]]


class UpPurger:
    """Of one leader's term. A later wish replaces an earlier one: it covers more.

    UP has room for two intervals between snapshots, and for the rounds in flight. Once a snapshot
    is durable, UP holds an interval and what was merged while that was written. So standbys are
    waited for as long as what may come until the next look has room. A slower one fetches a
    snapshot.
    """

    def __init__(
        self,
        context: RunContext,
        outbox: Outbox,
        sure: Callable[[], bool],
        flying: Callable[[], int],
        still_ours: Callable[[], Awaitable[None]],
    ) -> None:
        """`sure`: whether UP is known to have lost nothing but what `rewound` was told of.
        `flying`: bytes that rounds in flight may add to UP.
        `still_ours`: returns where the tape is the one that says what a snapshot covers, and raises
        Deposed or BusError where it is not, or nobody knows."""
        self.run, self.me = context.spec.name, context.me
        self.control, self.data = context.control, context.data
        self.outbox = outbox
        self.sure, self.flying, self.still_ours = sure, flying, still_ours
        self.waits = False  # for standbys, with what a snapshot covers
        self.purging = False  # a wish is at work: a hundred gigabytes take minutes
        self.held = math.inf  # bytes on UP at the look before; infinite at the first
        self.covers = 0  # tape record up to which a snapshot covers
        self.below = 0  # stream sequence on UP below which nothing later lies
        self.last_round = -1  # the newest round that the snapshot covers
        self.removed = -1  # the newest round whose contributions are gone
        self.wanted = asyncio.Event()

    def want(self, covers: int, below: int, last_round: int) -> None:
        """A snapshot of record `covers`, with the rounds up to `last_round`, is durable; what UP
        has below `below` may go."""
        self.covers, self.below, self.last_round = covers, below, last_round
        self.wanted.set()

    def rewound(self, end: int) -> None:
        """UP lost what came after sequence `end`: what stands there from now on is of later."""
        self.below = min(self.below, end + 1)

    def begun_again(self) -> None:
        """The run went back: rounds are counted from there, and of these none was removed."""
        self.last_round = self.removed = -1

    @property
    def owes(self) -> bool:
        """Whether UP has yet to let go what a snapshot covers: a further one makes no room."""
        return self.wanted.is_set() or self.purging

    async def work(self) -> None:
        """For ever. Raises Deposed where the tape is another's."""
        while True:
            await self.wanted.wait()
            self.purging = True
            self.wanted.clear()
            self.held = math.inf
            await again_and_again(self._free_to_go, "standbys that need UP", LOOK_S)
            covered = self.last_round
            await self.outbox.purge_up(self._below)
            if self.below > 1:
                self.removed = min(covered, self.last_round)
            self.purging = False

    async def _below(self) -> int:
        """Asked before each attempt. The hub may have been lost since the purge was wanted, and put
        back from a backup, whose tape still needs what a snapshot of the lost one covers."""
        await self.still_ours()
        if not self.sure():
            raise Unavailable("it is not known yet whether the message server lost the end of UP")
        return self.below

    async def _free_to_go(self) -> bool:
        """Whether living standbys have executed what would go, or there is no room to wait."""
        place = (self.run, self.outbox.shard)
        behind = await standbys_behind(self.control, *place, self.me, self.covers)
        self.waits = bool(behind) and await self._has_room()
        if behind and not self.waits:
            standbys = [m.id for m in behind]
            log.warning("contributions go before these standbys used them", standbys=standbys)
        return not self.waits

    async def _has_room(self) -> bool:
        """Whether UP has room for what may come until the next look: for rounds in flight, and for
        as much as came since the look before."""
        info = await self.data.stream_info(subjects.up_stream(self.run))
        came, self.held = max(info.bytes - self.held, 0), info.bytes
        free = min(self.flying() + came, FULL * info.bytes_max)
        return not info.bytes_max or info.bytes + free <= info.bytes_max


async def forget_states(context: RunContext) -> None:
    """Remove what learners say they use, for ever: of one after another.

    Each is answered before that is done. A hundred gigabytes take minutes; who waited for that in
    vain would ask again, and have the same removed once more. Meanwhile a learner may die, come
    back and be sent another state: only what was there when it said so goes. What a leader that
    ends leaves undone, `LeftStates` of the next one does.
    """
    run = context.spec.name
    stream = subjects.state_stream(run)
    # A further one waits for its answer until there is room, and asks again.
    wishes = asyncio.Queue[str](MEMBERS_MAX)
    waiting: dict[str, int] = {}  # newcomer -> sequence below which what it was sent may go

    async def forget(request: Delivery) -> bytes:
        newcomer = request.subject.rsplit(".", 1)[-1]
        with left_undone("the end of STATE"):  # as what a leader that ends leaves
            below = (await context.data.stream_info(stream)).last_seq + 1
            known, waiting[newcomer] = newcomer in waiting, below
            if not known:
                await wishes.put(newcomer)
        return b""

    async with context.control.serve(subjects.forget_state(run, "*"), forget):
        while True:
            newcomer = await wishes.get()
            below = waiting.pop(newcomer)  # what it says from now on may be of a later state
            states = subjects.states_of(run, newcomer)
            with left_undone(f"purge of {states}"):
                await until_done(
                    partial(context.data.purge, stream, states, below_seq=below),
                    f"purge of {states}",
                    until=ambient.monotonic() + FORGET_S,
                )


def superseded(held: Mapping[str, Held], over: Collection[tuple[str, str]]) -> set[str]:
    """Places of what of STATE was asked for, and nobody waits for: (donor, nonce) in `over`."""
    found = set[str]()
    for subject in held:
        donor, newcomer, nonce = [*subject.split("."), "", "", ""][2:5]
        if (donor, nonce) in over:
            found.add(f"{donor}.{newcomer}.{nonce}")
    return found


class LeftStates:
    """Inner states and snapshots of those that are gone for good. Of one leader's term.

    STATE has room for all learners but one, and each that dies while it recovers leaves what was
    sent to it for hours: a few of them, and no newcomer is given anything any more.

    Who has been missing at every look for GONE_S seconds is gone, however large the model is: the
    key of one that lives expires within seconds, and for longer than that no life is taken back.

    One that dies over and over while it recovers, and is back each time, is never gone. Of what was
    sent to it, all goes that it does not wait for any more: at once, where STATE is crowded. So
    does what was sent to one that trains by now: it has told an earlier leader that it uses it, and
    that one was replaced before it had removed it.
    """

    def __init__(self, context: RunContext, storage: Storage, over: Over, using: Using) -> None:
        """`over`: (donor, nonce) of states that were asked for and that nobody waits for now;
        `using`: learners that train, and that nobody is asked to send a state."""
        self.run, self.shard, self.control = context.spec.name, context.shard, context.control
        self.stream = subjects.state_stream(self.run)
        self.storage = storage
        self.over, self.using = over, using
        self.due_at = -math.inf
        # To whom there was something on STATE at the newest look that read it; None: nobody knows,
        # for it was not read since an earlier leader. Later ones are this leader's to remember.
        self.sent_to: set[str] | None = None
        self.filled_at: float | None = None  # since then STATE was not empty; monotonic, as below
        self.rest_until = -math.inf
        self.living: set[str] = set()  # at the newest look
        # Who lived, or has something on STATE, and is missing -> since which look. Of those that
        # died within the first GONE_S seconds; from then on of those with something on STATE.
        self.gone: dict[str, float] = {}

    async def keep(self) -> None:
        """For ever; the first shard looks after all of them."""
        if not self.shard:
            await again_and_again(self._look_if_due, "what the dead left on STATE", LOOK_S)

    async def _look_if_due(self) -> None:
        now, use = ambient.monotonic(), self.storage.streams.get("STATE")
        if now >= self.due_at or (use and self._hurries(use) and now >= self.rest_until):
            self.due_at = now + LEFT_LOOK_S
            await self.look()

    def _hurries(self, use: StreamUse) -> bool:
        """Whether STATE is crowded, perhaps by what nobody needs."""
        if not use.limit or use.bytes <= LEFT_CROWDED * use.limit:
            return False
        return bool(self.sent_to is None or self.over() or self.sent_to & self.using())

    async def look(self) -> None:
        """Look once, and remove what is due. Raises BusError.

        STATE is empty most of the time, and most who recover take less than GONE_S: nothing of
        STATE is read before that is over, unless it is crowded. Until then it is seen who lives.
        """
        now, use = ambient.monotonic(), self.storage.streams.get("STATE")
        if use is None or not use.bytes:
            self.filled_at, self.gone, self.living = None, {}, set()
            self.sent_to = self.sent_to if use is None else set()
            return
        self.filled_at = now if self.filled_at is None else self.filled_at
        # What came since is of a later life: one that comes back this instant.
        below = self.storage.last_seqs["STATE"] + 1
        # Of this run: one that works for another has no use for what it was sent here.
        living = {m.id for m in await members_of(self.control) if m.run == self.run}
        missing = (self.gone.keys() | self.living) - living
        self.living, self.gone = living, {who: self.gone.get(who, now) for who in missing}
        hurries = now - self.filled_at >= GONE_S or self._hurries(use)
        if hurries and now >= self.rest_until:
            await self._remove(now, below, use.bytes)

    async def _remove(self, now: float, below: int, size: int) -> None:
        """What those have left that are gone by now, and what nobody waits for any more."""
        held = await self._held(size, below)
        self.sent_to = {subject.split(".")[3] for subject in held}
        absent = self.sent_to - self.living
        read = ambient.monotonic()
        self.rest_until = read + LEFT_REST * (read - now)
        self.gone = {newcomer: self.gone.get(newcomer, now) for newcomer in absent}
        due = sorted(m for m, since in self.gone.items() if now - since >= GONE_S)
        for newcomer in due[:LEFT_REMOVED_MAX]:
            await self._forget(newcomer, below, "it is gone")
            del self.gone[newcomer]
        for newcomer in sorted(self.sent_to & self.using())[:LEFT_REMOVED_MAX]:
            await self._forget(newcomer, below, "it uses it")
            self.sent_to.discard(newcomer)
        for place in sorted(superseded(held, self.over()))[:LEFT_REMOVED_MAX]:
            log.info("a state that nobody waits for is removed", place=place)
            # Chunks lie at the place, and what describes them below it.
            for filter_ in (place, f"{place}.>"):
                await self.control.purge(self.stream, f"state.{self.run}.{filter_}")

    async def _forget(self, newcomer: str, below: int, why: str) -> None:
        states = subjects.states_of(self.run, newcomer)
        await self.control.purge(self.stream, states, below_seq=below)
        log.info("what was sent to a member is removed", member=newcomer, reason=why)

    async def _held(self, size: int, below: int) -> dict[str, Held]:
        """What is on STATE, by subject; all of it that is below that sequence."""
        every, most = subjects.states_of(self.run, "*"), LEFT_EXTRA_MAX + 2 * size // CHUNK_BYTES
        return await self.control.held(self.stream, every, messages_max=most, below_seq=below)


async def standbys_behind(
    control: Bus, run: str, shard: int, me: str, covers: int
) -> list[MemberRecord]:
    """Living standbys of the shard that have not executed tape record `covers`. Raises BusError."""
    others = await other_syncers(control, run, shard, me)
    return [m for m in others if m.state in FOLLOWING and m.tape_seq < covers]


async def other_syncers(control: Bus, run: str, shard: int, me: str) -> list[MemberRecord]:
    """Living ones of the shard, whatever they are doing. Raises BusError."""
    place = ("syncer", run, shard)
    members = await members_of(control)
    return [m for m in members if (m.role, m.run, m.shard) == place and m.id != me]
