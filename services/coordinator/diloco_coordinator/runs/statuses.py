"""Where runs stand, as their leaders show it; whose end is overdue. Pure."""

import math
from dataclasses import dataclass, field

from diloco_coordinator.runs.shards import fitted, merged
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Beat, Stamp
from diloco_shared.protocol.pace import LAST_EVALUATION_S
from diloco_shared.protocol.records import RunRecord, RunStatus, TokenCounts
from diloco_shared.protocol.run_states import OVER, over, seen

# A stop that nobody has carried out after this many seconds is carried out by the coordinator, if
# no leader speaks: one that is gone is replaced within its lease of 3 s, and ends it within 5 more.
FORCE_S = 8.0
# A leader that shows nothing for this long is none: it does twice a second.
SILENT_S = 4.0
# A leader that beats and has not renewed its status for this long cannot write it: where the hub's
# disk is full no key takes anything, while what is only passed on still comes.
UNWRITTEN_S = 2.0
# One that speaks but does not end the run in this time cannot: its tape may take no record.
FORCE_S_MAX = 30.0
# An end that its leader did not live to settle is settled after this many seconds of silence; while
# a learner makes the last evaluation, only once that must have ended.
SETTLE_S = 30.0


def run_id_of(record: RunRecord) -> str:
    """What tells a run from an earlier one of its name."""
    return str(record.spec.get("id", ""))


def shards_of(record: RunRecord) -> int:
    """Syncer shards of a run."""
    algorithm = record.spec.get("algorithm", {})
    return int(algorithm.get("shards", 1))


def fragments_of(record: RunRecord) -> int:
    """Fragments that the parameters of a run are cut into."""
    algorithm = record.spec.get("algorithm", {})
    return int(algorithm.get("fragments", 0))


