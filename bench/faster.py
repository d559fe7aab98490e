"""How many times sooner the same tokens are done over a thin link than by synchronous training.

    python bench/faster.py [--megabits 10] [--seconds 40] [--torch PYTHON] [--json FILE]

Two learners, one at either end of an emulated link (60 ms round trip, 0.05 % loss), train a small
model as real processes; the hub is at the first one's end. Side by side in one run:
- *alone*: two ranks step next to each other and exchange nothing: what the computation allows;
- *all-reduce*: our model and inner step, bf16 gradients exchanged at every step;
- *torch DDP* over gloo (fp32 gradients), against torch alone; only with `--torch`, a Python that
  has torch and numpy (`python3 -m venv E && E/bin/pip install torch==2.13.0 numpy`);
- *Decoupled*: int4 both ways, H = 24, everything else as in production.

Tokens a second are counted after the start. Needs root, TUN devices and a C compiler (Linux);
without them the exit status is 77.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from runs import keep, surroundings
from wan.link import CANNOT, DEVICE, HUB, Link, LinkMissing, Shape
from wan.training import Training

from diloco_learner.models.transformer import SHAPES

PEERS = Path(__file__).with_name("racing")
PORT = 29400
FOUR_BITS = {"codec_up": "int4", "codec_down": "int4"}
# Starting a framework and compiling, on a machine that does other things as well.
START_S = 300.0


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--megabits", type=float, default=10.0, help="rate of the link, each way")
    parser.add_argument("--seconds", type=float, default=40.0, help="measured, per method")
    parser.add_argument("--model", default="micro", help="preset: nano or micro")
    parser.add_argument("--torch", help="a Python interpreter that has torch and numpy")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rate = args.megabits * 1e6
    # 100 ms of queue: that of a modest router.
    shape = Shape(rate, 0.060, 0.0005, queue_bytes=max(int(rate / 80), 64_000))
    try:
        rows = measured(shape, args)
    except LinkMissing as error:
        print(f"this machine cannot emulate a link: {error}", file=sys.stderr)
        sys.exit(CANNOT)
    speed = {name: row["tokens_per_s"] for name, row in rows.items()}
    figures = {
        "utilisation_decoupled": speed["decoupled"] / speed["alone"],
        "utilisation_allreduce": speed["allreduce"] / speed["alone"],
        "times_faster_than_allreduce": speed["decoupled"] / speed["allreduce"],
    }
    if args.torch:
        figures |= {
            "utilisation_ddp": speed["ddp"] / speed["torch alone"],
            "times_faster_than_ddp": speed["decoupled"] / speed["ddp"],
        }
    result = {
        "figures": figures,
        "rows": rows,
        "model": args.model,
        "link": {"bits_per_s": rate, "round_trip_s": 0.060, "loss": 0.0005},
        **surroundings(__file__),
    }
    if args.torch:  # whose interpreter it was is nobody's business
        result["command"] = result["command"].replace(args.torch, "PYTHON")
    _table(result)
    keep(args.json, result)


def measured(shape: Shape, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Per method: tokens per second of both learners, and what crossed the link."""
    seconds, torch = args.seconds, args.torch
    ours = [sys.executable, str(PEERS / "allreduce.py"), "--seconds", str(seconds)]
    ours += ["--model", args.model]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = {
            "alone": ranks(shape, ours, seconds, linked=False),
            "allreduce": ranks(shape, ours, seconds, linked=True),
        }
        if torch:
            np_file = _tokens(folder)
            theirs = [torch, str(PEERS / "ddp.py"), "--seconds", str(seconds), "--tokens", np_file]
            theirs += ["--shape", *(str(n) for n in astuple(SHAPES[args.model])[:7])]
            rows["torch alone"] = ranks(shape, theirs, seconds, linked=False)
            rows["ddp"] = ranks(shape, theirs, seconds, linked=True)
        rows["decoupled"] = decoupled(shape, folder, seconds, args.model)
    return rows


