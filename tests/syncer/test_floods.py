"""What one learner takes of UP and STATE from all others is taken back, and it is named (I12)."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from syncer.conftest import Driver
from syncer.contexts import NamedBus, alone, context

from diloco_shared import ambient
from diloco_shared.budget import overhead
from diloco_shared.budget.job import Size, assumed
from diloco_shared.bus.port import Held, StreamFull, StreamSpec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_shared.protocol.messages import Join, TensorSpec
from diloco_shared.protocol.records import MemberRecord, StreamUse
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.codecs import bytes_of
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import JoinSeen
from diloco_syncer.history.history import History
from diloco_syncer.history.tape_io import TapeReplaced
from diloco_syncer.machine import Machine
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.streams.floods_io import (
    MESSAGES_MAX,
    REMOVED_MAX,
    STRANGERS_MAX,
    Asked,
    Floods,
    Hoard,
    first_set_bytes,
    greedy,
    message_bytes,
    unasked,
    unreached,
)

pytestmark = pytest.mark.virtual

LIMIT = 60_000
SHARE = LIMIT // 3
LIVE = ("a", "b", "c")


def up(learner: str, n: int = 0) -> str:
    return subjects.contribution("r", learner, 0, 0, n, 1)


def of(sizes: dict[str, int]) -> dict[str, Held]:
    """One message of that many bytes each."""
    return {subject: Held(size, 1) for subject, size in sizes.items()}


def sizes(hoards: Mapping[str, Hoard]) -> dict[str, int]:
    return {learner: hoard.size for learner, hoard in hoards.items()}


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ({up("a"): 20_000, up("b"): 20_000, up("c"): 20_000}, {}),
        ({up("a"): 15_000, up("a", 1): 5_001, up("b"): 9}, {"a": 20_001}),
        ({up("gone"): 20_000}, {}),
        ({up("x"): 10_000, up("y"): 10_001, up("a"): 9}, {"y": 10_001}),
    ],
)
def test_who_holds_more_than_its_share(held: dict[str, int], found: dict[str, int]) -> None:
    assert sizes(greedy(of(held), SHARE, LIVE, known=())) == found


def test_a_new_leader_accuses_nobody_of_whom_it_has_not_heard_yet() -> None:
    """Honest learners that live may hold a share each."""
    held = {up(learner): 15_000 for learner in "xyz"}
    assert sizes(greedy(of(held | {up("a"): 20_001}), SHARE, LIVE)) == {"a": 20_001}


def test_initial_parameters_are_no_flood_until_a_snapshot_covers_them() -> None:
    first = subjects.initial("r", "a", 0, 0)
    held = of({first: 40_000, up("a"): 20_000})
    assert sizes(greedy(held, SHARE, LIVE, excused=lambda learner: 40_000)) == {}
    assert sizes(greedy(held, SHARE, LIVE)) == {"a": 60_000}


# Two fragments in turn; a learner's answers to a round take 10,000 and 20,000 bytes at most.
ASKED = Asked(
    epoch=0,
    rounds=range(4, 9),
    late=0,
    before=0,
    kept=False,
    answers_P=(10_000, 20_000),
    owned=(0, 1),
)


def test_contributions_that_were_asked_for_are_no_flood_however_many_there_are() -> None:
    """No snapshot can be written for long, or somebody made the stream smaller."""
    held = {
        subjects.contribution("r", "a", 0, n % 2, n, term): Held(5_000, 2)
        for n in ASKED.rounds
        for term in (1, 2)
    }
    assert sizes(greedy(held, 1000, LIVE, asked=ASKED)) == {}
    assert sizes(greedy(held, 1000, LIVE)) == {"a": 50_000}


@pytest.mark.parametrize(
    "place",
    [
        *("1.0.4.1", "0.1.4.1", "0.0.2.1", "0.0.10.1", "0.0.04.1", "0.0.x.1", "00.0.4.1"),
        *("0.0.\u0664.1", f"0.0.{'4' * 5000}.1", "0.2.4.1", "0.0..1"),
    ],
)
def test_what_nobody_asked_for_counts(place: str) -> None:
    """Another epoch, fragment or round, or what is no number as the leader writes it."""
    held = of({f"up.r.a.{place}": 1001, "up.r.a.0.0.4.1": 900})
    assert sizes(greedy(held, 1000, LIVE, asked=ASKED)) == {"a": 1001}


def test_rounds_of_an_earlier_epoch_are_on_the_tape() -> None:
    """Of all epochs together no more than of one."""
    asked = replace(ASKED, epoch=7)
    held = {"up.r.a.0.0.4.1": 4_000, "up.r.a.7.0.4.2": 6_000}
    assert sizes(greedy(of(held), 1000, LIVE, asked=asked)) == {}
    assert sizes(greedy(of(held | {"up.r.a.3.0.4.1": 1}), 1000, LIVE, asked=asked)) == {"a": 10_001}


def test_more_than_answers_to_a_round_counts() -> None:
    most = {"up.r.a.0.0.4.1": 5_000, "up.r.a.0.0.4.2": 5_000}
    assert sizes(greedy(of(most), 1000, LIVE, asked=ASKED)) == {}
    more = most | {"up.r.a.0.0.4.3.m": 1}
    assert sizes(greedy(of(more), 1000, LIVE, asked=ASKED)) == {"a": 10_001}


def test_answers_that_came_after_those_to_their_round_were_removed_are_no_flood() -> None:
    """A slow link delivers them late: of as many rounds as a learner has under way at once."""
    late = {"up.r.a.0.1.1.1": 5_000, "up.r.a.0.0.2.1": 5_000}
    asked = replace(ASKED, late=2)
    assert sizes(greedy(of(late), 1000, LIVE, asked=asked)) == {}
    assert sizes(greedy(of(late), 1000, LIVE, asked=replace(ASKED, late=1))) == {"a": 5_000}
    more = late | {"up.r.a.0.0.0.1": 5_000}
    (hoard,) = greedy(of(more), 1000, LIVE, asked=asked).values()
    assert hoard.surplus == {("0", "0", "0"): 5_000}, "the oldest is none that was under way"
    large = late | {"up.r.a.0.0.2.2": 5_001}
    assert sizes(greedy(of(large), 1000, LIVE, asked=asked)) == {"a": 10_001}


def test_an_answer_to_a_later_round_of_an_earlier_epoch_may_be_there() -> None:
    """History began again at an earlier round."""
    asked = replace(ASKED, epoch=2, late=1)
    held = {"up.r.a.1.0.20.1": 5_000}
    assert sizes(greedy(of(held), 1000, LIVE, asked=asked)) == {}
    assert sizes(greedy(of({"up.r.a.2.0.20.1": 5_000}), 1000, LIVE, asked=asked)) == {"a": 5_000}


def test_where_all_contributions_are_kept_one_answer_to_each_round_is_enough() -> None:
    """Else one learner would take up to four times its room, for good."""
    asked = replace(ASKED, rounds=range(64), late=1, kept=True)
    once = {f"up.r.a.0.{n % 2}.{n}.1": 2_500 for n in range(64)}
    failovers = once | {f"up.r.a.0.{n % 2}.{n}.2": 5_000 for n in range(1, 36, 2)}
    assert sizes(greedy(of(failovers), 1000, LIVE, asked=asked)) == {}
    every = failovers | {f"up.r.a.0.0.{n}.2": 5_000 for n in range(0, 64, 2)}
    assert sizes(greedy(of(every), 1000, LIVE, asked=replace(asked, kept=False))) == {}
    found = greedy(of(every), 1000, LIVE, asked=asked)
    assert sizes(found) == {"a": 32 * 7_500}
    epochs = once | {f"up.r.a.1.{n % 2}.{n}.2": 2_500 for n in range(64)}
    again = replace(asked, epoch=1)
    assert sizes(greedy(of(epochs), 1000, LIVE, asked=again)) == {}, "rounds of two epochs"


def test_where_all_contributions_are_kept_what_was_asked_for_takes_the_share() -> None:
    """Nothing is ever removed there: who filled a share beside it would take another's room."""
    asked = replace(ASKED, rounds=range(64), late=1, kept=True)
    answers = {f"up.r.a.0.{n % 2}.{n}.1": 2_500 for n in range(64)}
    share = sum(answers.values()) + 30_000
    junk = {f"up.r.a.0.1.{n}.1": 2_500 for n in range(0, 34, 2)}  # of rounds of another fragment
    assert sizes(greedy(of(answers | junk), share, LIVE, asked=asked)) == {"a": 17 * 2_500}
    few = dict(list(junk.items())[:16])
    assert sizes(greedy(of(answers | few), share, LIVE, asked=asked)) == {}, "broken attempts"
    alone = {f"up.r.a.0.1.{n}.1": 2_500 for n in range(0, 64, 2)}
    assert sizes(greedy(of(alone), share, LIVE, asked=asked)) == {}


