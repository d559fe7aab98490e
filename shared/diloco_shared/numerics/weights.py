"""How much a contribution counts (paper section 3.4): quantity times quality."""

from diloco_shared.config import Weighting


def weight(c_tokens: int, c_steps: int, weighting: Weighting = "quality") -> float:
    """By `quality`: c_tokens^2 / c_steps, tokens since adoption times tokens per step.

    By all three 0 if either is 0: who has done nothing is not merged.
    """
    if c_tokens <= 0 or c_steps <= 0:
        return 0.0
    if weighting == "quality":
        return c_tokens * c_tokens / c_steps
    return float(c_tokens) if weighting == "tokens" else 1.0