def ranks(shape: Shape, command: list[str], seconds: float, *, linked: bool) -> dict[str, Any]:
    """Both ranks of a peer, the second beyond the link."""

    def run(link: Link) -> dict[str, Any]:
        peer = ["--peer", f"{HUB}:{PORT}"] if linked else []
        first = [*command, "--rank", "0", *peer]
        second = link.at_site([*command, "--rank", "1", *peer])
        limit = seconds + START_S
        # Else gloo takes the address of the host's name, which may be the loopback's.
        env = os.environ | ({"GLOO_SOCKET_IFNAME": DEVICE} if linked else {})
        with (
            subprocess.Popen(first, stdout=subprocess.PIPE, text=True, env=env) as a,
            subprocess.Popen(second, stdout=subprocess.PIPE, text=True, env=env) as b,
        ):
            try:
                said = [p.communicate(timeout=limit)[0] for p in (a, b)]
            except subprocess.TimeoutExpired:
                for rank in (a, b):
                    rank.kill()
                raise SystemExit(f"{command[1]} was not done within {limit:.0f} s") from None
        if a.returncode or b.returncode:
            raise SystemExit(f"{command[1]} failed: exit {a.returncode} and {b.returncode}")
        done = [json.loads(text.splitlines()[-1]) for text in said]
        return {
            "tokens_per_s": sum(d["steps"] * 8 * 64 / d["seconds"] for d in done),
            "steps": [d["steps"] for d in done],
            "parameters": done[0]["parameters"],
        }

    return over(shape, seconds + START_S + 30, run)


def decoupled(shape: Shape, folder: Path, seconds: float, model: str) -> dict[str, Any]:
    """Ours: the speed of both learners between the first quarter and the end of the run."""

    def run(link: Link) -> dict[str, Any]:
        training = Training(folder / "run", link, 2, at_hub=1, model=model, **FOUR_BITS)
        training.folder.mkdir()
        found = training.run(seconds * 4 / 3)
        # The last rounds go without pacing, and learners wait for the end.
        began = next(i for i, (at, _) in enumerate(training.seen) if at > _quarter(training.seen))
        (start, before), (end, after) = training.seen[began], training.seen[-2]
        steps = {name: after[name] - before[name] for name in after}
        return {
            "tokens_per_s": sum(steps.values()) * 8 * 64 / (end - start),
            "steps": list(steps.values()),
            "rounds": found["figures"]["wan_rounds_committed"],
            "rounds_skipped": found["figures"]["wan_rounds_skipped"],
            "not_merged": found["verdicts_but_merged"],
        }

    return over(shape, seconds * 4 / 3 + Training.AROUND_S + START_S, run)


def _quarter(seen: list[tuple[float, Any]]) -> float:
    return seen[0][0] + (seen[-1][0] - seen[0][0]) / 4


def over(shape: Shape, limit_s: float, run: Callable[[Link], dict[str, Any]]) -> dict[str, Any]:
    """`run` in a thread at the hub's side of a fresh link, with what crossed it."""
    found: dict[str, Any] = {}
    failed: list[BaseException] = []

    def body(link: Link) -> None:
        try:
            link.enter_hub()
            found.update(run(link))
        except BaseException as error:
            failed.append(error)

    with Link(shape, limit_s) as link:
        thread = threading.Thread(target=body, args=(link,))
        thread.start()
        thread.join()
    if failed:
        raise failed[0]
    return found | {"link": link.counts}


def _tokens(folder: Path) -> str:
    import numpy as np

    from diloco_learner.data.corpus import load
    from diloco_shared.corpora.sequences import Tokens
    from diloco_shared.spec.run import Data

    file, train = folder / "tokens.npy", load(Data()).train
    assert isinstance(train, Tokens)
    np.save(file, train[:])
    return str(file)


def _table(result: dict[str, Any]) -> None:
    megabits = result["link"]["bits_per_s"] / 1e6
    print(f"\n{megabits:g} Mbit/s, 60 ms round trip, 0.05 % loss; {result['model']}, two learners")
    for name, row in result["rows"].items():
        print(f"{name:>14}  {row['tokens_per_s']:10.0f} tokens/s  steps {row['steps']}")
    for name, value in result["figures"].items():
        print(f"{name:>30}  {value:8.3f}")


if __name__ == "__main__":
    main()
