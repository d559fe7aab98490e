"""What a learner says of itself before it trains; while it trains, the exchange reports."""

import math

from diloco_learner.recovery import Recovery
from diloco_learner.stages import State
from diloco_shared.protocol.messages import Progress, RecoveryTimes


def before_training(
    learner: str, incarnation: int, epoch: int, versions_P: tuple[int, ...], restore: int = 0
) -> Progress:
    """Alive, nothing done yet: `joining`, or `recovering` once every anchor is there."""
    zeros = (0,) * len(versions_P)
    return Progress(
        learner=learner,
        incarnation=incarnation,
        epoch=epoch,
        state="recovering" if min(versions_P) >= 0 else "joining",
        step=0,
        tokens=0,
        c_steps=zeros,
        c_tokens=zeros,
        adopted=tuple(-1 for _ in zeros),
        adopted_at=zeros,
        loss=math.nan,
        step_s=0.0,
        wait_s=0.0,
        restore=restore,
    )


def recovery_times(
    recovery: Recovery, started_at: float, stepping_at: float | None, now: float
) -> RecoveryTimes:
    """How this process came to train; all times are on one clock, whatever its origin."""

    def since(at: float | None) -> float | None:
        return None if at is None else max(at - started_at, 0.0)

    settled = recovery.reached.get(State.ANCHORING, recovery.reached.get(State.BOOTSTRAPPING))
    return RecoveryTimes(
        age_s=max(now - started_at, 0.0),
        granted_s=since(recovery.granted_at),
        donor_s=since(recovery.reached.get(State.RECEIVING)),
        settled_s=since(settled),
        stepping_s=since(stepping_at),
        donor=recovery.donor,
        source=recovery.source,
        attempts=recovery.attempt,
    )
