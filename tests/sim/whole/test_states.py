"""Every state that worlds must reach can be reached: here is a world of each, by script.

A script says what strikes a world, and when. All that it is there for must have come about at its
end. Other tests and kept worlds show the others, and the last tests here leave none out.
"""

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim.states_elsewhere import ELSEWHERE

from diloco_learner.training.train import TrainLoop
from diloco_shared.bus.port import Delivery, Stored
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Donate, TapeRecord, TapeRound
from diloco_shared.protocol.wire import decode
from diloco_simulator.coverage.required import RARER, REQUIRED
from diloco_simulator.people import requests, tokens, visitors
from diloco_simulator.troubles import hardships, troubles
from diloco_simulator.troubles.lies import Lies
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds import computing
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.processes import Host
from diloco_simulator.worlds.world import World, played

HERE = Path(__file__).parent
FOUND = HERE / "found"
CALM = Options.calm(learners=2, quorum=1, steps=24, safety_s=30.0, snapshot_every_rounds=3)
Strike = Callable[[World], object]
Who = Callable[[World], Host]


# Whatever changes what a process says when lets dice fall otherwise: then the next seeds are tried.
SEEDS_MAX = 3


@dataclass(frozen=True, slots=True)
class Scripted:
    """A world, and the states that it is there for."""

    states: tuple[str, ...]
    options: Options = CALM
    # What strikes, so many virtual seconds after the first round is over.
    strikes: tuple[tuple[float, Strike], ...] = ()
    cast: dict[str, Any] = field(default_factory=dict)  # of the case
    rates: tuple[tuple[Any, str, Any], ...] = ()  # of what is drawn otherwise

    @property
    def case(self) -> Case:
        return Case(1, self.options, **self.cast)

    def put(self, patch: pytest.MonkeyPatch) -> None:
        """In force: whatever world is played now follows the script."""
        drawn = Troubles.plan

        def plan(of_it: Troubles) -> None:
            drawn(of_it)
            for at_s, strike in self.strikes:
                of_it.loop.call_later(at_s, strike, of_it.world)

        patch.setattr(Troubles, "plan", plan)
        for module, name, value in self.rates:
            patch.setattr(module, name, value)


# --------------------------------------------------------------------------------------------------
# What strikes.


def leader(world: World) -> Host:
    name = world.observer.reached.leaders[0]
    return next(machine for machine in world.syncers if machine.name == name)


def learner(number: int) -> Who:
    return lambda world: world.learners[number]


def syncer(number: int) -> Who:
    return lambda world: world.syncers[number]


def trouble(name: str) -> Strike:
    """One of those that worlds draw."""
    return lambda world: getattr(world.troubles, name)()


def hardship(name: str) -> Strike:
    """One of those that worlds draw."""
    return lambda world: getattr(world.hardships, name)()


def dies(who: Who, away_s: float) -> Strike:
    return lambda world: world.crash(who(world), away_s)


def hangs(who: Who, seconds: float) -> Strike:
    return lambda world: world.troubles._hang(who(world), seconds)


def empties(who: Who) -> Strike:
    """It comes back with an empty disk."""
    return lambda world: world.troubles._replace(who(world), renamed=False)


def replaces_all_learners(world: World) -> None:
    """By others with empty disks and other names."""
    for machine in list(world.learners):
        world.troubles._replace(machine, renamed=True)


def loses_all_syncers(world: World) -> None:
    """For good."""
    for machine in list(world.syncers):
        world.lose(machine)


def cut(host: str) -> Strike:
    return lambda world: world.troubles.cut(host, world.troubles.rng)


def is_not_heard(who: Who, seconds: float) -> Strike:
    """It hears everybody."""

    def strike(world: World) -> None:
        link = world.net.link(who(world).host)
        link.out = False
        world.loop.call_later(seconds, setattr, link, "out", True)

    return strike


def asks(verb: str) -> Strike:
    return lambda world: world.troubles._ask(world.user.desire(verb))


def counts_to(quorum: int) -> Strike:
    return lambda world: world.troubles._ask(world.user.quorum(quorum))


def keeps(world: World) -> None:
    world.troubles._ask(world.user.checkpoint())