def test_a_run_that_went_back_has_contributions_of_the_rounds_since() -> None:
    asked = replace(ASKED, epoch=1, rounds=range(2), late=1, before=5)
    held = {f"up.r.a.0.{n % 2}.{n}.1": 2_500 for n in range(20, 26)}
    assert sizes(greedy(of(held), 1000, LIVE, asked=asked)) == {}
    held["up.r.a.0.0.26.1"] = 2_500
    assert sizes(greedy(of(held), 1000, LIVE, asked=asked)) == {"a": 2_500}
    now = {f"up.r.a.1.{n % 2}.{n}.1": 2_500 for n in range(20, 26)}
    assert sizes(greedy(of(now), 1000, LIVE, asked=asked)) == {"a": 6 * 2_500}, "not opened yet"


def test_names_that_nobody_knows_were_not_asked_however_many_there_are() -> None:
    """A site may write in many, and need not join under any."""
    names = ["dead", *(f"name-{n}" for n in range(12))]
    held = {f"up.r.{m}.0.0.4.1": 900 + n for n, m in enumerate(names)}
    few = {s: size for s, size in held.items() if s.split(".")[2] in names[:STRANGERS_MAX]}
    assert sizes(greedy(of(few), 1000, LIVE, asked=ASKED, known=())) == {}
    found = greedy(of(held), 1000, LIVE, asked=ASKED, known=("b",))
    assert sizes(found) == {m: 900 + n for n, m in enumerate(names) if n > STRANGERS_MAX}
    assert sizes(greedy(of(held), 1000, LIVE, asked=ASKED, known=names)) == {}
    assert sizes(greedy(of(held), 1000, LIVE, asked=ASKED)) == {}, "that nobody can tell yet"
    first = {f"up.r.{m}.init.0.0": 2_000 for m in names}
    found = greedy(of(first), 1000, LIVE, excused=lambda learner: 2_000, known=())
    assert len(found) == len(names) - STRANGERS_MAX


