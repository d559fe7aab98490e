"""A learner's part of a checkpoint: kept before anything of later is adopted, once."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_learner.events import (
    Adopt,
    AnchorReady,
    BeatSeen,
    Begin,
    KeepPart,
    Leave,
    PartSettled,
    SendProgress,
    StateGone,
    Stepped,
    TimePassed,
)
from diloco_learner.exchange.exchange import Exchange
from diloco_learner.recovery.checkpoint_io import read_part, write_part
from diloco_learner.recovery.moments import State, pack, views
from diloco_learner.recovery.recovery import OwnModel, Recovery
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.numerics.arrays import Arrays
from diloco_shared.protocol.checkpoints import CheckpointManifest, LearnerPart, reference
from diloco_shared.protocol.messages import Beat, Restored, Stamp
from diloco_shared.spec.run import RunSpec

STAMP = Stamp(round=-1, steps=0, fraction=0.0, fraction_per_step=0.0)
SPEC = RunSpec.model_validate(
    {
        "name": "t",
        "algorithm": {"fragments": 2, "sync_every_steps": 8},
        "budget": {"steps": 80},
    }
)


def beat(**changed: Any) -> BeatSeen:
    fields: dict[str, Any] = {
        "run": "t",
        "epoch": 0,
        "term": 1,
        "state": "running",
        "reason": "",
        "versions": (0, 0),
        "stamp": STAMP,
        "live": ("a",),
    }
    return BeatSeen(Beat(**{**fields, **changed}))


def anchor(p: int, version: int, checkpoint: int = 0, epoch: int = 0) -> AnchorReady:
    return AnchorReady(epoch, p, version, version, STAMP, {}, checkpoint)


@pytest.fixture
def exchange() -> Exchange:
    made = Exchange(SPEC, "a", 0, Begin(0, 0, (0, 0), STAMP), 0.0)
    made.handle(beat(checkpoint=3), 0.0)
    return made


def stepped(exchange: Exchange, *arrived: Any) -> list[Any]:
    effects = exchange.handle(Stepped(8, 1.0, 0.1, 0.0, None), 1.0)
    for event in arrived:
        effects += exchange.handle(event, 1.0)
    return [e for e in [*effects, *exchange.handle(TimePassed(), 1.0)] if kept_or_adopted(e)]


def kept_or_adopted(effect: Any) -> bool:
    return isinstance(effect, KeepPart | Adopt)


def test_what_was_marked_before_a_learner_began_is_not_its_own(exchange: Exchange) -> None:
    assert stepped(exchange, beat(checkpoint=3), anchor(0, 1, 3)) == [Adopt(0, 0, 1)]


def test_the_part_is_kept_before_what_carries_the_mark_is_adopted(exchange: Exchange) -> None:
    """The publication was faster than the beat; one of before is adopted after: in flight."""
    assert stepped(exchange, anchor(0, 1, 4), anchor(1, 1, 3)) == [
        KeepPart(4, 0, 1, (0, 0)),
        Adopt(0, 0, 1),
        Adopt(0, 1, 1),
    ]
    assert stepped(exchange, beat(checkpoint=4), anchor(0, 2, 4)) == [Adopt(0, 0, 2)], "once"


def test_a_beat_alone_is_enough_also_while_no_step_is_taken(exchange: Exchange) -> None:
    assert stepped(exchange, beat(checkpoint=4)) == [KeepPart(4, 0, 1, (0, 0))]
    exchange.handle(StateGone(), 2.0)
    effects = exchange.handle(beat(checkpoint=5, state="paused"), 2.0)
    assert KeepPart(5, 0, 1, (0, 0)) in effects


def test_it_tells_for_which_mark_its_part_is_settled(exchange: Exchange) -> None:
    stepped(exchange, beat(checkpoint=4))
    exchange.handle(PartSettled(4), 1.0)
    (told,) = [e for e in exchange.handle(TimePassed(), 9.0) if isinstance(e, SendProgress)]
    assert told.progress.checkpoint == 4
    exchange.handle(PartSettled(3), 10.0)  # one that took longer
    assert exchange.progress().checkpoint == 4


def test_a_restore_is_a_reason_to_begin_again(exchange: Exchange) -> None:
    """Also when its keyframes came first; not when this life began after it."""
    exchange.handle(anchor(0, 7, epoch=1), 1.0)
    restored = Restored(epoch=1, serial=1, source="t/000001")
    (left,) = exchange.handle(beat(epoch=1, restored=restored), 1.0)
    assert isinstance(left, Leave) and left.outcome == "restored" and "t/000001" in left.reason
    assert not exchange.may_step
    later = Exchange(SPEC, "a", 1, Begin(1, 1, (7, 7), STAMP), 0.0)
    later.handle(beat(epoch=1, versions=(7, 7), restored=restored), 0.0)
    assert later.may_step
    raised = Exchange(SPEC, "a", 1, Begin(0, 1, (7, 7), STAMP), 0.0)
    raised.handle(beat(epoch=1, versions=(7, 7), restored=restored), 0.0)
    assert raised.left, "it was granted its moments before the restore"


def test_before_training_only_a_restore_that_its_epoch_has_reached_is_told() -> None:
    """Else a shard that hears of both would take the lost epoch for the restore's own."""
    recovery = Recovery(SPEC, "a", 1, OwnModel("d"), has_checkpoint=False, nonce_seed="boot")
    assert recovery.restore(0) == 0
    restored = Restored(epoch=2, serial=5, source="t/000001")
    recovery.handle(beat(epoch=2, restored=restored), 1.0)
    assert recovery.restore(1) == 0
    assert recovery.restore(2) == 5


