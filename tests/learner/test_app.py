"""A whole learner process but for the process: on the in-memory bus, against a scripted syncer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner.contexts import learner
from waiting import until

from diloco_learner.app import (
    TAKEN,
    UNFIT_RETRY_S,
    UNFIT_RETRY_S_MAX,
    gist,
    pause_after,
)
from diloco_learner.recovery.moments import pack, views
from diloco_learner.training.trainer import Program
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Stamp
from diloco_shared.protocol.records import (
    Event,
    Incarnation,
    LearnerSpeed,
    MemberRecord,
    RunStatus,
    ShardLease,
    TokenCounts,
)
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

pytestmark = pytest.mark.whole


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile once for all tests of this module: the same run every time."""
    monkeypatch.setattr(Program, "build", compiled)


def compiled(
    spec: RunSpec, weights: object = None, separator: None = None, mesh: None = None
) -> Program:
    key = spec.model_dump_json()
    if key not in COMPILED:
        COMPILED[key] = BUILD(spec)
    return COMPILED[key]


# What a leader shows of a run that is over, as far as anybody here looks at it.
ENDED = {
    "run": "r",
    "state": "stopped",
    "reason": "stopped by the user",
    "leader": "syncer",
    "versions": (1, 1, 1),
    "stamp": Stamp(round=2, steps=3, fraction=0.1, fraction_per_step=0.01),
    "refused": {},
    "alive": ("a",),
    "participating": ("a",),
    "tokens": TokenCounts(),
    "tokens_by_fragment": (),
    "learners": {},
    "recoveries": (),
    "checkpoint_state": "",
    "checkpoint_reason": "",
    "streams": {},
    "settled": True,
    "forced": False,
}
BUILD = Program.build
COMPILED: dict[str, Program] = {}


def stepping(p: Any) -> bool:
    return p.state == "stepping" and p.step > 0


