"""Bandwidth needed, next to the published figures: python bench/claims/bandwidth.py [--json FILE]

Computed from a model, not measured: nothing here depends on the machine.
"""

import argparse
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

from written import write

from diloco_planner.bandwidth import CODEC_BITS, KEYFRAME_CODEC, Link, required
from diloco_shared.spec.algorithm import Algorithm

# The published 4-bit format is not known; 0.43 of 1.67 fits blocks with scales of 32 bits.
INT4 = 4.125
# The lineage publishes on np.logspace(-1, 3, 50): its resolution.
GRID_STEP = 10 ** (4 / 49)
CENTERS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Known:
    """A published figure in Gbit/s and the setting that it is for."""

    name: str
    published: float
    link: Link
    key: str = "gbit_per_s"
    note: str = ""

    @property
    def ours(self) -> float:
        return float(required(self.link)[self.key])


DP_M2 = Link("dp", utilisation=0.90)
DP_M8 = Link("dp", learners=8, utilisation=0.95)
# Published figures leave out keyframes, which a run has.
BF16 = Link("decoupled", keyframe_every=0)
INT4_M8 = Link("decoupled", learners=8, up_bits=INT4, down_bits=INT4, keyframe_every=0)
BOTH = "gbit_per_s_both_directions"
KNOWN = (
    Known("dp_m2", 104, DP_M2, note="5B, M = 2, 90 % utilisation"),
    Known("dp_m8", 198, DP_M8, note="5B, M = 8, 95 % utilisation"),
    Known("decoupled_bf16", 1.7, BF16, note="5B, P = H = 24, tau = 2, transfer window, one way"),
    Known("decoupled_int4", 0.43, INT4_M8, note="the same with 4.125 bits, one way"),
    Known("decoupled_int4_both", 0.84, INT4_M8, BOTH, "the same, both ways (our reading)"),
)
# Earlier papers, whose models differ in what they leave out: compared in steps of their grid.
EARLIER = (
    Known(
        "streaming_paper_dp", 104.8, Link("dp", 10e9, step_s=0.8, utilisation=0.5),
        note="10B, 0.8 s, M = 2, 50 %",
    ),
    Known(
        "scaling_laws_diloco", 13.3,
        Link("diloco", 10e9, step_s=0.8, sync_every_steps=100, utilisation=0.9),
        note="10B, 0.8 s, M = 2, H = 100, 90 %",
    ),
)  # fmt: skip


def main() -> None:
    """Print tables; write the figures as JSON and the chart as PNG."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    print(f"{'Gbit/s':<22}{'published':>10}{'ours':>10}{'off':>8}")
    for known in KNOWN:
        figures[known.name] = known.ours
        off = f"{100 * (known.ours / known.published - 1):+.1f} %"
        print(f"{known.name:<22}{known.published:>10}{known.ours:>10.3f}{off:>8}  {known.note}")
    for known in EARLIER:
        steps = log(known.ours / known.published) / log(GRID_STEP)
        figures[known.name], figures[f"{known.name}_grid_steps"] = known.ours, steps
        off = f"{steps:+.1f}"
        print(f"{known.name:<22}{known.published:>10}{known.ours:>10.3f}{off:>8}  {known.note}")
    print("The last two: off in steps of their grid, each a factor of 1.21.\n")
    figures |= ratios(figures)
    figures |= of_runs()
    rows = centers()
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if args.json:
        published = {known.name: known.published for known in (*KNOWN, *EARLIER)}
        write(args.json, figures, 0, published=published, data_centers=rows)
    if args.png:
        from diloco_simulator.experiments.plots import bandwidth_chart

        bandwidth_chart(
            [("Data-parallel", 198, figures["dp_m8"]),
             ("Decoupled\nDiLoCo, int4", 0.84, figures["decoupled_int4_both"])],
            args.png,
        )  # fmt: skip


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Of data-parallel to Decoupled, as published: 61, 242 and 235."""
    found = {
        "ratio_bf16": figures["dp_m2"] / figures["decoupled_bf16"],
        "ratio_int4": figures["dp_m2"] / figures["decoupled_int4"],
        "ratio_int4_both_m8": figures["dp_m8"] / figures["decoupled_int4_both"],
    }
    for (name, ratio), published in zip(found.items(), (61, 242, 235), strict=True):
        print(f"{name:<22}{published:>10}{ratio:>10.0f}")
    print()
    return found


def of_runs() -> dict[str, float]:
    """What 5B needs with this project's codecs and its keyframes, every 16th version in fp32.

    By codec and codec of keyframes, of which bf16 is the other one.
    """
    found = {}
    for codec in ("bf16", "int4"):
        for whole in ("fp32", "bf16"):
            for name in ("average_up", "average_down", "shared_link", "keyframe"):
                needed = required(_run(codec, whole))[f"gbit_per_s_{name}"]
                found[f"{name}_{codec}_keyframes_{whole}"] = needed
                print(f"{name:<13}{codec}, keyframes in {whole}{needed:>8.3f}")
        # Of a run that says nothing of fragments.
        fewer = required(_run(codec, fragments=Algorithm.model_fields["fragments"].default))
        found[f"shared_link_{codec}_fragments_of_a_run"] = fewer["gbit_per_s_shared_link"]
    print()
    return found


def _run(codec: str, whole: str = KEYFRAME_CODEC, learners: int = 2, fragments: int = 24) -> Link:
    bits = CODEC_BITS[codec]
    return Link(
        "decoupled",
        learners=learners,
        fragments=fragments,
        up_bits=bits,
        down_bits=bits,
        keyframe_bits=CODEC_BITS[whole],
    )


def centers() -> list[dict[str, float]]:
    """What 5B needs over 2 to 16 data centers: no published table was found."""
    shared = "gbit_per_s_shared_link"
    return [
        {
            "data_centers": m,
            "dp_95": required(Link("dp", learners=m))["gbit_per_s"],
            "streaming_95": required(Link("streaming", learners=m))["gbit_per_s"],
            "window_bf16": required(BF16)["gbit_per_s"],
            "shared_link_bf16": required(BF16)[shared],
            "window_int4": required(INT4_M8)["gbit_per_s"],
            "shared_link_int4": required(INT4_M8)[shared],
            "hub_int4": m * required(INT4_M8)[shared],
            "hub_of_a_run_int4": required(_run("int4", learners=m))["gbit_per_s_hub"],
        }
        for m in CENTERS
    ]


if __name__ == "__main__":
    main()
