"""Fits of what was measured: a sum of terms with coefficients that are not negative."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
Terms = Mapping[str, Callable[[Row], float]]


def fit(rows: Sequence[Row], measured: str, terms: Terms) -> dict[str, Any]:
    """Coefficients by least squares of the *relative* errors, and the worst of those.

    A term whose coefficient would be negative is left out: its coefficient is 0.
    """
    wanted = np.array([row[measured] for row in rows], np.float64)
    names = list(terms)
    while True:
        columns = np.array([[terms[n](row) for n in names] for row in rows], np.float64)
        found, *_ = np.linalg.lstsq(columns / wanted[:, None], np.ones(len(rows)), rcond=None)
        if (found >= 0).all():
            break
        del names[int(np.argmin(found))]
    errors = columns @ found / wanted - 1
    known = dict(zip(names, found.tolist(), strict=True))
    return {
        "of": measured,
        "terms": {name: known.get(name, 0.0) for name in terms},
        "worst_relative_error": float(np.abs(errors).max()),
        "points": len(rows),
    }


def value(law: Mapping[str, Any], terms: Terms, row: Row) -> float:
    """What the law says of a point."""
    return float(sum(law["terms"][name] * term(row) for name, term in terms.items()))
