"""How much a contribution counts (paper section 3.4): quantity times quality."""


def weight(c_tokens: int, c_steps: int) -> float:
    """c_tokens^2 / c_steps: tokens since adoption times tokens per step; 0 if either is 0."""
    if c_tokens <= 0 or c_steps <= 0:
        return 0.0
    return c_tokens * c_tokens / c_steps
