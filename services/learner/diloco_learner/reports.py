"""What a learner says of itself before it trains; while it trains, the exchange reports."""

import math

from diloco_shared.protocol.messages import Progress


def before_training(
    learner: str, incarnation: int, epoch: int, versions_P: tuple[int, ...]
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
    )