def kills_the_leader(away_s: float) -> Strike:
    """When it has committed the next version and not published it yet."""

    def strike(world: World) -> None:
        reached = world.observer.reached
        record = reached.record

        def armed(shard: int, what: TapeRecord) -> None:
            record(shard, what)
            if isinstance(what, TapeRound) and reached.unpublished[0]:
                reached.record = record  # type: ignore[method-assign]
                world.loop.call_soon(world.crash, leader(world), away_s, context=world.net.outside)

        reached.record = armed  # type: ignore[method-assign]

    return strike


def kills_the_donor(world: World) -> None:
    """Whoever is asked for its inner state next."""

    def asked(delivery: Delivery) -> None:
        world.broker.unsubscribe(heard)
        name = decode(bytes(delivery.payload), Donate).donor
        (donor,) = (machine for machine in world.learners if machine.name == name)
        world.loop.call_soon(world.crash, donor, 2.0, context=world.net.outside)

    heard = world.broker.subscribe(subjects.donate(world.spec.name, ">"), asked)


def kills_who_lets_in(world: World) -> None:
    """The leader that lets in the next newcomer, of whom the leader after it has not heard."""

    def granted(delivery: Delivery) -> None:
        world.broker.unsubscribe(heard)
        world.loop.call_soon(world.crash, leader(world), 1.0, context=world.net.outside)

    heard = world.broker.subscribe(subjects.grant(world.spec.name, ">"), granted)


def loses_a_chunk(world: World) -> None:
    """Of the next publication, by a power cut before its manifest comes."""
    broker, dn = world.broker, subjects.dn_stream(world.spec.name)
    stored = broker.on_store

    def lose() -> None:
        world.found.counts["tails lost"] += 1
        broker.lose(dn, 1)

    def armed(stream: str, message: Stored) -> None:
        stored(stream, message)
        if stream == dn and not message.subject.endswith(".m"):
            broker.on_store = stored
            world.loop.call_soon(lose, context=world.net.outside)

    broker.on_store = armed


def is_full(kind: str) -> Strike:
    """For ten seconds a stream takes nothing more, and the hub has no room to make it larger."""

    def strike(world: World) -> None:
        broker, stream = world.broker, subjects.run_stream(world.spec.name, kind)
        broker.narrow(stream, max(broker.info(stream).bytes, 1))
        broker.storage_max = broker.storage().reserved
        world.loop.call_later(10.0, world.hardships.heal)

    return strike


def far_too_large(lies: Lies, payload: bytes, size: int) -> bytes:
    """The same contribution ten thousand times, instead of one that is not finite."""
    name = lies.spec.algorithm.codec_up
    values_F = codec.decode(name, payload, size)
    return bytes(codec.encode(name, values_F * np.float32(1e4)))


TRAINS = Lies.trains


def of_one_learner(lies: Lies, loop: TrainLoop) -> None:
    if loop.exchange.learner == "learner-0":
        TRAINS(lies, loop)


