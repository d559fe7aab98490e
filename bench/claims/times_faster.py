"""12B parameters in four regions over 2 to 5 Gbit/s: how many times sooner than synchronously.

    python bench/claims/times_faster.py [--json FILE]

Computed from the link model of `diloco sim bandwidth`: nothing here depends on the machine;
bench/faster.py measures the same with small models at the sockets. The announcement says "more
than 20 times faster than conventional synchronization methods" and does not say how long a step
was, so that it stands here for many: data-parallel training steps `utilisation` of the time, a
Decoupled learner always, provided that the link carries its fragments (`least link`, each way;
P = H = 24, so one fragment with every step), while keyframes go out, too.
"""

import argparse
from pathlib import Path

from written import write

from diloco_planner.bandwidth import CODEC_BITS, Link, Method, on_link, required

PARAMS, REGIONS = 12e9, 4
LINKS_GBIT = (2.0, 3.0, 5.0)
STEPS_S = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 16.0)
CODECS = ("bf16", "int4")
PUBLISHED = 20.0  # times faster


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row(gbit, step_s) for gbit in LINKS_GBIT for step_s in STEPS_S]
    print(f"{'Gbit/s':>6} {'step s':>6} {'dp util. %':>10} {'times':>6}  least link bf16, int4")
    for r in rows:
        fits = [c for c in CODECS if r[f"least_link_{c}"] <= r["gbit_per_s"]]
        least = "  ".join(f"{r[f'least_link_{c}']:6.2f}" for c in CODECS)
        print(
            f"{r['gbit_per_s']:6g} {r['step_s']:6g} {100 * r['utilisation_dp']:10.1f} "
            f"{r['times_faster']:6.1f}  {least}  {' and '.join(fits) or 'neither'} fit"
        )
    if args.json:
        write(args.json, figures(rows), 0, rows=rows, published_times_faster=PUBLISHED)


def row(gbit: float, step_s: float) -> dict[str, float]:
    """One link and one time of a step."""
    stepping = on_link(_link("dp", step_s), gbit)["utilisation_on_link"]
    found = {"gbit_per_s": gbit, "step_s": step_s, "utilisation_dp": stepping}
    found["times_faster"] = 1 / stepping
    for codec in CODECS:
        need = required(_link("decoupled", step_s, CODEC_BITS[codec]))["gbit_per_s_shared_link"]
        found[f"least_link_{codec}"] = need
    return found


def figures(rows: list[dict[str, float]]) -> dict[str, float]:
    """Per link: between which steps it is 20 times and more, and the fragments get through."""
    found = {}
    for gbit in LINKS_GBIT:
        for codec in CODECS:
            # What a step sends does not grow with its time.
            least = required(_link("decoupled", 1.0, CODEC_BITS[codec]))["gbit_per_s_shared_link"]
            found[f"step_s_least_{codec}_{gbit:g}gbit"] = least / gbit
        found[f"step_s_most_for_20_times_{gbit:g}gbit"] = _longest(gbit)
        found[f"times_faster_3s_{gbit:g}gbit"] = next(
            r["times_faster"] for r in rows if (r["gbit_per_s"], r["step_s"]) == (gbit, 3.0)
        )
    return found


def _longest(gbit: float) -> float:
    """The longest step, in tenths of a second, with which data-parallel is 20 times slower."""
    tenths = 1
    while 1 / on_link(_link("dp", (tenths + 1) / 10), gbit)["utilisation_on_link"] >= PUBLISHED:
        tenths += 1
    return tenths / 10


def _link(method: Method, step_s: float, bits: float = 16.0) -> Link:
    return Link(method, PARAMS, REGIONS, step_s, up_bits=bits, down_bits=bits)


if __name__ == "__main__":
    main()
