"""The planner's predictions over what was measured: python bench/claims/plan.py [--json FILE]

Every row asks the planner for the setting of something that was run, and divides what it predicts
by what was measured. Measured are: runs of real processes and benches whose results are in
docs/results; fleets of the simulator that compute nothing, run here (real machines, virtual
clock); and, for goodput of elastic jobs, the event-driven simulator behind the published table.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from written import write

from diloco_cli.demo import spec_of
from diloco_learner.training.trainer import Program
from diloco_planner import hub_model
from diloco_planner.goodput_model import YEAR_S, Failures
from diloco_planner.plan_request import PlanRequest
from diloco_planner.planner import Settings, predict
from diloco_shared.protocol.messages import TapeRound
from diloco_shared.spec.run import RunSpec
from diloco_simulator.experiments.setting import Interruptions
from diloco_simulator.experiments.setting import Setting as Islands
from diloco_simulator.experiments.train import IdleFleet

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
FAST_LINK = 1e5  # Gbit/s, where the link was not what was measured
P = 6  # fragments of all these runs but the simulated ones


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one run."""

    quantity: str
    run: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def wishes(params: float, learners: int, step_s: float, steps: float, **more: Any) -> PlanRequest:
    """A chip and a data center for each learner; a token a step."""
    asked = {
        "params": params,
        "chips": learners,
        "centers": learners,
        "step_s": step_s,
        "batch_tokens": learners,
        "tokens": learners * steps,
        "link_gbit_per_s": FAST_LINK,
        "mtbi_years": 1e6,
        "slice_chips": 1,
    }
    return PlanRequest.model_validate(asked | more)


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


# --- runs of real processes -----------------------------------------------------------------------


def of_bytes() -> list[Row]:
    """At the sockets of three learners, without what they read and sent to begin."""
    rows, body = [], recorded("bytes")
    for name, run in body["runs"].items():
        given, params = body["settings"][name], run["parameters"]
        keyframes = {k: given[k] for k in ("keyframe_every", "keyframe_codec") if k in given}
        codecs = (given["codec_up"], given["codec_down"])
        s = Settings(3, given["sync_every_steps"], P, 8, 3, *codecs, **keyframes)
        found = predict(wishes(params, 3, 1.0, run["learner_steps"] / 3), s)
        start = 4 * params  # one learner sends the initial parameters, three read them
        for way, starts in (("up", 1), ("down", 3)):
            measured = run["measured_by_plane"][f"data_{way}"] - starts * start
            predicted = found[f"bytes_{way}_per_step"] * run["learner_steps"]
            rows.append(Row(f"bytes {way}", f"bytes.json, {name}", predicted, measured))
    return rows


# Of `diloco demo`, unless it is told otherwise.
DEMO_STEPS = 240


def of_demo() -> list[Row]:
    """Three learners, one of them killed; the first sends initial parameters."""
    body, spec = recorded("demo"), RunSpec.model_validate(spec_of("demo", DEMO_STEPS))
    a, params = spec.algorithm, sum(Program.build(spec).layout.sizes)
    steps = body["tokens_processed"] / spec.tokens_per_step
    settings = Settings(
        3, a.sync_every_steps, a.fragments, a.overlap_steps, a.quorum, a.codec_up, a.codec_down
    )
    found = predict(wishes(params, 3, 1.0, DEMO_STEPS), settings)
    up = found["bytes_up_per_step"] * steps
    return [
        Row("bytes up", "demo.json", up, body["bytes_socket"]["data_up"] - 4 * params),
        Row("rounds", "demo.json", found["rounds"], body["rounds_committed"]),
    ]


def of_quality() -> list[Row]:
    """Real learners on a virtual clock, against data-parallel."""
    body = recorded("gaps")
    spec = RunSpec.model_validate({"name": "x", "budget": {"steps": 1}})
    params, rows = sum(Program.build(spec).layout.sizes), []
    for run in body["rows"]:
        m, name = run["learners"], f"gaps.json, {run['corpus']}, M = {run['learners']}"
        asked = wishes(params, m, 1.0, body["steps"])
        found = predict(asked, Settings(m, 24, P, 2, 1, "bf16", "bf16"))
        if run["corpus"] == body["rows"][0]["corpus"]:  # when things happen is the same for all
            rows.append(Row("rounds", name, found["rounds"], mean(run["rounds"])))
            took_s = mean(run["virtual_s"])
            rows.append(Row("seconds of the run", name, found["days"] * 86_400, took_s))
        losses = 1 + found["loss_gap"], 1 + run["gap"]
        rows.append(Row("loss over data-parallel's", name, *losses))
    return rows


def of_merge() -> list[Row]:
    """The merge's own bench, which is none of those that the laws come from; one thread."""
    body = recorded("merge")
    rows = []
    for row in body["rows"]:
        if row["rule"] != "rda" or row["threads"] != 1 or row["norms_known"]:
            continue
        if row["codec"] in hub_model.MERGED_VALUE_S:
            said = hub_model.merge_s(body["learners"], body["values"], row["codec"])
            took = (row["cpu_ms"] + row["digests_ms"]) / 1e3
            rows.append(
                Row("processor seconds of a merge", f"merge.json, {row['codec']}", said, took)
            )
    return rows