SCRIPTED: dict[str, Scripted] = {
    "a calm run": Scripted(
        (
            "audits",
            "beats: bootstrapping",
            "beats: finished",
            "beats: finishing",
            "beats: running",
            "beats: waiting",
            "desired accepted",
            "learners: Merged",
            "members: coordinator idle",
            "members: learner idle",
            "members: learner working",
            "members: syncer catching up",
            "members: syncer idle",
            "members: syncer leading",
            "members: syncer standby",
            "merges executed again",
            "pulls sent again",
            "rounds in flight: 1",
            "told: assigned",
            "told: began",
            "told: end",
            "told: evaluation",
            "told: init",
            "told: join",
            "told: learner-alive",
            "told: leave",
            "told: recovered",
            "told: released",
            "told: run-created",
            "told: term",
        ),
        CALM.changed(syncers=2, steps=36, safety_s=20.0),
    ),
    "its user pauses and stops it": Scripted(
        (
            "beats: stopped",
            "desired in force",
            "learners rest: paused",
            "quorum accepted",
            "quorum in force",
            "stopped by the user",
            "told: run-paused",
            "told: run-running",
            "told: run-stopped",
            "told: setting",
        ),
        CALM.changed(steps=60),
        ((4.0, asks("pause")), (9.0, asks("resume")), (12.0, counts_to(2)), (20.0, asks("stop"))),
    ),
    "visitors of every kind": Scripted(
        (
            "another request under a key refused",
            "tokens: refusals found in the audit log",
            "tokens: rotates",
            "told: fault-applied",
            "told: fault-planned",
            "visitors: asks_for_a_plan",
            "visitors: asks_wrongly",
            "visitors: drains",
            "visitors: forgets",
            "visitors: harms_twice",
            "visitors: inflict",
            "visitors: keeps_a_copy",
            "visitors: listens",
            "visitors: looks",
            "visitors: repeats",
            "visitors: talks_nonsense",
            "visitors: wants_to_begin_again",
        ),
        CALM.changed(syncers=2),
        cast={"visitors": True},
        rates=((visitors, "OFTEN", 1.0), (requests, "OFTEN", 1.0), (tokens, "OFTEN", 1.0)),
    ),
    "a later run under the same name": Scripted(
        ("a name again",), CALM.changed(safety_s=10.0), cast={"sequels": 2}
    ),
    # --- members ----------------------------------------------------------------------------------
    "learners with one data shard, and one without a device": Scripted(
        (
            "learners without a device",
            "members: learner unfit",
            "told: shard-repeated",
            "told: shard-shared",
            "told: unfit",
        ),
        CALM.changed(quorum=2),
        ((4.0, hardship("_unfit")),),
        cast={"hardships": True},
        rates=(
            (hardships, "OFTEN", 0.0),
            (hardships, "RARE", 0.0),
            (hardships, "UNFIT_S", (20.0, 20.0)),
            (computing, "SCARCE", 1.0),
            (computing, "FEW", (1,)),
        ),
    ),
    "a learner is replaced and dies": Scripted(
        (
            "beats: starved",
            "donors asked",
            "from donor",
            "starvation",
            "told: donated",
            "told: learner-lost",
        ),
        CALM.changed(quorum=2, steps=36),
        ((4.0, empties(learner(1))), (12.0, dies(learner(1), 12.0))),
    ),
    "nobody hears a learner": Scripted(
        ("learners: Unmerged", "missed", "skipped for want of answers", "skipped round"),
        CALM.changed(quorum=2, steps=60),
        ((6.0, is_not_heard(learner(1), 6.0)), (16.5, is_not_heard(learner(0), 6.0))),
    ),
    "the only learner comes back": Scripted(
        ("from checkpoint",),
        CALM.changed(learners=1, steps=36),
        ((12.0, dies(learner(0), 2.0)),),
    ),
    "a donor dies over what it was asked for": Scripted(
        ("told: donor-failed",),
        CALM.changed(learners=3, steps=36),
        ((4.0, kills_the_donor), (5.0, empties(learner(2)))),
    ),
    "a learner is lost for good": Scripted(
        ("lost for good",), CALM.changed(learners=3), ((4.0, trouble("_lose_somebody")),)
    ),
    "no syncer is left": Scripted(
        ("without a syncer",), CALM.changed(safety_s=10.0), ((4.0, loses_all_syncers),)
    ),
    # --- who leads --------------------------------------------------------------------------------
    "a leader dies over a publication": Scripted(
        ("takeover during publication",), CALM.changed(syncers=2), ((4.0, kills_the_leader(60.0)),)
    ),
    "a lone leader dies over a publication": Scripted(
        ("restart during publication",), CALM, ((4.0, kills_the_leader(1.0)),)
    ),
    "a leader dies once it has let a learner in": Scripted(
        ("told: learner-seen",),
        CALM.changed(steps=36),
        ((4.0, kills_who_lets_in), (5.0, dies(learner(1), 1.0))),
    ),
    "machines are suspended": Scripted(
        ("beats of a deposed leader", "hangs", "machines suspended", "two leaders at once"),
        CALM.changed(syncers=2, steps=36),
        ((4.0, hangs(leader, 6.0)), (12.0, hangs(leader, 6.0)), (20.0, hangs(learner(1), 6.0))),
        rates=((troubles, "SUSPENDED", 1.0),),
    ),
    # --- disks and what they keep -----------------------------------------------------------------
    "all disks are lost": Scripted(
        ("disks lost", "from fresh", "new names", "states lost"),
        CALM.changed(steps=60),
        ((10.0, hardship("_lose_state")), (20.0, replaces_all_learners)),
    ),
    "a shard's disk is lost after the other's": Scripted(
        ("learners rest: epoch", "snapshots asked for"),
        CALM.changed(shards=2, fragments=4, steps=48),
        ((8.0, empties(syncer(0))), (18.0, empties(syncer(1)))),
    ),
    "everybody dies at once": Scripted(
        ("blackouts",),
        CALM.changed(syncers=2, steps=36),
        ((14.0, trouble("_blackout")),),
    ),
    "nobody reaches the store of checkpoints": Scripted(
        (
            "the store of checkpoints away",
            "the store of checkpoints not reached",
            "told: checkpoint-failed",
        ),
        CALM.changed(steps=36),
        ((4.0, hardship("_store_away")), (5.0, keeps)),
    ),
    # --- links and the hub ------------------------------------------------------------------------
    "links that lose and damage": Scripted(
        ("corrupted", "duplicated", "grant sent again", "lost", "overtaken", "unknown"),
        CALM.changed(steps=36, loss=0.2, duplicate=0.2, unknown=0.2, overtaken=0.3, corrupt=0.5),
    ),
    "the hub is away and takes nothing": Scripted(
        ("outages", "partitions", "squeezes"),
        CALM.changed(syncers=2, steps=60),
        ((3.0, trouble("_outage")), (16.0, trouble("_squeeze")), (20.0, cut("learner-0"))),
    ),
    "the hub loses a publication's chunk": Scripted(
        ("manifests without their chunks",), CALM.changed(steps=36), ((6.0, loses_a_chunk),)
    ),
    "one stream after another is full": Scripted(
        ("DN full", "STATE full", "told: full", "told: no-room", "told: room-again", "UP full"),
        CALM.changed(learners=3, quorum=2, steps=60),
        (
            (4.0, is_full("UP")),
            (19.0, is_full("DN")),
            (34.0, empties(learner(1))),
            (45.0, is_full("STATE")),
            (45.1, empties(learner(2))),
        ),
    ),
    # --- bad input --------------------------------------------------------------------------------
    "bad input": Scripted(
        ("bad input counted", "refused: non-finite", "refused: told"),
        CALM.changed(garbage=0.3, nan=0.3),
    ),
    "a contribution that is far too large": Scripted(
        ("refused: outlier",),
        CALM.changed(learners=4, quorum=3, nan=0.5),
        rates=((Lies, "poison", far_too_large), (Lies, "trains", of_one_learner)),
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", SCRIPTED)
def test_a_scripted_world_is_sound_and_reaches_what_it_is_there_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted, missed = SCRIPTED[name], list[str]()
    scripted.put(monkeypatch)
    for n in range(SEEDS_MAX):
        found = played(replace(scripted.case, seed=scripted.case.seed + n))
        assert found.violations == []
        missed = [state for state in scripted.states if not found.counts[state]]
        if not missed:
            return
    pytest.fail(f"{SEEDS_MAX} worlds do not reach {', '.join(missed)}")


def test_each_state_that_must_be_reached_has_a_world_that_reaches_it() -> None:
    """A scripted one, one of another test, or a kept one."""
    scripted = [state for world in SCRIPTED.values() for state in world.states]
    named = [*scripted, *(state for states in ELSEWHERE.values() for state in states)]
    assert len(set(named)) == len(named), "each is there once"
    must = {*REQUIRED, *RARER}
    assert len(must) == len(REQUIRED) + len(RARER)
    assert set(named) <= must, "others are asked of nobody"
    kept = (json.loads(path.read_text(encoding="utf-8")) for path in FOUND.glob("*.json"))
    assert must == {*named, *(state for body in kept for state in body["reached"] if state in must)}


def test_a_state_that_kept_worlds_alone_reach_is_reached_by_one_that_is_played_every_time() -> None:
    """Not in `make test-long` alone."""
    named = {state for world in SCRIPTED.values() for state in world.states}
    named |= {state for states in ELSEWHERE.values() for state in states}
    tree = ast.parse((HERE / "test_found.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EVERY_TIME"
    )
    read = (json.loads((FOUND / f"{name}.json").read_text("utf-8")) for name in names)
    assert {*REQUIRED, *RARER} <= named | {state for body in read for state in body["reached"]}


@pytest.mark.parametrize("test", ELSEWHERE)
def test_another_test_demands_the_states_that_it_is_named_for(test: str) -> None:
    """It is there, and asserts that they were reached."""
    file, _, name = test.partition("::")
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    marks = [ast.unparse(mark) for mark in function.decorator_list]
    assert "pytest.mark.long" not in marks, "it is played every time"
    said = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
    assert set(ELSEWHERE[test]) <= said