def test_of_first_parameters_that_were_sent_often_only_the_excess_counts() -> None:
    first = subjects.initial("r", "a", 0, 0)
    held = of({first: 50_900})
    assert sizes(greedy(held, 1000, LIVE, excused=lambda learner: 50_000)) == {}
    found = greedy(held, 800, LIVE, excused=lambda learner: 50_000)
    assert sizes(found) == {"a": 900}
    assert found["a"].filters((0,)) == {"*.0.>": 50_900}


def test_what_was_asked_for_stays_while_the_rest_can_be_removed_place_by_place() -> None:
    asked = {"up.r.a.0.1.5.1": 900}
    rest = {"up.r.a.init.1.0": 7, "up.r.a.init.1.1": 7, "up.r.a.0.1.7.1": 20_001}
    rest |= {"up.r.a.1.1.5.1": 30, "up.r.a.0.0.4.1": 10_001, "up.r.a.0.0.5.1": 5}
    (hoard,) = greedy(of(asked | rest), 1000, LIVE, asked=ASKED).values()
    assert hoard.filters((0, 1)) == {
        "init.1.>": 14,
        "0.1.7.>": 20_001,
        "1.1.>": 30,
        "*.0.>": 10_006,
    }


def test_whoever_fills_too_many_places_loses_everything() -> None:
    held = of({f"up.r.a.0.1.{n}.1": 10 for n in range(REMOVED_MAX + 5)})
    (hoard,) = greedy(held, 100, LIVE, asked=ASKED).values()
    assert len(hoard.asked) == 2
    assert hoard.filters((0, 1)) == {"*.0.>": 525, "*.1.>": 525}


def test_many_empty_messages_are_a_flood() -> None:
    """Those that are counted may be a small part of those that fill a stream."""
    held = {up("a"): Held(4_000_000, MESSAGES_MAX), up("b"): Held(20 << 20, 44)}
    share = (64 << 20) // 3
    assert sizes(greedy(held, share, LIVE)) == {}
    told = greedy(held, share, LIVE, message_bytes=message_bytes(History(run_spec())))
    assert sizes(told) == {"a": 560 * MESSAGES_MAX}


