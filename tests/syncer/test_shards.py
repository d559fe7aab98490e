"""Two shards of one run: each its own fragments, rounds, tape and epoch; nothing in common."""

import asyncio
from typing import Any

import numpy as np
import pytest
from syncer.contexts import context
from syncer.two_shards import ALGORITHM, TENSORS, over, rounds

from diloco_shared.bus.blobs import manifest_subject, put_blob
from diloco_shared.bus.port import StreamSpec
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    InitManifest,
    TapeEpoch,
    TapeRestore,
)
from diloco_shared.protocol.records import Restore
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import (
    Append,
    Event,
    InitSeen,
    Led,
    Load,
    Loaded,
    Publish,
    SendGrant,
    Wanted,
)
from diloco_syncer.history.history import History, TapeFault
from diloco_syncer.machine import Machine
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.merging.store import FragmentStore
from diloco_syncer.messages.inbox_io import Inbox
from diloco_syncer.status.status import status
from diloco_syncer.status.status_writer_io import over_elsewhere, shown_over, until_over


def test_each_shard_merges_its_own_fragments_in_turn_a_little_after_the_other(
    pair: list[Any],
) -> None:
    """H = 8, F = 2: one round per 4 steps and shard; the first openings are 2 steps apart."""
    first, second = (rounds(d, 16) for d in pair)
    assert [(n, p) for _, n, p in first] == [(0, 0), (1, 2), (2, 0), (3, 2)]
    assert [(n, p) for _, n, p in second] == [(0, 1), (1, 3), (2, 1)]
    assert second[0][0] - first[0][0] == 2
    versions = [d.machine.history.versions for d in pair]
    assert versions == [[2, -1, 2, -1], [-1, 2, -1, 1]]
    assert [d.machine.history.stamp.steps for d in pair] == [16, 12]


def test_a_round_of_another_shards_fragment_cannot_follow(pair: list[Any]) -> None:
    rounds(pair[1], 6)
    history = pair[0].machine.history
    foreign = pair[1].rounds[0].model_copy(update={"term": history.term})
    with pytest.raises(TapeFault, match="not in shard 0"):
        history.apply(foreign, history.seq + 1)
    assert History.restore(pair[1].spec, pair[1].machine.history.meta()).owned == (1, 3)


def test_what_another_shard_published_says_nothing_about_this_ones_tape(pair: list[Any]) -> None:
    first = pair[0]
    first.step("a", 1, adopted=(0, 9, 0, 9))
    assert not [r for r in first.tape if isinstance(r, TapeEpoch)]
    first.step("a", 1, adopted=(1, 9, 0, 9))
    assert [r.epoch for r in first.tape if isinstance(r, TapeEpoch)] == [1]


def test_an_epoch_that_one_shard_began_the_others_follow(pair: list[Any]) -> None:
    second = pair[1]
    second.step("a", 1, epoch=1)
    assert [r.epoch for r in second.tape if isinstance(r, TapeEpoch)] == [1]
    second.step("b", 1, epoch=1)
    assert second.machine.history.epoch == 1


def test_a_shard_that_is_over_publishes_in_the_epoch_that_another_began(pair: list[Any]) -> None:
    """Or learners would end without its fragments."""
    second = over(pair[1])
    effects = second.step("a", 1, epoch=3)
    assert [r.epoch for r in second.tape if isinstance(r, TapeEpoch)] == [3]
    published = [(e.epoch, e.fragment) for e in effects if isinstance(e, Publish)]
    assert published == [(3, 1), (3, 3)]
    assert second.machine.history.outcome == "finished"


def test_a_shard_that_ended_before_it_heard_of_a_restore_goes_back_with_the_others(
    pair: list[Any],
) -> None:
    second, meta = pair[1], pair[1].machine.history.meta()
    over(second)
    announcer = second.machine.announcer
    second.step("a", 0, state="finished", adopted=tuple(second.machine.history.versions))
    assert announcer.evaluated, "the evaluator left with the last versions"
    wish = Restore(serial=1, source="t/000001")
    wanted = Wanted(paused=False, stopping=False, quorum=2, checkpoint=0, restore=wish)
    assert not [e for e in second.give(wanted) if isinstance(e, Load)], "nobody has gone back"
    effects = second.step("a", 1, epoch=1, restore=1)
    assert [e for e in effects if isinstance(e, Load)] == [Load(wish)]
    second.give(Loaded(wish, "t", {**meta, "checkpoint_at": 1.0}, "d" * 32))
    assert [r.epoch for r in second.tape if isinstance(r, TapeRestore)] == [1]
    assert second.machine.history.outcome == ""
    assert not announcer.evaluated, "the next end has an evaluation of its own"


@pytest.mark.parametrize(("known", "epoch"), [(3, 5), (4, 4)])
def test_a_restore_takes_the_epoch_of_the_other_shard_but_not_that_of_a_lost_one(
    pair: list[Any], known: int, epoch: int
) -> None:
    """Learners are in epoch 4, which began with their restore `known`; this one is number 4."""
    second, meta = pair[1], pair[1].machine.history.meta()
    wish = Restore(serial=4, source="t/000001")
    second.give(Wanted(paused=False, stopping=False, quorum=2, checkpoint=0, restore=wish))
    second.step("a", 1, epoch=4, restore=known)
    second.give(Loaded(wish, "t", {**meta, "checkpoint_at": 1.0}, "d" * 32))
    assert [r.epoch for r in second.tape if isinstance(r, TapeRestore)] == [epoch]


