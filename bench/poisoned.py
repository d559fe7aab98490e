"""Learners that lie or are poisoned: what the gate refuses, what it lets through, what that costs.

    python bench/poisoned.py [--only scaled-4 flipped] [--merges rda trimmed] [--json FILE]

Five learners train nano on the source of Python's standard library, on the virtual clock of
`diloco sim train`, with the product's own syncer, gate and merge. None, one or two of them do what
an attack says, in every round of the run; every attack meets every merge rule. Two fleets more are
honest and have one learner that is much faster: nobody may be refused there. The same command
gives the same figures every time. `loss` is that of the published parameters on the validation
split, in nats per byte; `cost` is how much higher it is than that of the honest run under the
default merge. Beside it stands what became of the liars' contributions.

What is small about it: a model of 0.1 million parameters, few steps, one seed. Differences below
about two per cent are chance. An attacker that studies the run may do better than these.
"""

import argparse
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray
from runs import surroundings

from diloco_learner.events import Contribute, SendProgress
from diloco_learner.training.computing_io import Built
from diloco_learner.training.train import TrainLoop
from diloco_learner.training.trainer import evaluate_anchors
from diloco_shared.numerics import codec
from diloco_shared.protocol.messages import Cursor, Progress, TapeRound, Verdict
from diloco_shared.spec.run import RunSpec
from diloco_simulator.experiments.setting import Interruptions, Setting
from diloco_simulator.experiments.train import CountedTrainer, Fleet, IdleFleet
from diloco_simulator.worlds.computing import Sent

LEARNERS, STEPS = 5, 96
# Of a run with one that is faster than the others: so many times as many steps, with H = 24 and a
# rate that does not fall. There lengths are steady, and the gate knows well what is usual.
FAST = 8
SPEEDS = ((4.0, 1.0, 1.0, 1.0, 1.0), (6.0, 1.0, 1.0, 1.0, 1.0, 1.0))
MERGES = ("rda", "mean", "clipped", "trimmed", "median")
# By how much the counters of an attack are too high; and by how many versions a base is too old.
TIMES, STALE = 10, 8

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Attack:
    """What a lying learner makes of what it should send; each does nothing where left out."""

    says: str
    # Of a contribution's values, and those of the anchor minus those of an anchor long ago.
    sends: Callable[[Values, Values], Values] = lambda delta_F, since_F: delta_F
    claims: Callable[[Contribute], Contribute] = lambda effect: effect
    reports: Callable[[Progress], Progress] = lambda progress: progress


def flipped(delta_F: Values, since_F: Values) -> Values:
    """Up where the loss goes down."""
    return -delta_F


def constant(delta_F: Values, since_F: Values) -> Values:
    """One value everywhere, of the length that is usual."""
    rms = float(np.sqrt(np.mean(np.square(delta_F, dtype=np.float64))))
    return np.full_like(delta_F, rms)


def more_steps(effect: Contribute) -> Contribute:
    """Ten times as many as since the adoption; nothing else says so."""
    steps, tokens = effect.step_to - effect.step_from, effect.tokens_to - effect.tokens_from
    return replace(
        effect,
        step_to=effect.step_from + TIMES * steps,
        tokens_to=effect.tokens_from + TIMES * tokens,
    )


def consistently(effect: Contribute) -> Contribute:
    """All counters ten times as high."""
    names = ("step_from", "step_to", "tokens_from", "tokens_to")
    return replace(effect, **{name: TIMES * getattr(effect, name) for name in names})


def reported(progress: Progress) -> Progress:
    """The same in what it reports of itself."""
    single = {name: TIMES * getattr(progress, name) for name in ("step", "tokens")}
    lists = {
        name: tuple(TIMES * n for n in getattr(progress, name))
        for name in ("c_steps", "c_tokens", "adopted_at")
    }
    faster = {"step_s": progress.step_s / TIMES}
    return progress.model_copy(update=single | lists | faster)


def stale(effect: Contribute) -> Contribute:
    """Measured against a version that nobody has any more."""
    return replace(effect, base=max(effect.base - STALE, 0))


def stolen(effect: Contribute) -> Contribute:
    """Another learner's data, as if all of it was read."""
    return replace(effect, cursor=Cursor(shard=LEARNERS - 1, sequences=10**6, passes=1))