def beat_of(*terms: int, serial: int, **changed: Any) -> BeatSeen:
    """Of two syncer shards; term 0 stands for one that has not spoken in that epoch."""
    restored = Restored(epoch=1, serial=serial, source="t/000001")
    return beat(term=sum(terms), terms=terms, restored=restored, **changed)


SHARDED = RunSpec.model_validate(
    {**SPEC.model_dump(), "algorithm": {"fragments": 2, "sync_every_steps": 8, "shards": 2}}
)


def test_a_restore_that_the_hub_has_lost_is_not_told_of_any_more() -> None:
    """Else shards that cannot go back would wait for each other: each would take the others for
    being back already. The hub was put back from before it; this life trains on."""
    exchange = Exchange(SHARDED, "a", 0, Begin(5, 5, (0, 0), STAMP, restore=3), 0.0)
    exchange.handle(beat_of(1, 1, serial=3, epoch=5), 0.0)
    assert exchange.progress().restore == 3
    exchange.handle(beat_of(1, 0, serial=3, epoch=1000), 1.0)
    assert exchange.progress().restore == 0, "one of them may have gone back without the other"
    exchange.handle(beat_of(1, 1, serial=2, epoch=1000), 1.0)
    assert exchange.progress().restore == 2 and exchange.may_step is False
    exchange.handle(beat(epoch=1001, term=4, terms=(2, 2)), 1.0)
    assert exchange.progress().restore == 0, "it never went back"


def test_nor_by_one_that_does_not_train_yet() -> None:
    recovery = Recovery(SHARDED, "a", 1, OwnModel("d"), has_checkpoint=False, nonce_seed="boot")
    recovery.joined, recovery.restored = 5, Restored(epoch=4, serial=3, source="t/000003")
    assert recovery.restore(5) == 3
    assert recovery.restore(1000) == 0
    recovery.handle(beat_of(1, 0, serial=3, epoch=1000), 1.0)
    assert (recovery.restore(5), recovery.restore(1000)) == (3, 0)
    recovery.handle(beat_of(1, 1, serial=2, epoch=1000), 1.0)
    assert recovery.restore(1000) == 2
    began = Restored(epoch=1001, serial=3, source="t/000003")
    recovery.handle(beat(epoch=1001, term=2, terms=(2, 0), restored=began), 1.0)
    assert recovery.restore(1001) == 3, "another shard has gone back, and this one shall follow"


MOMENTS = {"mu": np.arange(4, dtype=np.float32), "count": np.array(3, np.int32)}


def sealed(root: str, *learners: str, damaged: str = "") -> str:
    there, ref = RunCheckpoints(root), reference(SPEC.folder, 4)
    parts = {}
    for name in learners:
        moments = {k: v + ord(name) for k, v in MOMENTS.items()}
        write_part(SPEC, root, name, 0, KeepPart(4, 0, 1, (0, 0)), pack(moments))
        found = there.written_part(ref, f"learner-{name}", LearnerPart)
        assert found is not None
        parts[name] = found[1]
    if damaged:
        (path,) = Path(root, ref).glob(f"learner-{damaged}.000.*")
        path.write_bytes(b"rubbish")
    there.seal(
        ref,
        CheckpointManifest(
            run="t",
            run_id="",
            number=4,
            reason="",
            at=0.0,
            epoch=0,
            stamp=STAMP,
            versions=(0, 0),
            parameters=4,
            spec={},
            shards=(),
            learners=parts,
            missing={},
            leases=(),
            incarnations={},
            bytes=0,
        ),
    )
    return ref


def first_of(found: Arrays | None) -> float:
    assert found is not None
    return float(found["mu"][0])


def test_a_learner_goes_on_with_its_own_moments_or_with_anybodys(tmp_path: Path) -> None:
    ref = sealed(str(tmp_path), "b", "c", damaged="")
    own, faults = read_part(str(tmp_path), ref, "c", lambda data: None)
    assert (first_of(own), faults) == (float(ord("c")), [])
    other, _ = read_part(str(tmp_path), ref, "a", lambda data: None)
    assert first_of(other) == float(ord("b"))


def test_a_part_that_cannot_be_used_is_passed_over_with_its_reason(tmp_path: Path) -> None:
    ref = sealed(str(tmp_path), "b", "c", damaged="c")
    found, faults = read_part(str(tmp_path), ref, "c", lambda data: None)
    assert first_of(found) == float(ord("b")) and "learner-c.000" in faults[0]

    def never(data: State) -> None:
        raise ValueError("of another model")

    nothing, faults = read_part(str(tmp_path), ref, "b", never)
    assert nothing is None and "of another model" in faults[0]
    assert read_part(str(tmp_path), "t/000009", "b", never)[1] == [
        f"there is no checkpoint t/000009 in {tmp_path}; known: t/000004"
    ]


def test_a_part_that_is_passed_over_is_let_go_of_before_another_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is as large as all moments: there is room for one."""
    ref, before = sealed(str(tmp_path), "a", "b", "c"), list[weakref.ref[Any]]()
    read: Any = RunCheckpoints._whole

    def looked_at(self: RunCheckpoints, ref: str, stored: Any) -> memoryview:
        assert all(one() is None for one in before)
        whole: memoryview = read(self, ref, stored)
        before.append(weakref.ref(whole))
        return whole

    def refuse(data: State) -> None:
        before.append(weakref.ref(views(data)["mu"]))
        raise ValueError("of another model")

    monkeypatch.setattr(RunCheckpoints, "_whole", looked_at)
    found, faults = read_part(str(tmp_path), ref, "b", refuse)
    assert found is None and len(before) == 6 and len(faults) == 4
