"""What is wrong with an expression in PromQL, as far as this can be seen without Prometheus.

Its words, brackets, metrics and labels are looked at. Order and types are not: whether an operator
has an operand on each side, or a rate is one of a range. Prometheus' own tool sees these, where it
is installed.
"""

import re
from collections.abc import Mapping

# Those that somebody here uses, or may soon: one that is missing is added after a look at its page.
# fmt: off
FUNCTIONS = {
    "abs", "absent", "absent_over_time", "avg_over_time", "ceil", "changes", "clamp",
    "clamp_max", "clamp_min", "count_over_time", "delta", "deriv", "floor",
    "histogram_quantile", "idelta", "increase", "irate", "label_join", "label_replace",
    "last_over_time", "max_over_time", "min_over_time", "predict_linear", "present_over_time",
    "quantile_over_time", "rate", "resets", "round", "scalar", "sort", "sort_desc",
    "sum_over_time", "time", "timestamp", "vector",
}
AGGREGATIONS = {
    "avg", "bottomk", "count", "count_values", "group", "max", "min", "quantile", "stddev",
    "stdvar", "sum", "topk",
}
# fmt: on
# After these stand labels in brackets; those of `group_left` and `group_right` may be left out.
GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless"}
MODIFIERS = {"offset", "bool"}
_CLOSES = {")": "(", "]": "[", "}": "{"}
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<time>(?:\d+(?:ms|[smhdwy]))+)
    | (?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?)
    | (?P<name>[A-Za-z_:][\w:]*)
    | (?P<sign>==|!=|<=|>=|=~|!~|[-+*/%^<>=,:(){}\[\]])
    )""",
    re.VERBOSE,
)


def words(expression: str) -> list[tuple[str, str]]:
    """(kind, text); the rest of a text that nobody can read is of the kind "unknown"."""
    found, at, end = list[tuple[str, str]](), 0, len(expression.rstrip())
    while at < end:
        match = _TOKEN.match(expression, at)
        if match is None or match.lastgroup is None:
            return [*found, ("unknown", expression[at:end].strip())]
        found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found


def faults(expression: str, metrics: Mapping[str, set[str]]) -> list[str]:
    """`metrics`: those that there are, with their labels."""
    said = words(expression)
    found = [f"unreadable: {text}" for kind, text in said if kind == "unknown"]
    named = [text for kind, text in said if kind == "name" and text in metrics]
    labels = set[str]().union(*(metrics[name] for name in named))
    return found + _unbalanced(said) + _unknown(said, metrics, labels)


def _unbalanced(said: list[tuple[str, str]]) -> list[str]:
    is_open = list[str]()
    for kind, text in said:
        if kind == "sign" and text in _CLOSES.values():
            is_open.append(text)
        elif kind == "sign" and text in _CLOSES and (not is_open or is_open.pop() != _CLOSES[text]):
            return [f"{text} closes nothing"]
    return [f"{text} stays open" for text in is_open]


def _unknown(
    said: list[tuple[str, str]], metrics: Mapping[str, set[str]], labels: set[str]
) -> list[str]:
    """Names that stand for nothing. In braces are labels of the metric before them."""
    found = list[str]()
    place = list[tuple[str, str]]()  # brackets around it, and what is before each
    before = ""
    for (kind, text), (_, after) in zip(said, [*said[1:], ("", "")], strict=True):
        if kind == "sign" and text in _CLOSES.values():
            place.append((text, before))
        elif kind == "sign" and text in _CLOSES and place:
            place.pop()
        elif kind == "name":
            bracket, owner = place[-1] if place else ("", "")
            if bracket == "{":
                known = text in metrics.get(owner, set())
            elif owner in GROUPINGS:
                known = text in labels
            elif text in GROUPINGS - {"group_left", "group_right"} or text in FUNCTIONS:
                known = after == "("
            elif text in AGGREGATIONS:
                known = after in ("(", "by", "without")
            else:
                known = text in metrics or text in OPERATORS | MODIFIERS | GROUPINGS
            if not known:
                found.append(f"{text} is nothing that there is here")
        before = text
    return found