def test_no_honest_learner_has_smaller_messages_than_are_counted() -> None:
    """A contribution of 2.1 chunks in four bits, and its manifest."""
    history = History(run_spec())
    rows = 21 * CHUNK_BYTES // 5  # of each fragment, which are one number wide
    history.layout = (TensorSpec(name="w", shape=(rows * 4, 1), embedding=False),)
    sizes = Layout.build(history.layout, history.fragments).sizes
    each, codec = message_bytes(history), history.spec.algorithm.codec_up
    assert each > CHUNK_BYTES // 4
    for size in sizes:
        payload = bytes_of(codec, size)
        honest = Held(payload + 1000, -(-payload // CHUNK_BYTES) + 1)
        share = honest.bytes * 100
        held = {up("a", n): honest for n in range(100)}
        assert greedy(held, share, LIVE, message_bytes=each) == {}


def test_messages_count_as_much_as_is_budgeted_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where less is budgeted, a share is smaller, and honest learners would have more than theirs:
    simulated worlds have streams of a few thousand bytes."""
    monkeypatch.setattr(overhead, "MESSAGE_EXTRA", 80)
    history = History(run_spec())
    assert message_bytes(history) == 80
    history.layout = (TensorSpec(name="w", shape=(16, 1), embedding=False),)
    assert message_bytes(history) == 80
    held = {up("a"): Held(900, 4)}
    assert sizes(greedy(held, 900, LIVE, message_bytes=message_bytes(history))) == {}


def test_an_initializer_may_die_at_its_last_message_and_send_all_of_them_in_its_next_life() -> None:
    """That is the bound: a life sends every chunk once."""
    history = History(run_spec())
    history.layout = (TensorSpec(name="w", shape=(CHUNK_BYTES, 1), embedding=False),)
    history.sizes_P[:] = Layout.build(history.layout, history.fragments).sizes
    excused, least = first_set_bytes(history, assumed(history.spec)), message_bytes(history)
    described = overhead.layout_bytes(history.layout)
    held = {
        subjects.initial("r", "a", p, life): Held(
            overhead.initial(size, described), overhead.chunks(4 * size) + 1
        )
        for p, size in enumerate(history.sizes_P)
        for life in (0, 1)
    }
    told: dict[str, Any] = {"excused": lambda learner: excused, "message_bytes": least}
    assert sizes(greedy(held, 0, LIVE, **told)) == {}
    held[subjects.initial("r", "a", 0, 2)] = Held(1000, 1)
    assert sizes(greedy(held, least - 1, LIVE, **told)) == {"a": least}
    assert sizes(greedy(held, least, LIVE, **told)) == {}, "beyond it there is the share"


def test_what_no_purge_reaches_is_of_no_honest_learner() -> None:
    """Of several shards each removes what is of its own fragments; a revoked site's would stay."""
    honest = [up("a"), up("a") + ".m", subjects.initial("r", "a", 0, 2)]
    strays = ["up.r.x.0", "up.r.x.0.3.1.1", "up.r.y.0.00.1.1", "up.r.y.0.a.1.1", "up.r.y.0.1"]
    strays += ["up.r.z.0.1.5", "up.r.z.init.1"]
    found = unreached(of(dict.fromkeys((*honest, *strays), 7)), 3)
    assert found == {"x": 14, "y": 21, "z": 14}


def test_of_the_first_parameters_each_shard_knows_its_own() -> None:
    tensor = TensorSpec(name="w", shape=(1000, 1), embedding=False)
    found, planned = [], []
    for shard in range(2):
        history = History(run_spec(2), shard)
        planned.append(first_set_bytes(history, assumed(history.spec)))
        sizes = Layout.build((tensor,), history.fragments).sizes
        history.layout = (tensor,)
        for p in history.owned:
            history.sizes_P[p] = sizes[p]
        history.snapshot_covers = 3
        found.append(first_set_bytes(history, assumed(history.spec)))
    assert 2 * 4 * 1000 < sum(found) < 100_000, "and what describes them"
    assert sum(planned) > 2 * 4 * assumed(run_spec(2)).parameters, "before they are known"


def test_of_states_there_is_what_was_asked_for() -> None:
    held = {
        "state.r.a.b.n1": 100,
        "state.r.a.b.n1.m": 1,
        "state.r.a.x.n2": 7,
        "state.r.c.b.n1": 50,
        "state.r.c.y.n3.a": 5,
        "state.r.s.s2.n4": 900,
        "state.r.x": 3,
    }
    assert unasked(of(held), LIMIT, {("a", "n1")}, {"s"}) == {
        "a": {"a.x.n2.>": 7},
        "c": {"c.>": 55},
        "x": {"x.>": 3},
    }


def test_a_state_that_takes_half_of_the_stream_is_none() -> None:
    held = of({"state.r.a.b.n1": LIMIT // 2 + 1})
    assert unasked(held, LIMIT, {("a", "n1")}, {"s"}) == {"a": {"a.>": LIMIT // 2 + 1}}


def donations(driver: Driver, donor: str, count: int) -> None:
    """That newcomer c asks for under as many nonces, and then for nothing under many more."""
    driver.step(donor, 4)
    for n in range(count + 20):
        config, failed = driver.config, () if n < count else (donor,)
        join = Join(learner="c", incarnation=0, nonce=f"c-{n}", config=config, failed_donors=failed)
        driver.give(JoinSeen(join))


async def test_of_a_state_that_nobody_waits_for_the_donor_is_not_accused(
    running: Driver,
) -> None:
    """Neither of the first nor of the last of those that the newcomer was given."""
    bus, _, outbox, floods = await crowded(run_spec(), {})
    floods.machine = running.machine
    donations(running, "a", 8)
    names = ["state.r.a.c.c-0", "state.r.a.c.c-0.m", "state.r.a.c.c-7", "state.r.a.z.n3"]
    await bus.ensure_stream(StreamSpec(subjects.state_stream("r"), ("state.r.>",), LIMIT))
    for name in names:
        await bus.append(name, b"moments")
    found = await floods._state(of(dict.fromkeys(names, 7)), LIMIT)
    assert found == {"a": {"a.z.n3.>": 7}} and outbox.events.empty()

    async def left() -> list[str]:
        there = await bus.fetch(subjects.state_stream("r"), "state.r.>")
        return [message.subject for message in there]

    await floods._take_back("STATE", "a", found["a"])
    assert await left() == names[:3], "its chunks as well, and nobody else's"
    assert outbox.events.get_nowait().kind == "flood"


def test_a_state_of_many_empty_messages_is_none() -> None:
    limit = 64 << 20
    honest = Held(20 << 20, 40 + 2)
    empty = Held(50_000, 1000)
    asked = {("a", "n1"), ("c", "n2")}
    held = {"state.r.a.b.n1": honest, "state.r.c.b.n2.x": empty}
    assert unasked(held, limit, asked, {"s"}) == {"c": {"c.>": 50_000}}


# --------------------------------------------------------------------------------------------------


def run_spec(shards: int = 1) -> RunSpec:
    return RunSpec.model_validate(
        {"name": "r", "budget": {"steps": 1}, "algorithm": {"shards": shards}}
    )


class Showing:
    """What was seen of the streams last."""

    def __init__(self) -> None:
        self.storage = self
        self.streams: dict[str, StreamUse] = {}
        self.needed = {"UP": 0}
        self.budgeted = Size(learners=4)


@pytest.mark.parametrize(
    ("payload", "headers"), [(b"x" * 1000, {}), (b"", {"A": "x" * 1000}), (b"", {})]
)
async def test_a_stream_that_one_learner_fills_has_room_again_for_the_others(
    payload: bytes, headers: dict[str, str]
) -> None:
    bus, spec, showing = NamedBus(MemoryBroker(), "s"), run_spec(), Showing()
    await bus.ensure_bucket(subjects.MEMBERS)
    fields: dict[str, Any] = {"boot": "b", "host": "h", "pid": 1, "lock": "l", "started_at": 0.0}
    liar = MemberRecord(id="thief", role="syncer", run="r", **fields)
    await bus.kv_put(subjects.MEMBERS, "LEARNER.thief", encode(liar))
    outbox = Outbox(context(spec, bus, "s"))
    machine = Machine(spec, History(spec))
    floods = Floods(context(spec, bus, "s"), machine, cast(Any, showing), outbox, lambda: -1, alone)
    for kind, mine, theirs in (
        ("UP", up("a"), up("thief")),
        ("STATE", "state.r.s.s2.n", "state.r.thief.nobody.n"),
    ):
        stream = subjects.run_stream("r", kind)
        await bus.ensure_stream(StreamSpec(stream, (f"{kind.lower()}.r.>",), LIMIT))
        await bus.append(mine, b"x" * 1000)
        with pytest.raises(StreamFull):
            for n in range(LIMIT):
                await bus.append(f"{theirs}.{n}", payload, headers=headers)
        info = await bus.stream_info(stream)
        showing.streams = {kind: StreamUse(bytes=info.bytes, limit=info.bytes_max)}
        await floods.look()
        assert [m.subject for m in await bus.fetch(stream, f"{kind.lower()}.r.>")] == [mine]
        told = outbox.events.get_nowait()
        assert (told.kind, told.data["learner"], told.data["stream"]) == ("flood", "thief", kind)


async def test_a_stream_that_is_full_of_what_was_asked_for_is_left_alone() -> None:
    """Nothing could be covered for a while, and the stream was made smaller than one learner's
    share of what it was planned for: merged contributions are what a standby needs."""
    bus, spec, showing = NamedBus(MemoryBroker(), "s"), run_spec(), Showing()
    await bus.ensure_bucket(subjects.MEMBERS)
    outbox = Outbox(context(spec, bus, "s"))
    history = History(spec)
    history.layout = (TensorSpec(name="w", shape=(4000, 1), embedding=False),)
    values = Layout.build(history.layout, history.fragments).sizes
    for p in history.owned:
        history.sizes_P[p] = values[p]
    history.next_round, removed = 9, 2
    machine = Machine(spec, history)
    floods = Floods(
        context(spec, bus, "s"), machine, cast(Any, showing), outbox, lambda: removed, alone
    )
    stream = subjects.up_stream("r")
    await bus.ensure_stream(StreamSpec(stream, ("up.r.>",), LIMIT))
    codec, asked = spec.algorithm.codec_up, set[str]()
    for n in range(removed + 1, history.next_round):
        p = history.owned[n % len(history.owned)]
        subject = subjects.contribution("r", "a", 0, p, n, 1)
        await bus.append(subject, bytes(bytes_of(codec, values[p])))
        asked.add(subject)
    late_set = subjects.initial("r", "a", 0, 0)
    await bus.append(late_set, bytes(LIMIT // 4))
    asked.add(late_set)
    machine.announcer.appointed.add("a")
    info = await bus.stream_info(stream)
    showing.streams = {"UP": StreamUse(bytes=info.bytes, limit=info.bytes)}
    await floods.look()
    assert {m.subject for m in await bus.fetch(stream, "up.r.>")} == asked
    now = floods._asked()
    assert now is not None and now.rounds == range(removed + 1, history.next_round)
    assert now.late == spec.algorithm.rounds_in_flight_max
    assert floods._excused("b") == 0 < floods._excused("a"), "that nobody asked"
    late = subjects.contribution("r", "a", 0, p, n, 1) + ".late"
    await bus.append(late, bytes(LIMIT // 2))
    await floods.look()
    left = {m.subject for m in await bus.fetch(stream, "up.r.>")}
    assert left == asked - {subjects.contribution("r", "a", 0, p, n, 1)}, "of one round too much"


async def crowded(
    spec: RunSpec, held: Mapping[str, int]
) -> tuple[NamedBus, Showing, Outbox, Floods]:
    """A leader of a run, on whose UP such messages are."""
    bus, showing = NamedBus(MemoryBroker(), "s"), Showing()
    await bus.ensure_bucket(subjects.MEMBERS)
    outbox = Outbox(context(spec, bus, "s"))
    machine = Machine(spec, History(spec))
    floods = Floods(context(spec, bus, "s"), machine, cast(Any, showing), outbox, lambda: -1, alone)
    stream = subjects.up_stream("r")
    await bus.ensure_stream(StreamSpec(stream, ("up.r.>",), LIMIT))
    for subject, size in held.items():
        await bus.append(subject, bytes(size))
    info = await bus.stream_info(stream)
    showing.streams = {"UP": StreamUse(bytes=info.bytes, limit=info.bytes_max)}
    return bus, showing, outbox, floods


async def test_what_a_site_left_where_no_shard_purges_goes_with_little_of_it() -> None:
    """Its site may be revoked long since, and it has less than its share."""
    stray = "up.r.gone.0.99.0.0"
    held = {stray: 1, **{up(learner): LIMIT // 6 for learner in "abcde"}}
    bus, showing, _, floods = await crowded(run_spec(2), held)
    showing.needed = {"UP": LIMIT + 1}  # and the stream too small for the run
    await floods.look()
    assert stray not in {m.subject for m in await bus.fetch(subjects.up_stream("r"), "up.r.>")}


async def test_nothing_goes_from_a_hub_whose_tape_is_another_one() -> None:
    """It was put back from a backup, and may need what this leader takes for removed."""
    held = {"up.r.gone.0.99.0.0": 1, **{up(learner): LIMIT // 6 for learner in "abcde"}}
    bus, showing, _, floods = await crowded(run_spec(2), held)
    showing.needed = {"UP": LIMIT + 1}
    floods.still_ours = AsyncMock(side_effect=TapeReplaced("another one"))
    with pytest.raises(TapeReplaced):
        await floods.look()
    assert {m.subject for m in await bus.fetch(subjects.up_stream("r"), "up.r.>")} == {*held}


async def test_in_a_stream_that_is_too_small_a_share_is_one_of_what_the_run_needs() -> None:
    """Honest learners fill it by themselves; a thief fills any."""
    _, showing, outbox, floods = await crowded(run_spec(), {up("a"): LIMIT - 1000})
    for showing.needed in ({"UP": 4 * LIMIT}, {}):  # or nobody knows yet how large it should be
        await floods.look()
        assert outbox.events.empty()
    showing.needed = {"UP": 4 * LIMIT - 8000}
    await floods.look()
    assert outbox.events.get_nowait().kind == "flood"


@pytest.mark.parametrize(
    ("epoch", "removed", "keeping", "before"),
    [
        (0, -1, {}, 0),
        (1, 3, {}, 0),
        (1, -1, {"snapshot_every_rounds": 7}, 14),
        (1, -1, {"contributions": "all"}, assumed(run_spec()).rounds),
    ],
)
async def test_what_a_run_that_went_back_may_have_of_before(
    epoch: int, removed: int, keeping: dict[str, Any], before: int
) -> None:
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}, "keeping": keeping})
    _, _, _, floods = await crowded(spec, {})
    history = floods.machine.history
    history.layout, history.epoch = (TensorSpec(name="w", shape=(9, 1), embedding=False),), epoch
    floods.removed = lambda: removed
    asked = floods._asked()
    assert asked is not None and asked.before == before


async def test_first_parameters_are_nobodys_surplus_before_it_is_known_how_large_they_are() -> None:
    """The first attempt broke off: what is there of it stays until the leader has a whole one."""
    _, _, _, floods = await crowded(run_spec(), {})
    roster = floods.machine.roster
    roster.since = ambient.monotonic() - 2 * roster.lease_s
    floods.machine.announcer.appointed.add("a")
    assert floods._excused("b") == 0 < floods._excused("a")
    roster.since = ambient.monotonic()  # a leader before this one may have asked anybody
    assert floods._excused("b") == floods._excused("a")


async def test_where_all_share_one_secret_nobody_is_accused() -> None:
    spec = run_spec()
    bus = MemoryBus(MemoryBroker(), "s")
    outbox = Outbox(context(spec, bus, "s"))
    machine = Machine(spec, History(spec))
    await Floods(
        context(spec, bus, "s"), machine, cast(Any, Showing()), outbox, lambda: -1, alone
    ).keep()
    assert outbox.events.empty()


async def test_a_stream_that_takes_long_to_look_through_is_looked_at_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be crowded for hours; and who may have lost the lease looks at nothing."""
    bus, _, _, floods = await crowded(run_spec(), {up("a"): LIMIT - 1000})
    looks = 0

    async def slow(*place: Any, **most: Any) -> dict[str, Held]:
        nonlocal looks
        looks += 1
        await asyncio.sleep(2.0)
        return {}

    monkeypatch.setattr(bus, "held", slow)
    looking = asyncio.create_task(floods.keep())
    await asyncio.sleep(50.0)
    assert 2 <= looks <= 4
    floods.machine.lapse = "the leader cannot renew its lease"
    await asyncio.sleep(50.0)
    assert looks <= 4
    looking.cancel()