ATTACKS: dict[str, Attack] = {
    "scaled-100": Attack("a hundred times the pseudo-gradient", lambda d, _: d * np.float32(100)),
    "scaled-4": Attack("four times the pseudo-gradient", lambda d, _: d * np.float32(4)),
    "flipped": Attack("the pseudo-gradient with its sign flipped", flipped),
    "constant": Attack("one value everywhere, of the usual length", constant),
    "counters": Attack("flipped, with ten times the steps", flipped, more_steps),
    "all-counters": Attack(
        "flipped, with ten times the steps in its reports too", flipped, consistently, reported
    ),
    "stale": Attack("a base that is eight versions old, and said to be", claims=stale),
    "hidden-stale": Attack(
        "measured against the base of eight versions ago, said to be the newest",
        lambda delta_F, since_F: delta_F - since_F,
    ),
    "stolen-cursor": Attack("a place in another learner's data", claims=stolen),
}


class LyingTrainer(CountedTrainer):
    """The product's; what it gives away is a lie."""

    def __init__(self, honest: CountedTrainer, attack: Attack) -> None:
        super().__init__(honest.program, honest.stepped)
        self.attack = attack
        # Of each fragment, the newest anchors, the oldest first.
        self.held: dict[int, deque[Values]] = {}

    def adopt(self, p: int, anchor_F: Any, alpha: float) -> None:
        super().adopt(p, anchor_F, alpha)
        held = self.held.setdefault(p, deque(maxlen=STALE + 1))
        held.append(np.array(anchor_F, np.float32))

    def contribution(self, p: int, round_: int) -> Any:
        honest = super().contribution(p, round_)
        held = self.held.get(p)
        since_F = held[-1] - held[0] if held else np.zeros(honest.values, np.float32)
        delta_F = codec.decode(honest.codec, honest.fetch(), honest.values)
        return Sent(bytes(codec.encode(honest.codec, self.attack.sends(delta_F, since_F))))


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    merge: str
    attack: str = ""
    liars: int = 0
    dying: bool = False  # honest learners that die and come back, to see what norms they have
    # How fast each is, where they differ: all are honest, and the run is FAST times as long.
    speeds: tuple[float, ...] = ()


@cache
def shared(speeds: tuple[float, ...], steps: int, seed: int) -> Fleet:
    """Corpus and compiled programs of all runs of one process whose learners are so fast."""
    return Fleet(spec_of(Case("rda", speeds=speeds), steps, seed), Setting(LEARNERS))