@dataclass(slots=True)
class Standings:
    """`now` is monotonic seconds. A status of another run of the same name counts for nothing."""

    shards: dict[str, dict[str, RunStatus]] = field(default_factory=dict)  # by run and key
    statuses: dict[str, RunStatus] = field(default_factory=dict)  # of runs, made of those
    renewed_at: dict[str, float] = field(default_factory=dict)  # by key
    heard: dict[str, Beat] = field(default_factory=dict)  # by key: of leaders that cannot write
    heard_at: dict[str, float] = field(default_factory=dict)  # by key: when such a beat came last
    listening_since: float = 0.0  # before, leaders may have said what nobody here heard
    stopping_since: dict[str, float] = field(default_factory=dict)  # by id of the run
    misfits: set[str] = field(default_factory=set)  # keys whose status says nothing of their run

    def take(self, key: str, status: RunStatus | None, now: float) -> str:
        """A key says something new; the run that it is about."""
        run = key.partition(".")[0]
        if status is None:
            self.shards.get(run, {}).pop(key, None)
            self._drop(key)
        else:
            shards = self.shards.setdefault(run, {})
            if status != shards.get(key):  # else a repeat by the watch
                self.renewed_at[key] = now
                self.heard.pop(key, None)
            shards[key] = status
        return run

    def hear(self, beat: Beat, now: float) -> bool:
        """A leader beats: whether that says more of its run than the status it has written."""
        key = subjects.status_key(beat.run, beat.shard)
        there = self.shards.get(beat.run, {}).get(key)
        if there is None or beat.run_id not in ("", there.run_id):
            return False
        older = (beat.epoch, beat.term) < (there.epoch, there.term)
        if older or over(there) or beat.state in OVER or self.silent_s(key, now) < UNWRITTEN_S:
            return False
        before = self.heard.get(key)
        self.heard[key], self.heard_at[key] = beat, now
        return before is None or (before.state, before.reason) != (beat.state, beat.reason)

    def _told(self, key: str, status: RunStatus) -> RunStatus:
        """A shard's status, with the state that its leader could not write."""
        beat = self.heard.get(key)
        if beat is None:
            return status
        return status.model_copy(update={"state": beat.state, "reason": beat.reason})

    def put_together(self, run: str, record: RunRecord | None) -> RunStatus | None:
        """The status of a run, made anew; None while there is none."""
        told = [seen(self._told(key, s)) for key, s in self.shards.get(run, {}).items()]
        known = sorted(told, key=lambda s: s.shard)
        if record is not None:
            known = self._fitted(record, [s for s in known if s.run_id in ("", run_id_of(record))])
        whole = merged(known, shards_of(record) if record else 1)
        if whole is None:
            self.statuses.pop(run, None)
        else:
            self.statuses[run] = whole
        return whole

    def _fitted(self, record: RunRecord, parts: list[RunStatus]) -> list[RunStatus]:
        """Those that can be put together; the keys of others are `misfits`."""
        if shards_of(record) == 1:
            return parts  # shown as it is
        found = []
        for part in parts:
            key = subjects.status_key(record.name, part.shard)
            fit = fitted(part, fragments_of(record)) if part.shard < shards_of(record) else None
            if fit is None:
                self.misfits.add(key)
            else:
                self.misfits.discard(key)
                found.append(fit)
        return found

    def _drop(self, key: str) -> None:
        self.renewed_at.pop(key, None)
        self.heard.pop(key, None)
        self.heard_at.pop(key, None)
        self.misfits.discard(key)

    def leaders(self, run: str) -> tuple[str, ...]:
        """Who led each shard of a run last."""
        return tuple(s.leader for s in self.shards.get(run, {}).values())

    def forget(self, run: str, run_id: str) -> None:
        """A run is deleted. What is heard of another one, which has its name by now, stays."""
        there = self.shards.pop(run, {})
        for key, status in there.items():
            if status.run_id in ("", run_id):
                self._drop(key)
            else:
                self.shards.setdefault(run, {})[key] = status
        self.statuses.pop(run, None)
        self.stopping_since.pop(run_id, None)

    def of_shard(self, record: RunRecord, shard: int) -> RunStatus | None:
        """What is shown of one shard of this run."""
        mine = self.shards.get(record.name, {}).values()
        ids = ("", run_id_of(record))
        return next((s for s in mine if s.shard == shard and s.run_id in ids), None)

    def at(self, key: str) -> RunStatus | None:
        """What was heard last under a key, of whatever run."""
        return self.shards.get(key.partition(".")[0], {}).get(key)

    def silent_s(self, key: str, now: float) -> float:
        """Seconds for which nobody has renewed a status; endless if there is none."""
        return now - self.renewed_at.get(key, -math.inf)

    def wordless_s(self, run: str, now: float) -> float:
        """Seconds for which the leader of some shard of a run has neither written nor beaten."""
        keys = self.shards.get(run, {})
        spoke = (max(self.renewed_at.get(k, 0.0), self.heard_at.get(k, 0.0)) for k in keys)
        return max((now - max(at, self.listening_since) for at in spoke), default=0.0)

    def watch_stop(self, record: RunRecord, now: float) -> None:
        """Remember since when a stop is wished for; a hub that is put back may take it back."""
        if record.desired == "stopped":
            self.stopping_since.setdefault(run_id_of(record), now)
        else:
            self.stopping_since.pop(run_id_of(record), None)

    def overdue(
        self, record: RunRecord, shard: int, key: str, now: float, *, evaluated: bool = False
    ) -> str:
        """Why the coordinator has to end this shard of a run; "" while its leader may.

        `evaluated`: a learner says that it makes the run's last evaluation.
        """
        there, listening_s = self.of_shard(record, shard), now - self.listening_since
        silent_s = min(self.silent_s(key, now), listening_s)
        if there is not None and over(there):
            patience_s = LAST_EVALUATION_S if evaluated else SETTLE_S
            settled = there.settled or silent_s < patience_s
            return "" if settled else f"nobody settled its end for {patience_s:.0f} s"
        if record.desired != "stopped":
            return ""
        # A leader that was cut off with us has its time from then on.
        wished_s = min(now - self.stopping_since.get(run_id_of(record), now), listening_s)
        if wished_s >= FORCE_S and silent_s >= SILENT_S:
            return "no syncer leads it"
        if wished_s >= FORCE_S_MAX:
            return f"its syncer could not end it in {FORCE_S_MAX:.0f} s"
        return ""


def forced(
    record: RunRecord, shard: int, there: RunStatus | None, why: str, at: float
) -> RunStatus:
    """The end that a coordinator shows in a leader's place; nothing of the tape is touched."""
    text = f"stopped by the coordinator: {why}"
    if there is not None:
        state = there.state if over(there) else "stopped"
        reason = there.reason if over(there) else text
        end = {"state": state, "reason": reason, "settled": True, "forced": not over(there)}
        if there.checkpoint_state == "making":
            failed = "the run was over before it was complete"
            end |= {"checkpoint_state": "failed", "checkpoint_reason": failed}
        return there.model_copy(update={**end, "at": at})
    return RunStatus(
        run=record.name,
        run_id=run_id_of(record),
        state="stopped",
        reason=text,
        epoch=0,
        term=0,
        shard=shard,
        leader="",
        quorum=record.quorum,
        versions=(-1,) * fragments_of(record),
        tokens_by_fragment=(TokenCounts(),) * fragments_of(record),
        stamp=Stamp(round=-1, steps=0, fraction=0.0, fraction_per_step=0.0),
        rounds_committed=0,
        rounds_skipped=0,
        contributions_merged=0,
        refused={},
        alive=(),
        participating=(),
        parameters=0,
        tokens_per_step=0,
        tokens_processed=0,
        tokens_useful=0,
        bytes_up=0,
        bytes_down=0,
        learners={},
        settled=True,
        forced=True,
        at=at,
    )
