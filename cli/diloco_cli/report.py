"""What a run achieved, as figures: a pure function of its events, rounds and last status.

Definitions
- `goodput`: time that learners spent training on tokens that were merged, over the time they were
  allocated. Allocated: from the first round to the last, times the learners that took part.
  Trained: seconds per step times steps, times the share of tokens that was useful.
- `bytes_data_parallel_equivalent`: what a ring all-reduce of bf16 gradients at every step would
  have sent: 2 (M - 1) / M * N * 2 bytes per learner and step, for the steps that were taken.
- `survivor_wait_s`: the longest total that any surviving learner's train loop spent on anything
  but its own computation.
"""

from collections.abc import Sequence
from typing import Any


def report(
    run: dict[str, Any],
    rounds: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Figures of one run; times in seconds, sizes in bytes, losses in nats per token."""
    status = run["status"] or {}
    evaluations = [e for e in events if e["kind"] == "evaluation"]
    losses = [e["data"]["val_loss"] for e in evaluations]
    committed = [r for r in rounds if r["outcome"] == "committed"]
    fault = fault_of(events)
    figures: dict[str, Any] = {
        "run": run["name"],
        "state": run["state"],
        "seed": run["spec"]["seed"],
        "val_loss_start": losses[0] if losses else None,
        "val_loss_end": losses[-1] if losses else None,
        "rounds_committed": len(committed),
        "rounds_skipped": len(rounds) - len(committed),
        "tokens_processed": status.get("tokens_processed", 0),
        "tokens_useful": status.get("tokens_useful", 0),
        "bytes_up": status.get("bytes_up", 0),
        "bytes_down": status.get("bytes_down", 0),
        "refused": status.get("refused", {}),
    }
    figures["goodput"] = goodput(status, rounds)
    figures["bytes_data_parallel_equivalent"] = data_parallel_bytes(
        status.get("tokens_processed", 0) / max(status.get("tokens_per_step", 1), 1),
        len(status.get("learners", {})),
        status.get("parameters", 0),
    )
    figures |= _fault_figures(fault, committed, status)
    return figures


def data_parallel_bytes(learner_steps: float, learners: int, parameters: int) -> int:
    """Ring all-reduce of bf16 gradients, every step, summed over learners."""
    if learners < 2:
        return 0
    return round(2 * (learners - 1) / learners * parameters * 2 * learner_steps)


def goodput(status: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> float | None:
    """See the module's text; None while nothing was merged."""
    learners = status.get("learners", {})
    processed = status.get("tokens_processed", 0)
    if len(rounds) < 2 or not learners or not processed:
        return None
    allocated_s = (rounds[-1]["at"] - rounds[0]["at"]) * len(learners)
    speeds = [x["step_s"] for x in learners.values() if x.get("step_s")]
    per_step = status.get("tokens_per_step") or 0
    if not speeds or allocated_s <= 0 or not per_step:
        return None
    trained_s = processed / per_step * (sum(speeds) / len(speeds))
    return float(min(trained_s / allocated_s, 1.0) * status["tokens_useful"] / processed)


def fault_of(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The first fault that was applied."""
    return next((e for e in events if e["kind"] == "fault-applied"), None)


def _fault_figures(
    fault: dict[str, Any] | None, committed: Sequence[dict[str, Any]], status: dict[str, Any]
) -> dict[str, Any]:
    """What happened around the fault: who waited, when the victim was back."""
    learners = status.get("learners", {})
    victim = fault["data"]["target"] if fault else None
    waits = [x.get("wait_s", 0.0) for name, x in learners.items() if name != victim]
    figures: dict[str, Any] = {
        "survivor_wait_s": max(waits, default=None),
        "victim": victim,
        "rounds_committed_while_down": None,
        "victim_contributions_after_return": None,
        "seconds_kill_to_contributing": None,
    }
    if fault is None:
        return figures
    after = [r for r in committed if r["at"] > fault["at"]]
    old_life = _life_before(committed, str(victim), fault["at"])
    back = [r for r in after if _merged_in_new_life(r, str(victim), old_life)]
    figures["victim_contributions_after_return"] = len(back)
    if back:
        figures["seconds_kill_to_contributing"] = back[0]["at"] - fault["at"]
        figures["rounds_committed_while_down"] = sum(1 for r in after if r["at"] < back[0]["at"])
    else:
        figures["rounds_committed_while_down"] = len(after)
    return figures


def _life_before(committed: Sequence[dict[str, Any]], victim: str, at: float) -> int:
    lives = [
        v["incarnation"]
        for r in committed
        if r["at"] <= at
        for v in r["verdicts"]
        if v["learner"] == victim
    ]
    return max(lives, default=-1)


def _merged_in_new_life(r: dict[str, Any], victim: str, old_life: int) -> bool:
    return any(
        v["learner"] == victim and v["outcome"] == "merged" and v["incarnation"] > old_life
        for v in r["verdicts"]
    )