def spec_of(case: Case, steps: int, seed: int) -> RunSpec:
    """The preset `long`, with H = 12 and a warm-up as short as the run."""
    inner: dict[str, float] = {"warmup_steps": steps // 6, "batch_sequences": 4}
    if fast := bool(case.speeds):
        inner |= {"batch_sequences": 8, "final_fraction": 1.0}
    return RunSpec.model_validate(
        {
            "name": "poisoned",
            "seed": seed,
            "algorithm": {"merge": case.merge, "sync_every_steps": 24 if fast else 12},
            "inner": inner,
            "evaluation": {"sequences": 256},
            "budget": {"steps": FAST * steps if fast else steps},
        }
    )


class PoisonedFleet(Fleet):
    """Learners of which the first ones lie."""

    def __init__(self, case: Case, steps: int, seed: int) -> None:
        common = shared(case.speeds, steps, seed)
        self.program, self.cut, self.splits = common.program, common.cut, common.splits
        self.told, self.curve = None, []
        self.case, self.attack = case, ATTACKS.get(case.attack, Attack("nothing else"))
        dying = Interruptions(40.0, 5.0) if case.dying else None
        speeds = case.speeds or (1.0,) * LEARNERS
        setting = Setting(len(speeds), speeds=speeds, interruptions=dying)
        IdleFleet.__init__(self, spec_of(case, steps, seed), setting)

    def lies(self, m: int) -> bool:
        return m < self.case.liars

    def built(self, m: int) -> Built:
        built = super().built(m)
        if self.lies(m):
            assert isinstance(built.trainer, CountedTrainer)
            return replace(built, trainer=LyingTrainer(built.trainer, self.attack))
        return built

    def trains(self, m: int, loop: TrainLoop, step_s: float) -> None:
        super().trains(m, loop, step_s)
        if self.lies(m):
            handle = loop.exchange.handle
            loop.exchange.handle = (  # type: ignore[method-assign]
                lambda event, now: [self._told(effect) for effect in handle(event, now)]
            )

    def _told(self, effect: Any) -> Any:
        match effect:
            case Contribute():
                return self.attack.claims(effect)
            case SendProgress():
                return SendProgress(self.attack.reports(effect.progress))
            case _:
                return effect

    async def _until_over(self, within_s: float) -> None:
        """The watch sees liars break promises, which is their work: what ended counts alone."""
        watch = self.cluster.observer.watch
        watch.violations = Ignored()
        await super()._until_over(within_s)

    def _result(self) -> dict[str, Any]:
        """On the validation split alone."""
        anchors = [self.store.anchor(p) for p in range(self.spec.algorithm.fragments)]
        rounds = [r for r in self.records if isinstance(r, TapeRound)]
        verdicts = [v for r in rounds for v in r.verdicts]
        liars = set(self.names[: self.case.liars])
        return {
            "val_loss": evaluate_anchors(self.program, anchors, self._held("validation")),
            "rounds": self.history.committed,
            "skipped": self.history.skipped,
            "tokens": self.history.ledger.processed,
            "of_liars": dict(counted(v for v in verdicts if v.learner in liars)),
            "of_honest": dict(counted(v for v in verdicts if v.learner not in liars)),
            "longest": max((longest(r) for r in rounds), default=0.0),
        }


class Ignored(list[str]):
    """Takes nothing in."""

    def append(self, item: str) -> None:
        """Nobody looks at it."""


def counted(verdicts: Iterator[Verdict]) -> Counter[str]:
    """What became of contributions: merged, missed, or refused by which check."""
    return Counter(
        f"refused: {v.reason.split(':')[0]}" if v.outcome == "refused" else v.outcome
        for v in verdicts
    )


def longest(record: TapeRound) -> float:
    """The largest norm per root step of a round, in medians of it; 0 with fewer than three."""
    norms = [
        v.norm / (v.step_to - v.step_from) ** 0.5
        for v in record.verdicts
        if v.norm > 0 and v.step_to > v.step_from
    ]
    return max(norms) / median_low(norms) if len(norms) > 2 else 0.0


def played(case: Case, steps: int, seed: int) -> dict[str, Any]:
    """One run, from beginning to end."""
    began = time.process_time()
    try:
        found = PoisonedFleet(case, steps, seed).run()
    except RuntimeError as error:  # a run that cannot go on is a result too
        found = {"val_loss": None, "fault": str(error)[:300]}
    about = {"merge": case.merge, "attack": case.attack, "liars": case.liars, "dying": case.dying}
    if case.speeds:
        about["speeds"] = list(case.speeds)
    return found | about | {"cpu_s": round(time.process_time() - began, 1)}


def cases(attacks: list[str], merges: list[str]) -> list[Case]:
    """Everybody honest under every rule, then every attack; `median` is for two of five."""
    honest = [Case(merge) for merge in merges]
    dying = [Case("rda", dying=True)]
    fast = [Case("rda", speeds=speeds) for speeds in SPEEDS]
    attacked = [Case(m, a, n) for a in attacks for n in (1, 2) for m in merges]
    return honest + dying + fast + [c for c in attacked if c.merge != "median" or c.liars > 1]


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--merges", nargs="+", choices=MERGES, default=list(MERGES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    work = partial(played, steps=args.steps, seed=args.seed)
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for row in pool.map(work, cases(args.only, args.merges)):
            rows.append(row)
            print(line(row, rows[0]["val_loss"]), flush=True)
            if args.json:  # each time, so that an end in the middle loses nothing
                args.json.write_text(json.dumps(written(rows, args), indent=2) + "\n", "utf-8")


def written(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """What the file holds."""
    honest = rows[0]["val_loss"]
    for row in rows:
        if row["val_loss"] is not None and "speeds" not in row:  # those runs are longer
            row["cost"] = row["val_loss"] / honest - 1
    about = {"learners": LEARNERS, "steps": args.steps, "seed": args.seed}
    says = {name: attack.says for name, attack in ATTACKS.items()}
    cpu_s = round(sum(row["cpu_s"] for row in rows))
    return {"rows": rows, **about, "attacks": says, "cpu_s": cpu_s, **surroundings(__file__)}


def line(row: dict[str, Any], honest: float) -> str:
    """One run for people."""
    who = row["attack"] or ("honest, dying" if row["dying"] else "honest")
    if speeds := row.get("speeds"):
        who = f"honest, {max(speeds):g}x"
    if row["val_loss"] is None:
        return f"{who:<14} {row['liars']} of {LEARNERS}  {row['merge']:<8} {row['fault']}"
    cost = "" if speeds else f"  cost {100 * (row['val_loss'] / honest - 1):+7.1f} %"
    became = ", ".join(f"{n} {what}" for what, n in sorted(row["of_liars"].items()))
    wrongly = sum(n for what, n in row["of_honest"].items() if what.startswith("refused"))
    return (
        f"{who:<14} {row['liars']} of {len(speeds or range(LEARNERS))}  {row['merge']:<8} "
        f"loss {row['val_loss']:7.4f}{cost}  honest refused {wrongly}  liars: {became or 'none'}"
    )


if __name__ == "__main__":
    main()
