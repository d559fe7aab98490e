"""A diagram of states, drawn from a table of moves, as SVG. It needs no tool and no other page.

States stand below each other in their order. A move to the next one is a straight arrow, and one
that leaps over others bends around them, on the right.
"""

from collections.abc import Sequence
from html import escape

WIDTH, LEFT, BOX_W, BOX_H, GAP = 640, 20, 150, 38, 46
TEXT_X = LEFT + BOX_W // 2 + 14  # beside a straight arrow
BEND_X, BEND_STEP = 610, 26  # of the first arrow that leaps; each further one bends before it
INK, BLUE, PALE = "#222222", "#0072B2", "#eef4f8"
HEAD = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="8" '
    f'markerHeight="8" orient="auto"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker></defs>'
)


def diagram(states: Sequence[str], moves: Sequence[tuple[str, str, str]]) -> str:
    """`moves`: (from, to, why), each forward in the order of `states`; ValueError for another."""
    height = len(states) * BOX_H + (len(states) - 1) * GAP + 40
    place = {state: 20 + n * (BOX_H + GAP) for n, state in enumerate(states)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="13" fill="{INK}">',
        HEAD,
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    leaps = 0
    for start, end, why in moves:
        distance = list(states).index(end) - list(states).index(start)
        if distance < 1:
            raise ValueError(f"{start} to {end} leads back, which this diagram has no place for")
        if distance == 1:
            lines += _straight(place[start], why)
        else:
            lines += _around(place[start], place[end], why, leaps)
            leaps += 1
    lines += [line for state in states for line in _box(state, place[state])]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(state: str, y: int) -> list[str]:
    middle = f'x="{LEFT + BOX_W // 2}" y="{y + BOX_H // 2 + 5}"'
    return [
        f'<rect x="{LEFT}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="7" fill="{PALE}" '
        f'stroke="{BLUE}"/>',
        f'<text {middle} text-anchor="middle" font-weight="bold">{escape(state)}</text>',
    ]


def _straight(y: int, why: str) -> list[str]:
    x = LEFT + BOX_W // 2
    return [
        _arrow(f"M{x} {y + BOX_H}V{y + BOX_H + GAP}"),
        f'<text x="{TEXT_X}" y="{y + BOX_H + GAP // 2 + 5}">{escape(why)}</text>',
    ]


def _around(start: int, end: int, why: str, leaps: int) -> list[str]:
    """Each further arrow bends nearer to the boxes and ends a little higher, so that none cross."""
    x, right = BEND_X - leaps * BEND_STEP, LEFT + BOX_W
    low = end + 29 - 10 * leaps
    return [
        _arrow(f"M{right} {start + BOX_H // 2}H{x}V{low}H{right}"),
        f'<text x="{right + 12}" y="{start + BOX_H // 2 - 6}">{escape(why)}</text>',
    ]


def _arrow(path: str) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'
    )