def test_a_successor_publishes_what_was_over_but_not_published(pair: list[Any]) -> None:
    second = over(pair[1])
    second.machine = Machine(second.spec, second.machine.history)
    effects = second.give(Led("s2", 1000.0, (-1, -1, -1, 0)))
    assert [(e.fragment, e.version) for e in effects if isinstance(e, Publish)] == [(1, 0)]
    assert not any(isinstance(e, Append) for e in effects)


def test_one_shard_names_the_donor(pair: list[Any]) -> None:
    donors = []
    for d in pair:
        for learner in ("a", "b"):
            d.step(learner, 1, adopted=(0, 0, 0, 0))
        donors += [e.grant.donor for e in d.join("c") if isinstance(e, SendGrant)]
    assert donors[0] in ("a", "b") and donors[1] == ""


def test_a_store_holds_nothing_of_other_shards(driver_of: Any) -> None:
    spec = driver_of(**ALGORITHM).spec
    layout = Layout.build(TENSORS, 4)
    values = [np.full(n, p, np.float32) for p, n in enumerate(layout.sizes)]
    own = [v if p in spec.algorithm.owned(1) else None for p, v in enumerate(values)]
    store = FragmentStore.init(layout, spec.algorithm, own)
    assert {name.partition(".")[0] for name in store.state_arrays()} == {"1", "3"}
    again = FragmentStore.restore(store.meta(), store.state_arrays(), spec.algorithm)
    assert again.anchor(3).tobytes() == values[3].tobytes() and sorted(again.fragments) == [1, 3]


def test_shards_must_divide_the_fragments() -> None:
    with pytest.raises(ValueError, match="multiple of shards"):
        RunSpec.model_validate(
            {
                "name": "t",
                "algorithm": {"fragments": 4, "shards": 3, "sync_every_steps": 8},
                "budget": {"steps": 8},
            }
        )


def test_a_shard_that_is_over_lets_learners_in_for_the_others(pair: list[Any]) -> None:
    """One grant of all shards: without it the rest of the run would have no learners."""
    first = pair[0]
    first.give(Wanted(paused=False, stopping=True, quorum=2))
    for _ in range(8):
        rounds(first, 1)
    assert first.machine.history.outcome == "stopped"
    (grant,) = [e.grant for e in first.join("c") if isinstance(e, SendGrant)]
    assert grant.accepted


async def test_a_leader_is_needed_until_every_shard_is_over() -> None:
    spec = RunSpec.model_validate(
        {"name": "r", "algorithm": {"fragments": 24, "shards": 3}, "budget": {"steps": 1}}
    )
    bus = MemoryBus(MemoryBroker(), "s")
    await bus.ensure_bucket(subjects.STATUS)
    shown = status(Machine(spec, History(spec)), 0.0, 0.0, bytes_up=0, bytes_down=0)
    for shard, state, ended in (
        (2, "finished", False),
        (1, "running", False),
        (1, "stopped", True),
    ):
        told = encode(shown.model_copy(update={"shard": shard, "state": state}))
        await bus.kv_put(subjects.STATUS, subjects.status_key("r", shard), told)
        assert await over_elsewhere(bus, spec, 0) is ended
    await until_over(bus, spec, 0)
    assert await shown_over(bus, spec, 0) is False


async def test_a_shard_takes_its_own_initial_parameters_without_the_others() -> None:
    """Another shard has purged its own: a leader of this one must not wait for them."""
    algorithm = {"fragments": 4, "shards": 2, "sync_every_steps": 8}
    spec = RunSpec.model_validate({"name": "r", "algorithm": algorithm, "budget": {"steps": 1}})
    bus = MemoryBus(MemoryBroker(), "s")
    stream = subjects.up_stream("r")
    await bus.ensure_stream(StreamSpec(stream, ("up.r.>",), 1 << 20))
    for p in (1, 3):
        subject = subjects.initial("r", "a", 0, p)
        blob = await put_blob(bus, subject, codec.encode("fp32", np.full(3, p, np.float32)))
        manifest = InitManifest(
            run="r",
            learner="a",
            incarnation=0,
            config_hash=config_hash(spec),
            layout=TENSORS,
            fragment=p,
            blob=blob,
        )
        await bus.append(manifest_subject(subject), encode(manifest))
    seen: asyncio.Queue[Event] = asyncio.Queue()
    payloads = Payloads(lambda: 1 << 20)
    inbox = Inbox(context(spec, bus, shard=1), payloads, seen.put_nowait, lambda _: True)
    reading = asyncio.create_task(inbox.initial())
    while not isinstance(event := await seen.get(), InitSeen):
        pass
    reading.cancel()
    assert [bool(s) for s in event.subjects] == [False, True, False, True]
    assert sorted(payloads.held) == sorted(s for s in event.subjects if s)
    assert [bool(d) for d in event.digests] == [False, True, False, True]