async def test_a_learner_bootstraps_trains_is_merged_pauses_and_finishes(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        first = await syncer.reported("a", stepping)
        assert first.incarnation == 0 and min(first.adopted) == 0

        manifests = await syncer.merge(1, ("a",))
        m = manifests["a"]
        assert (m.base, m.config_hash) == (0, syncer.hash)
        assert m.step_from == 0 < m.step_to
        # Two sequences of eight tokens a step, exactly (I5).
        assert m.tokens_to == 16 * m.step_to
        adopted = await syncer.reported("a", lambda p: p.adopted[1] == 1)
        assert adopted.adopted_at[1] >= m.step_to and adopted.adopted_at[0] == 0
        assert adopted.c_steps[1] < adopted.c_steps[0]

        syncer.state = "paused"
        held = await syncer.reported("a", lambda p: p.state == "paused")
        beats = [await syncer.reported("a", lambda p: p.state == "paused") for _ in range(3)]
        assert {p.step for p in beats} == {held.step}

        syncer.state = "running"
        await syncer.reported("a", lambda p: p.step > held.step)

        await syncer.merge(0, ("a",))
        syncer.state, syncer.fields = "finished", {"evaluator": "a"}
        last = await syncer.reported("a", lambda p: p.state == "finished")
        assert last.adopted == tuple(syncer.versions)
        await until(lambda: app.membership.record.state == "idle")
        evaluations = await syncer.events("evaluation")
        assert evaluations[-1].data["final"] and np.isfinite(evaluations[-1].data["val_loss"])
        assert list(evaluations[-1].data["versions"]) == syncer.versions
        # The final checkpoint is on disk before the learner is idle.
        assert any((tmp_path / "a" / "checkpoints").glob("r/*.safetensors"))
        # Every shard went back; how far each is merged, the run's leader tells.
        leases = [
            decode(e.value, ShardLease)
            for e in (await syncer.bus.kv_all(subjects.SHARDS)).values()
            if e.value is not None
        ]
        assert leases and all(lease.holder == "" for lease in leases)


async def test_a_learner_rests_as_long_as_its_owner_says(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a", duty_cycle=0.2) as (app, _):
        await syncer.bootstrap("a")
        await syncer.reported("a", lambda p: p.step > 2)
        assert app.work is not None and app.work.health()["injected_s"] > 0
        assert app.work.injected.stretch == pytest.approx(5.0)


async def test_a_newcomer_recovers_from_a_donor_and_parameters_come_from_anchors(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    for name in ("a", "b"):
        await syncer.assign(name, "r")
    async with syncer.serving(), learner(broker, tmp_path, "a"):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        await syncer.merge(2, ("a",))
        donor = await syncer.reported("a", lambda p: p.adopted[2] == 1)

        syncer.donor = "a"
        async with learner(broker, tmp_path, "b") as (newcomer, _):
            join = await _joined(syncer, "b")
            await syncer.donate(donor, join)
            p = await syncer.reported("b", stepping)
            assert p.adopted == (0, 0, 1)
            recovered = (await syncer.events("recovered"))[-1]
            assert (recovered.source, recovered.data["source"]) == ("b", "donor")
            # Moments that have seen the donor's steps, bit for bit, not fresh ones.
            assert newcomer.work is not None
            donated = (await syncer.events("donated"))[-1]
            assert recovered.data["moments"] == donated.data["moments"]
            # It tells when it reached each phase, on its own clock.
            t = p.recovery
            assert t is not None and (t.donor, t.source, t.attempts) == ("a", "donor", 1)
            times = [t.granted_s, t.donor_s, t.settled_s, t.stepping_s, t.age_s]
            assert times == sorted(times)
            syncer.donor = ""
            manifests = await syncer.merge(0, ("a", "b"))
            assert manifests["b"].step_from == 0
            # Nothing of the transfer stays behind.
            left = await syncer.bus.fetch(subjects.state_stream("r"), "state.r.>")
            assert left == []


async def test_a_learner_whose_assignment_is_taken_back_delivers_what_it_has_done_first(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        await syncer.assign("a", "")
        held = await syncer.reported("a", lambda p: p.state == "draining")
        for p in range(3):
            manifest = (await syncer.merge(p, ("a",)))["a"]
            assert (manifest.step_to, manifest.tokens_to) == (held.step, held.tokens)
        last = await syncer.reported("a", lambda p: p.state == "finished")
        assert last.step == held.step and last.c_tokens == (0, 0, 0)
        await until(lambda: app.membership.record.state == "idle")
        leave = (await syncer.events("leave"))[-1]
        assert leave.data == {"outcome": "drained"}
        async with syncer.bus.kv_watch(subjects.MEMBERS, "a") as entries:
            async for entry in entries:
                if decode(entry.value, MemberRecord).run == "":
                    break


async def test_a_learner_that_nobody_told_of_the_end_leaves_with_its_assignment(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    """The leader died right after the end: the run's last beat may be for ever missing."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        status = RunStatus.model_construct(
            **{**dict.fromkeys(RunStatus.model_fields, 0), **ENDED, "run_id": syncer.spec.id}
        )
        await syncer.bus.kv_put(subjects.STATUS, subjects.status_key("r", 0), encode(status))
        await syncer.assign("a", "")
        await until(lambda: app.membership.record.state == "idle")
        leave = (await syncer.events("leave"))[-1]
        assert leave.text == "withdrawn: the run is over"


async def test_a_learner_that_hears_no_more_of_a_run_that_finishes_leaves_with_its_assignment(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader died, and whether the run is over could not be asked when the word came."""
    monkeypatch.setattr("diloco_learner.app.DISMISS_S", 0.01)
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        syncer.state = "finishing"
        await until(lambda: app.work.beat.state == "finishing")  # type: ignore[union-attr]
        asked = []

        async def is_over(_: RunSpec) -> bool:
            asked.append(1)
            return len(asked) > 3

        monkeypatch.setattr(app, "_is_over", is_over)
        await syncer.assign("a", "")
        assert (await syncer.reported("a", lambda p: p.state == "draining")).step
        await until(lambda: app.membership.record.state == "idle")
        leave = (await syncer.events("leave"))[-1]
        assert leave.text == "withdrawn: the run is over"


async def test_work_that_ends_while_somebody_asks_whether_its_run_is_over(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, task):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)

        async def is_over(_: RunSpec) -> bool:
            await until(lambda: app.work is None)
            return True

        monkeypatch.setattr(app, "_is_over", is_over)
        await syncer.assign("a", "")
        syncer.fields = {"incarnations": {"a": 1}}
        newer = Incarnation(learner="a", incarnation=1, boot="another", at=0.0)
        await syncer.bus.kv_put(subjects.INCARNATIONS, "r.a", encode(newer))
        await until(lambda: app.membership.record.state == "idle")
        await syncer.assign("a", "r")
        await until(lambda: app.work is not None or task.done())
        assert not task.done()


async def test_a_restarted_learner_is_another_incarnation_and_the_older_one_leaves(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving():
        async with learner(broker, tmp_path, "a"):
            await syncer.bootstrap("a")
            await syncer.reported("a", stepping)
        async with learner(broker, tmp_path, "a"):
            await syncer.reported("a", lambda p: p.incarnation == 1 and p.step > 0)
            entry = await syncer.bus.kv_get(subjects.INCARNATIONS, "r.a")
            assert decode(entry.value, Incarnation).incarnation == 1
            # A process that has taken the id meanwhile: this one must not act any more (I10).
            newer = Incarnation(learner="a", incarnation=2, boot="another", at=0.0)
            await syncer.bus.kv_update(subjects.INCARNATIONS, "r.a", encode(newer), entry.revision)
            syncer.fields = {"incarnations": {"a": 2}}
            # It has the key of the id itself, so nobody can live under that number.
            await syncer.reported("a", lambda p: p.incarnation == 3)
            leave = (await syncer.events("leave"))[-1]
            assert leave.data == {"outcome": "superseded"}


async def test_a_process_whose_id_was_taken_works_again_once_the_other_is_gone(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        # Another process came up while this one was not heard: it has the key and a newer number.
        record = app.membership.record
        other = record.model_copy(update={"boot": "another", "lock": "on another host"})
        await syncer.bus.kv_put(subjects.MEMBERS, "a", encode(other))
        newer = Incarnation(learner="a", incarnation=1, boot="another", at=0.0)
        await syncer.bus.kv_put(subjects.INCARNATIONS, "r.a", encode(newer))
        syncer.fields = {"incarnations": {"a": 1}}
        await until(lambda: app.membership.record.reason == TAKEN)
        await app.membership.refresh()
        assert app.work is None, "as long as the other one has the key"
        await syncer.bus.kv_delete(subjects.MEMBERS, "a")
        syncer.fields = {}
        await syncer.reported("a", lambda p: p.incarnation == 2)
        assert app.membership.record.reason == ""


async def test_without_a_donor_the_moments_of_the_own_checkpoint_are_taken(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving():
        async with learner(broker, tmp_path, "a"):
            await syncer.bootstrap("a")
            await syncer.reported("a", stepping)
            await syncer.assign("a", "")
            await syncer.reported("a", lambda p: p.state == "draining")
            for p in range(3):
                await syncer.merge(p, ("a",))
            await syncer.reported("a", lambda p: p.state == "finished")
            folder = tmp_path / "a" / "checkpoints"
            await until(lambda: any(folder.glob("r/*.safetensors")))
        await syncer.assign("a", "r")
        async with learner(broker, tmp_path, "a"):
            await syncer.reported("a", lambda p: p.incarnation == 1 and p.step > 0)
            (recovered,) = await syncer.events("recovered")
            assert recovered.data["source"] == "checkpoint"
            assert await syncer.events("checkpoint-skipped") == []


async def test_a_donor_whose_state_is_no_good_is_named_and_another_asked(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    """I11: moments that are not finite never reach another learner."""
    await syncer.prepare()
    for name in ("a", "b"):
        await syncer.assign(name, "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (donor, _):
        await syncer.bootstrap("a")
        progress = await syncer.reported("a", stepping)
        assert donor.work is not None and donor.work.train_loop is not None
        trainer = donor.work.trainer
        healthy = trainer.inner_state
        trainer.inner_state = lambda: pack(  # type: ignore[method-assign]
            {name: sick(leaf) for name, leaf in views(healthy()).items()}
        )
        syncer.donor = "a"
        async with learner(broker, tmp_path, "b"):
            await syncer.donate(progress, await _joined(syncer, "b"))
            await syncer.reported("b", stepping)
            (failed,) = await syncer.events("donor-failed")
            assert "not finite" in failed.text and failed.data["donor"] == "a"
            assert syncer.joins[-1].failed_donors == ("a",)
            (recovered,) = await syncer.events("recovered")
            assert recovered.data["source"] == "fresh"


async def test_a_stopped_process_says_so_and_gives_its_shards_back(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving():
        async with learner(broker, tmp_path, "a") as (_, task):
            await syncer.bootstrap("a")
            await syncer.reported("a", stepping)
            task.cancel()
            await syncer.reported("a", lambda p: p.state == "finished")
            with pytest.raises(asyncio.CancelledError):
                await task
        leases = (await syncer.bus.kv_all(subjects.SHARDS)).values()
        assert {decode(e.value, ShardLease).holder for e in leases if e.value} == {""}
        assert await syncer.bus.kv_get(subjects.MEMBERS, "a") is None


async def test_training_goes_on_while_the_bus_is_away(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    """I8: the step never waits on the network."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        before = await syncer.reported("a", stepping)
        assert app.work is not None and app.work.train_loop is not None
        buses = [app.control, app.data]
        for bus in buses:
            assert isinstance(bus, MemoryBus)
            bus.disconnect()
        counters = app.work.train_loop.exchange.counters
        await until(lambda: counters.step >= before.step + 200)
        for bus in buses:
            assert isinstance(bus, MemoryBus)
            bus.reconnect()
        await syncer.reported("a", lambda p: p.step >= before.step + 200)
        assert (await syncer.merge(0, ("a",)))["a"].step_to >= before.step + 200


async def test_steps_that_are_all_skipped_are_told_and_end_the_process(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, task):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        assert app.work is not None and app.work.train_loop is not None
        trainer = app.work.train_loop.trainer
        step = trainer.step
        trainer.step = (  # type: ignore[method-assign]
            lambda tokens, rate, *, poisoned=False: step(tokens, rate, poisoned=True)
        )
        with pytest.raises(ExceptionGroup) as failure:
            await task
        assert "Diverged" in repr(failure.value)
        assert len(await syncer.events("step-skipped")) == 1
        assert "lower inner.learning_rate" in (await syncer.events("train-failed"))[0].text


async def test_a_poisoned_step_is_skipped_counted_and_told(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        app._nan()
        told = await syncer.reported("a", lambda p: p.steps_skipped > 0)
        after = await syncer.reported("a", lambda p: p.step > told.step + 5)
        assert after.steps_skipped == 1 and np.isfinite(after.loss)
        assert len(await syncer.events("step-skipped")) == 1
        assert app.health().detail["steps_skipped"] == 1
        shown = {m.name: m for m in app.collect()}
        assert shown["diloco_steps_skipped"].samples[0].value == 1


async def test_it_tells_how_fast_it_trains_from_its_first_step_on(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    """To the coordinator (tests/coordinator/api/test_members.py), to a probe, and as metrics."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    heard: list[LearnerSpeed] = []
    broker.subscribe("ctl.r.speed.a", lambda d: heard.append(decode(d.payload, LearnerSpeed)))
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        await until(lambda: any(s.tokens_per_s for s in heard), "its speed")
        assert (heard[0].run, heard[0].learner, heard[0].incarnation) == ("r", "a", 0)
        speed = heard[-1]
        assert (speed.platform, speed.device, speed.devices) == ("cpu", "cpu", 1)
        assert speed.mfu is None and speed.peak_flops is None, "a CPU is not in the table"
        assert speed.flops_per_token and not speed.flops_estimated
        assert speed.steps > 0 and speed.data_wait_ratio is not None
        assert 0 <= speed.data_wait_ratio <= 1
        assert speed.memory_of == "process" and speed.memory_bytes > 10_000_000

        own = {m.name: m for m in app.collect()}
        assert own["diloco_learner_tokens_per_second"].samples[0].value > 0
        assert own["diloco_learner_data_wait_ratio"].samples[0].labels["learner"] == "a"
        assert own["diloco_learner_mfu"].samples == [], "nobody knows it"
        detail = json.loads(json.dumps(app.health().detail))
        assert detail["speed"]["tokens_per_s"] > 0 and detail["speed"]["mfu"] is None


def sick(leaf: Any) -> Any:
    return leaf * np.float32("nan") if leaf.dtype == np.float32 else leaf


async def _joined(syncer: Any, name: str) -> Any:
    return await until(
        lambda: next((join for join in syncer.joins if join.learner == name), None),
        f"a join of {name}",
    )


async def test_who_was_refused_says_why_and_asks_again(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays assigned: nobody else would be asked in its place."""
    monkeypatch.setattr("diloco_learner.app.UNFIT_RETRY_S", 0.05)
    syncer.refuses = "the configuration differs: layout"
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await until(lambda: app.membership.record.state == "unfit")
        assert app.membership.record.reason == syncer.refuses
        syncer.refuses = ""
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        assert app.membership.record.state == "working"


async def test_what_a_learner_is_unfit_for_is_told_and_tried_again(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus that is not there yet: no crash, a reason, and work once it is."""
    monkeypatch.setattr("diloco_learner.app.UNFIT_RETRY_S", 0.05)
    # The model is not what this is about: it need not be compiled.
    monkeypatch.setattr(Program, "build", lambda *given: compiled(before))
    before, missing = syncer.spec, tmp_path / "later"
    data = syncer.spec.data.model_copy(update={"source": str(missing)})
    corpus, syncer.spec = (
        Path(syncer.spec.data.source),
        syncer.spec.model_copy(update={"data": data}),
    )
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a"):
        unfit = subjects.event("r", "unfit")
        async with syncer.bus.read(subjects.EVENTS_STREAM, unfit) as events:
            told = decode((await anext(aiter(events))).payload, Event)
        assert "a cannot work for r: " in told.text and str(missing) in told.text
        missing.symlink_to(corpus)
        await until(lambda: bool(syncer.joins))


# A model of the user's own with a mistake in line 6, and without it.
BROKEN = """\
import jax.numpy as jnp
class Bigram:
    def init(self, key):
        return {"embed": jnp.zeros((256, 256))}
    def loss(self, params, tokens_BxL1):
        return jnp.log(parms["embed"][tokens_BxL1]).mean()
def factory(config):
    return Bigram()
"""
MENDED = BROKEN.replace("jnp.log(parms", "jnp.sum(params")


def put(file: Path, text: str) -> None:
    """At once: whoever imports a file that is just being written reads an empty one."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(file)


async def test_a_model_that_is_mended_is_read_anew_and_one_mistake_is_told_once(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss fails when it is traced: no process dies of it, and what imported it looks again."""
    monkeypatch.setattr("diloco_learner.app.UNFIT_RETRY_S", 0.02)
    monkeypatch.setattr(Program, "build", BUILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "mended_model.py"
    file.write_text(BROKEN)
    model = syncer.spec.model.model_copy(update={"factory": "mended_model:factory"})
    syncer.spec = syncer.spec.model_copy(update={"model": model})
    await syncer.prepare()
    await syncer.assign("a", "r")
    tried = []
    allowed = {"factories": f"{tmp_path}/"}
    async with syncer.serving(), learner(broker, tmp_path, "a", **allowed) as (app, task):
        build = app.computing.build
        app.computing.build = lambda *of, **how: tried.append(1) or build(*of, **how)  # type: ignore
        await until(lambda: app.membership.record.state == "unfit")
        reason = app.membership.record.reason
        assert reason.startswith("NameError: name 'parms'")
        assert f"(raised at {file}:6)" in reason
        tries = len(tried)
        await until(lambda: len(tried) >= tries + 3)
        assert len(await syncer.events("unfit")) == 1
        put(file, "raise SystemExit('half written')\n")
        await until(lambda: "half written" in app.membership.record.reason)
        tries = len(tried)
        await until(lambda: len(tried) >= tries + 2)
        first, second = await syncer.events("unfit")
        assert "parms" in first.text and "half written" in second.text
        put(file, MENDED)
        await until(lambda: bool(syncer.joins))
        assert app.membership.record.state == "working" and not task.done()


@pytest.mark.parametrize(
    ("took_s", "pause_s"), [(0.1, UNFIT_RETRY_S), (17.0, 17.0), (300.0, UNFIT_RETRY_S_MAX)]
)
def test_a_slow_attempt_is_followed_by_as_long_a_pause(took_s: float, pause_s: float) -> None:
    assert pause_after(took_s) == pause_s


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    assert gist("out of memory: 81 bytes at 0x7f3a") == gist("out of memory: 9 bytes at 0x1")
    assert gist("there is no /text") != gist("there is no /other")
