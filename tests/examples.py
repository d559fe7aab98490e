"""How many examples a property is tried with, as a share of what the profile gives.

A number of its own would hold in every profile, and exploring would look no further than the tests
of every day (conftest.py).
"""

from hypothesis import settings


def examples(percent: int, **more: int) -> settings:
    """So many of a hundred; `more`: what else Hypothesis is to do for this property."""
    count = settings.default.max_examples * percent // 100
    return settings(max_examples=max(count, 1), **more)