# --- simulated ------------------------------------------------------------------------------------


def of_goodput() -> list[Row]:
    """Closed forms against the event-driven simulator."""
    rows = []
    for cell in recorded("goodput")["cells"]:
        if cell["method"] == "decoupled":
            m, chips = cell["learners"], cell["chips"]
            asked = wishes(5e9, m, 1.0, 1000, chips=chips, mtbi_years=1.0, slice_chips=256)
            found = predict(asked, Settings(m, 24, 24, 2, 1, "bf16", "bf16"))
            rows.append(
                Row("goodput", f"goodput.json, M = {m}, {chips}", found["goodput"], cell["goodput"])
            )
    return rows


def of_deaths() -> list[Row]:
    """The same closed forms against a fleet whose learners die, all of their work with them."""
    m, steps, away_s = 8, 600, Failures().return_mean_s
    mtbi_s = 5 * away_s
    run = fleet(m, 1.0, 0.1, 2, steps, interruptions=Interruptions(mtbi_s, away_s))
    asked = wishes(1e5, m, 1.0, steps, mtbi_years=mtbi_s / YEAR_S)
    found = predict(asked, Settings(m, 24, P, 2, 1, "bf16", "bf16"))
    name = f"idle fleet, M = {m}, {run['interruptions']} deaths"
    return [
        Row("goodput (steps)", name, found["goodput"], run["stepping"]),
        Row("goodput (merged)", name, found["goodput"], run["goodput"]),
    ]


def of_rounds() -> list[Row]:
    """Rounds, time and staleness where steps are longer or shorter than a round trip."""
    rows = []
    for m, step_s, one_way_s, overlap in (
        (4, 1.0, 0.03, 2), (4, 1.0, 0.1, 2), (8, 0.2, 0.1, 3), (8, 0.1, 0.1, 5), (16, 0.05, 0.1, 9)
    ):  # fmt: skip
        run = fleet(m, step_s, one_way_s, overlap, 150)
        asked = wishes(1e5, m, step_s, 150, round_trip_s=2 * one_way_s)
        found = predict(asked, Settings(m, 24, P, overlap, 1, "bf16", "bf16"))
        name = f"idle fleet, M = {m}, steps of {step_s:g} s, {2 * one_way_s:g} s there and back"
        rows.append(Row("rounds", name, found["rounds"], run["rounds"]))
        rows.append(Row("seconds of the run", name, found["days"] * 86_400, run["virtual_s"]))
        rows.append(Row("staleness, steps", name, found["staleness_steps"], run["staleness"]))
    return rows


def fleet(
    learners: int, step_s: float, one_way_s: float, overlap: int, steps: int, **more: Any
) -> dict[str, Any]:
    """A run of learners that compute nothing, and the mean staleness of what it merged."""
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "algorithm": {"fragments": P, "sync_every_steps": 24, "overlap_steps": overlap},
            "membership": {"learners_min": learners, "learners_max": learners},
            "budget": {"steps": steps},
        }
    )
    run = IdleFleet(spec, Islands(learners, step_s=step_s, one_way_s=one_way_s, jitter=0.1, **more))
    found = run.run()
    return found | {"staleness": staleness(run.records)}


def staleness(tape: list[Any]) -> float:
    """Mean steps from what a learner gave to its adoption of what came of it.

    A learner's next contribution of the fragment begins where it adopted.
    """
    gave: dict[tuple[str, int, int], int] = {}
    steps = []
    for record in tape:
        if not isinstance(record, TapeRound):
            continue
        for v in record.verdicts:
            if v.outcome == "merged":
                key = (v.learner, v.incarnation, record.fragment)
                if key in gave:
                    steps.append(v.step_from - gave[key])
                gave[key] = v.step_to
    return mean(steps)


# --- output ---------------------------------------------------------------------------------------


PARTS = {
    "bytes": of_bytes,
    "demo": of_demo,
    "quality": of_quality,
    "merge": of_merge,
    "goodput": of_goodput,
    "deaths": of_deaths,
    "rounds": of_rounds,
}


def main() -> None:
    """Print a table; write rows, and per quantity the least and the largest ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="others stay as FILE has them"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts: dict[str, list[dict[str, Any]]] = {}
    if args.json and args.json.exists():
        parts = json.loads(args.json.read_text(encoding="utf-8"))["parts"]
    for part in args.part or PARTS:
        parts[part] = [asdict(row) | {"ratio": row.ratio} for row in PARTS[part]()]
    rows = [row for part in parts.values() for row in part]
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["quantity"]):
        ratios[row["quantity"]].append(row["ratio"])
        print(
            f"{row['quantity']:<30}{row['run']:<58}{row['predicted']:>12.4g}"
            f"{row['measured']:>12.4g}{row['ratio']:>8.3f}"
        )
    print("\npredicted over measured:")
    figures = {}
    for quantity, found in ratios.items():
        figures[quantity] = {"least": min(found), "largest": max(found), "rows": len(found)}
        print(f"{quantity:<30}{min(found):.3f} to {max(found):.3f} in {len(found)}")
    if args.json:
        write(args.json, figures, 0, parts=parts)


if __name__ == "__main__":
    main()
