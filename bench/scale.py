"""What a syncer and its hub cost as learners (M), fragments (P) and sizes grow; the laws of it.

    python bench/scale.py --part decisions|merging|network|fleet [--json FILE]

decisions: `Machine.handle` and the coding of its messages. merging: gate, merge, outer step and
publication of the syncer's own store, one thread. network: whole rounds with real processes over a
message server, against what the laws say. fleet: 256 learners and 24 fragments in the simulator;
once more, and the digest must be the same. Processor seconds, so that other work disturbs little.
Each part replaces its own in FILE; the laws follow from all that is there.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fragments.workers import Server
from scaling import decisions, fleet, laws, merging, network

from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.spec.codecs import NAMES

Rows = list[dict[str, Any]]
MILLION = 1 << 20
LEARNERS = (2, 4, 8, 16, 32, 64, 128, 256)
FRAGMENTS = (1, 2, 4, 8, 16, 32, 64)
SIZES = (1, 4, 16, 64)  # million values
NETWORK_LEARNERS = (2, 4, 8, 16)
NETWORK_VALUES = 8 * MILLION

# A step's reports and a round's decisions: per learner, and per pair of learners, since some
# answers depend on everybody.
OF_STEP: laws.Terms = {
    "per_learner": lambda r: r["learners"],
    "per_learner_and_fragment": lambda r: r["learners"] * r["fragments"],
    "per_pair_of_learners": lambda r: r["learners"] ** 2,
}
OF_ROUND: laws.Terms = {
    "per_round": lambda r: 1,
    "per_learner": lambda r: r["learners"],
    "per_pair_of_learners": lambda r: r["learners"] ** 2,
}
OF_GATE: laws.Terms = {
    "per_learner": lambda r: r["learners"],
    "per_contributed_value": lambda r: r["learners"] * r["values"],
}
OF_STAGE: laws.Terms = {
    "per_round": lambda r: 1,
    "per_value": lambda r: r["values"],
    "per_contributed_value": lambda r: r["learners"] * r["values"],
}
OF_MEMORY: laws.Terms = {
    "per_value": lambda r: r["values"],
    "per_contributed_byte": lambda r: r["learners"] * r["payload_bytes"],
}


def decided() -> Rows:
    """As M grows, then as P does."""
    points = [(m, 24) for m in LEARNERS] + [(32, p) for p in FRAGMENTS]
    return told(points, lambda m, p: decisions.cost(m, p))


def merged() -> Rows:
    """As M grows, as the size does, by codec, and as P does for one model."""
    rows = told([(m, MILLION) for m in LEARNERS], merging.cost)
    rows += told([(4, n * MILLION) for n in SIZES[1:]], merging.cost)
    by_codec = [(m, 4 * MILLION, name) for name in NAMES for m in (2, 16)]
    rows += told(by_codec, merging.cost)
    of_one_model = [(4, 16 * MILLION, p) for p in FRAGMENTS[1:]]
    rows += told(of_one_model, lambda m, n, p: merging.cost(m, n, fragments=p))
    return rows + told([(8, 8 * MILLION)], lambda m, n: merging.cost(m, n, threads=2))


def told(points: list[Any], measure: Callable[..., dict[str, Any]]) -> Rows:
    rows = []
    for point in points:
        rows.append(measure(*point))
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def networked() -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        nats = NatsServer(Path(folder) / "nats")
        await nats.start()
        try:
            assert nats.pid is not None
            server = Server(nats.pid)
            return await asyncio.to_thread(
                told,
                [(m,) for m in NETWORK_LEARNERS],
                lambda m: network.rounds(server, nats.url, m, NETWORK_VALUES, 4),
            )
        finally:
            await nats.stop()


def fleets(before: dict[str, Any] | None, learners: int, fragments: int, cycles: int) -> Any:
    """A run, against the one before it if that was alike; RuntimeError if they differ."""
    (found,) = told([(learners, fragments, cycles)], fleet.run)
    alike = ("learners", "fragments", "steps")
    if before is None or any(before[name] != found[name] for name in alike):
        return found
    if before["digest"] != found["digest"]:
        raise RuntimeError(
            f"digests differ: {before['digest']}, {found['digest']}; if the product has changed "
            'since, delete "fleet" among the "parts" of the file and run this twice'
        )
    return found | {"digest_again": before["digest"]}


# --- laws ---------------------------------------------------------------------------------------


def laws_of(parts: dict[str, Any]) -> dict[str, Any]:
    """Of the parts that are there."""
    found: dict[str, Any] = {}
    if rows := parts.get("decisions"):
        found["step_s"] = laws.fit(rows, "step_s", OF_STEP)
        found["round_s"] = laws.fit(rows, "round_s", OF_ROUND)
        ends = [row for row in rows if row["fragments"] == 24]
        for name in ("status_s", "tape_bytes", "beat_bytes"):
            terms = {"at_all": lambda r: 1, "per_learner": lambda r: r["learners"]}
            found[name] = laws.fit(ends, name, terms)
    if rows := parts.get("merging"):
        alone = [row for row in rows if row["threads"] == 1]
        for name in NAMES:
            of_codec = [row for row in alone if row["codec"] == name]
            if not of_codec:  # measured before there was such a codec
                continue
            # Two points of a codec give two terms; what a round costs beside is bf16's.
            whole = name == "bf16"
            gate = OF_GATE if whole else _without(OF_GATE, "per_learner")
            stage = OF_STAGE if whole else _without(OF_STAGE, "per_round")
            found[f"gate_s_{name}"] = laws.fit(of_codec, "gate_s", gate)
            found[f"stage_s_{name}"] = laws.fit(of_codec, "stage_s", stage)
        large = [r for r in alone if r["fragments"] == 1 and r["values"] >= 4 * MILLION]
        found["peak_bytes"] = laws.fit(large, "peak_bytes", OF_MEMORY)
    if rows := parts.get("network"):
        found |= _of_network(rows)
    return found


def _without(terms: laws.Terms, name: str) -> laws.Terms:
    return {n: term for n, term in terms.items() if n != name}


def _of_network(rows: Rows) -> dict[str, Any]:
    """Processor seconds per GB (1e9 bytes) that crosses a socket of the process."""
    way: laws.Terms = {"per_gb": lambda r: r["learners"] * r["gb"]}
    both: laws.Terms = {"per_gb": lambda r: (r["learners"] + 1) * r["gb"]}
    return {
        "server_stores_s": laws.fit(rows, "server_up_s", way),
        "server_gives_s": laws.fit(rows, "server_down_s", way),
        "syncer_fetches_s": laws.fit(rows, "syncer_fetch_s", way),
        "clients_s": laws.fit(
            rows, "learners_s", {"per_gb": lambda r: 2 * r["learners"] * r["gb"]}
        ),
        "server_while_merging_s": laws.fit(rows, "server_merge_s", both),
    }


def checked(parts: dict[str, Any], found: dict[str, Any]) -> Rows:
    """What the laws of one process say of rounds with real processes, over what was measured."""
    rows = []
    for row in parts.get("network", ()) if "gate_s_bf16" in found else ():
        said = laws.value(found["gate_s_bf16"], OF_GATE, row)
        said += laws.value(found["stage_s_bf16"], OF_STAGE, row)
        rows.append(
            {
                "learners": row["learners"],
                "merge_predicted_s": said,
                "merge_measured_s": row["syncer_merge_s"],
                "predicted_over_measured": said / row["syncer_merge_s"],
                "gb_per_s_up": row["learners"] * row["gb"] / row["up_wall_s"],
                "gb_per_s_down": row["learners"] * row["gb"] / row["down_wall_s"],
                "round_wall_s": row["round_wall_s"],
            }
        )
    return rows


def figures(parts: dict[str, Any], found: dict[str, Any], check: Rows) -> dict[str, Any]:
    """What the documents cite."""
    told: dict[str, Any] = {}
    for name, terms in (("step_s", OF_STEP), ("round_s", OF_ROUND)):
        if name in found:
            for m in (8, 64, 256):
                point = {"learners": m, "fragments": 24}
                told[f"{name.removesuffix('_s')}_ms_m{m}"] = 1e3 * laws.value(
                    found[name], terms, point
                )
    if "gate_s_bf16" in found:
        told["merge_worst_error"] = found["stage_s_bf16"]["worst_relative_error"]
        told["bytes_per_value"] = found["peak_bytes"]["terms"]["per_value"]
        for name in (n for n in NAMES if f"gate_s_{n}" in found):
            told[f"values_per_s_{name}_m8"] = 1 / _seconds_per_contributed_value(found, name, 8)
    if check:
        ratios = [row["predicted_over_measured"] for row in check]
        told["merge_predicted_over_measured"] = [min(ratios), max(ratios)]
        told["hub_gb_per_s_up_max"] = max(row["gb_per_s_up"] for row in check)
        told["hub_gb_per_s_down_max"] = max(row["gb_per_s_down"] for row in check)
    if one := parts.get("fleet"):
        told |= {f"fleet_{name}": one[name] for name in ("learners", "fragments", "rounds")}
        if "digest_again" in one:
            told["fleet_same_digest"] = one["digest"] == one["digest_again"]
    return told


def _seconds_per_contributed_value(found: dict[str, Any], name: str, learners: int) -> float:
    gate, stage = found[f"gate_s_{name}"]["terms"], found[f"stage_s_{name}"]["terms"]
    alone = gate["per_contributed_value"] + stage["per_contributed_value"]
    return float(alone + stage["per_value"] / learners)


def main() -> None:
    """Measure one part; print and write all that is known."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parts = ("decisions", "merging", "network", "fleet")
    parser.add_argument("--part", choices=parts, action="append", default=[])
    parser.add_argument("--learners", type=int, default=256, help="of the fleet")
    parser.add_argument("--fragments", type=int, default=24, help="of the fleet")
    parser.add_argument("--cycles", type=int, default=3, help="merges of each fragment, fleet")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    body = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    known = body.get("parts", {})
    loads = body.get("load_at_the_end", {})
    for part in args.part:
        if part == "fleet":
            known[part] = fleets(known.get(part), args.learners, args.fragments, args.cycles)
        elif part == "network":
            known[part] = asyncio.run(networked())
        else:
            known[part] = {"decisions": decided, "merging": merged}[part]()
        loads[part] = [round(load, 1) for load in os.getloadavg()]
    found = laws_of(known)
    check = checked(known, found)
    body = {
        "figures": figures(known, found, check),
        "laws": found,
        "check": check,
        "parts": known,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load_at_the_end": loads,
        "command": "python bench/scale.py " + " ".join(f"--part {p}" for p in parts if p in known),
        "seed": 0,
    } | ({"note": body["note"]} if "note" in body else {})
    for name, law in found.items():
        terms = ", ".join(f"{value:.3g} {term}" for term, value in law["terms"].items() if value)
        print(f"{name:<24}{terms}  (worst {law['worst_relative_error']:.0%})")
    for name, figure in body["figures"].items():
        print(f"{name}: {figure}")
    if args.json:
        args.json.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
