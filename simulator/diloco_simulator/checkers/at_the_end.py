"""What must be true of a run once it is over and everybody has left it."""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import PublicationManifest
from diloco_shared.protocol.pace import LAST_EVALUATION_S
from diloco_shared.protocol.wire import decode
from diloco_simulator.checkers.promises import LearnerLife
from diloco_simulator.checkers.watch import RunWatch
from diloco_simulator.checkers.watch_shard import OfShard

if TYPE_CHECKING:
    from diloco_simulator.inside.observer import Observer

# Within so many of its own steps after the heal everybody was merged, whatever happened before.
STEPS = 60.0


def look(observer: "Observer") -> None:
    """At what the hub still has, and at what was seen of everybody."""
    watch = observer.watch
    watch.data.look(math.inf)
    for of in watch.of:
        held = _held(observer, of)
        of.limits.down(held, of.terms + len(of.epochs), of.restores + of.rebirths)
    if watch.ended:
        _went_back_alike(watch, observer.reached.restores_failed)
        _merged_again(watch)
        _have_what_is_committed(watch)
        _evaluated(watch, told=observer.reached.last_told)


def _held(observer: "Observer", of: OfShard) -> list[int]:
    """Fragments of the manifests on DN, of a shard."""
    stream = subjects.dn_stream(observer.spec.name)
    if not observer.broker.exists(stream):
        return []
    there = observer.broker.select(stream, f"dn.{observer.spec.name}.>", 1)
    found = [decode(s.payload, PublicationManifest) for s in there if s.subject.endswith(".m")]
    return [m.fragment for m in found if m.fragment in of.merges.owned]


def _went_back_alike(watch: RunWatch, failed: Collection[tuple[int, int]]) -> None:
    """Every shard went back as it was asked to last.

    A stop may overtake a restore in one shard; where no learner was there after that, nobody could
    tell it that another one went back. And where a power cut took the very record of that restore
    from a shard, the end may come before it goes back once more. A shard that could not go back,
    and says so, stops nevertheless. `failed`: shard and serial of what was said so.
    """
    watch.report.looked("I6")
    told = any(end.outcome == watch.ended for end in watch.ends.values())
    newest = max(of.wish for of in watch.of)
    behind = [of for of in watch.of if of.wish < newest and newest not in of.merges.lost.restores]
    if watch.ended == "stopped":
        behind = [of for of in behind if (of.shard, newest) not in failed]
    if told and behind:
        watch.broken("I6", f"shards went back as asked at {[of.wish for of in watch.of]}")


def _merged_again(watch: RunWatch) -> None:
    for of in watch.of:
        for (learner, incarnation), life in of.members.lives.items():
            until, able_at = (
                min(of.committed_at, life.silent_since),
                max(watch.healed_at, life.able_at),
            )
            if not _long(life, until - able_at):
                continue
            watch.report.looked("I10")
            if of.members.merged_at.get(learner, -1.0) < watch.healed_at:
                of.report("I10", f"{learner} {incarnation} was never merged again after the heal")


def _long(life: LearnerLife, seconds: float) -> bool:
    return not life.drained and seconds > STEPS * life.step_s


def _evaluated(watch: RunWatch, *, told: bool) -> None:
    """Of a run that ended when nothing went wrong any more the last evaluation is told, or why
    there is none, if any learner stayed to the end; and nobody is dismissed over it. Where nothing
    was merged, nobody needs one, and where nobody led, there was nobody to ask for one."""
    versions, ended_at = _versions(watch), max(of.ended_at for of in watch.of)
    if min(of.ended_at for of in watch.of) < watch.healed_at:
        return
    if min(versions) < 0 or max(versions) == 0:
        return
    stayed = {
        m: e
        for m, e in watch.ends.items()
        if e.adopted == versions and e.at > ended_at and (e.outcome == watch.ended or e.dismissed)
    }
    if not stayed or watch.stops.by_force:  # the coordinator saw nobody lead, and waited for nobody
        return
    watch.report.looked("liveness")
    if not told:
        watch.broken("liveness", f"{', '.join(stayed)} left, and no last evaluation was told")
    for m, e in stayed.items():
        if e.dismissed and e.evaluates and e.at < ended_at + LAST_EVALUATION_S:
            watch.broken("liveness", f"{m} is dismissed over the last evaluation")


def _versions(watch: RunWatch) -> tuple[int, ...]:
    """The last ones, of every fragment."""
    return tuple(max(of_p) for of_p in zip(*(of.merges.versions for of in watch.of), strict=True))


def _have_what_is_committed(watch: RunWatch) -> None:
    versions = _versions(watch)
    # Who left a run that was over knows nothing of records that were lost after that.
    epochs = [begun for of in watch.of for begun in of.epochs]
    newest = max((epoch for epoch, _ in epochs), default=0)
    lost_at = min((at for epoch, at in epochs if epoch == newest), default=0.0)
    # Nor of what came before another end, where the end that it was told of was lost.
    knew_at = max(lost_at, *(of.ended_at for of in watch.of))
    for learner, end in watch.ends.items():
        if end.outcome != watch.ended or end.at < knew_at:
            continue
        watch.report.looked("I6")
        if end.adopted != versions:
            watch.broken("I6", f"{learner} ends with {end.adopted}, the tape {versions}")
