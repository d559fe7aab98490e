"""`python -m diloco_simulator.shrink FILE`: the least that still breaks what a kept world broke.

A drawn world has two dozen faults, other constants and visitors, most of which have nothing to do
with what broke. Smaller, shorter and calmer worlds are played in turn; one that breaks the same
promise takes the place of the one before it, until nothing that is tried does so any more.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco_simulator.worlds import found
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.tiny import spec_of
from diloco_simulator.worlds.world import played

# A fault that strikes in most worlds is bare after some dozens, a rare one after two or three
# hundred. What is left then is read by somebody anyway.
WORLDS_MAX = 600
# Of processor time. Most worlds take between half a second and three, one in which a run never ends
# ten. Longer than ten minutes nobody waits for less to read.
SECONDS_MAX = 600.0
# Any change throws all later dice anew: what is tried is played with so many seeds.
SEEDS_TRIED = 4
# What a world has some of, from the fewest; of all else a calm world has the least.
SIZES: dict[str, tuple[Any, ...]] = {
    "shards": (1,),
    "syncers": (1, 2),
    "learners": (1, 2, 3),
    "quorum": (1, 2),
    "fragments": (1, 2),
    "steps": (6, 12, 18, 24, 36, 48),
    "safety_s": (10.0, 15.0, 20.0, 30.0),  # faults strike after three seconds
    "jitter": (0.0,),
}
# Chances below this are as good as none in a world of some thousand events.
CHANCE_MIN = 0.001


class Sound(ValueError):
    """A world that breaks no promise: there is nothing to shrink."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What is left. `complete`: nothing simpler that is tried breaks the promise; else a limit
    came first."""

    case: Case
    promise: str
    violations: list[str]
    worlds: int
    complete: bool


def promise(violation: str) -> str:
    """What was broken: the first word; of an exception the place where it was raised, of a process
    that ended by itself what it died of."""
    word = violation.split(maxsplit=1)[0]
    if word == "crash:":
        return f"{word} {violation.rpartition(' at ')[2]}"
    if word == "processes":
        return f"{word} {violation.partition(' by itself: ')[2].partition(':')[0]}"
    return word


def shrink(case: Case, *, worlds_max: int = WORLDS_MAX, seconds_max: float = SECONDS_MAX) -> Shrunk:
    """The simplest world found that breaks the same promise; Sound if this one breaks none."""
    violations = played(case).violations
    if not violations:
        raise Sound(f"seed {case.seed} with {found.described(case)} breaks no promise")
    search = _Search(case, violations, worlds_max, seconds_max)
    complete = search.run()
    return Shrunk(search.case, search.promise, search.violations, search.worlds, complete)


class _Search:
    """The simplest world so far, and what may still be spent."""

    def __init__(
        self, case: Case, violations: list[str], worlds_max: int, seconds_max: float
    ) -> None:
        self.first_seed = case.seed
        self.case, self.violations = case, violations
        self.promise = promise(violations[0])
        self.worlds, self.worlds_max = 1, worlds_max
        self.until = time.process_time() + seconds_max

    def run(self) -> bool:
        """Whether the end was reached before a limit."""
        try:
            # Small worlds are fast: whatever is tried after that takes less time.
            while any([self._sizes(), self._faults(), self._amounts()]):
                pass
        except _Spent:
            return False
        return True

    def _faults(self) -> bool:
        """As in a calm world: all of it at once, then halves, quarters, and each alone."""
        before = self.case
        names = [name for name in self.case.names() if name not in SIZES]
        count = len(names)
        while count:
            for chunk in [names[n : n + count] for n in range(0, len(names), count)]:
                if self._adopt(self.case.without(chunk)):
                    left = self.case.names()
                    names = [name for name in names if name in left]
            count = min(count // 2, len(names))
        return self.case != before

    def _sizes(self) -> bool:
        """Of what a world has some of, the fewest that will do."""
        before = self.case
        for name, values in SIZES.items():
            for value in (v for v in values if v < getattr(self.case.options, name)):
                if self._adopt(self.case.changed(**{name: value})):
                    break
        return self.case != before

    def _amounts(self) -> bool:
        """Fewer of the faults that must stay."""
        before = self.case
        if self.case.sequels > 1:
            self._adopt(replace(self.case, sequels=1))
        for name, value in self.case.unlike.items():
            for less in () if name in SIZES else _less(value, getattr(_CALM, name)):
                if self._adopt(self.case.changed(**{name: less})):
                    break
        return self.case != before

    def _adopt(self, case: Case) -> bool:
        """Whether this one breaks the promise too, with some seed: then it is the one."""
        case = _fitting(case)
        if case == self.case:
            return False
        seeds = dict.fromkeys((case.seed, self.first_seed, *range(SEEDS_TRIED)))
        for one in [case.of(seed) for seed in list(seeds)[:SEEDS_TRIED]]:
            if not _possible(one):
                return False
            if self.worlds >= self.worlds_max or time.process_time() >= self.until:
                raise _Spent
            self.worlds += 1
            same = [v for v in played(one).violations if promise(v) == self.promise]
            if same:
                self.case, self.violations = one, same
                return True
        return False


class _Spent(Exception):
    """A limit came before the end."""


_CALM = Options.calm()


def _less(value: Any, calm: Any) -> Iterator[Any]:
    """Calmer amounts than `value`, the calmest first."""
    if isinstance(value, bool) or calm != 0:
        return
    if isinstance(value, int) and value > 1:
        yield 1
    if isinstance(value, float) and value / 4 >= CHANCE_MIN:
        yield value / 4


def _fitting(case: Case) -> Case:
    """What follows from the sizes: no larger quorum than learners, and no speeds of nobody."""
    o = case.options
    return case.changed(quorum=min(o.quorum, o.learners), speeds=o.speeds[: o.learners])


def _possible(case: Case) -> bool:
    """Whether the product would accept such a run."""
    try:
        spec_of(case.options, case.seed)
    except ValueError:
        return False
    return True


def shrink_kept(path: Path, case: Case, worlds_max: int = WORLDS_MAX) -> Shrunk:
    """Write to `path` what is left of a world, together with that world, and print it."""
    shrunk = shrink(case, worlds_max=worlds_max)
    found.write(path, shrunk.case, shrunk.violations, of=case)
    show(shrunk, path)
    return shrunk


def show(shrunk: Shrunk, path: Path) -> None:
    """Print what is left, and how to see it again."""
    end = "nothing simpler breaks it" if shrunk.complete else "a limit came before the end"
    print(f"{shrunk.promise} is broken by less, after {shrunk.worlds} worlds ({end}):")
    body = found.described(shrunk.case)
    print(f"  seed {body.pop('seed')}, and of a calm world only this differs:")
    for name, value in (body.pop("options") | body.pop("constants", {}) | body).items():
        print(f"    {name} = {value!r}")
    for violation in shrunk.violations[:1]:
        print(f"  {violation}")
    print(f"  again: {found.again(path)}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Shrink the world in a file, and write what is left. Fails for one that breaks nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a world that `check --keep` has written")
    parser.add_argument("--out", type=Path, help="write what is left there, not beside the file")
    parser.add_argument("--worlds", type=int, default=WORLDS_MAX, help="play at most so many")
    args = parser.parse_args(argv)
    path = args.out or args.file.with_name(f"{args.file.stem}-shrunk.json")
    try:
        shrink_kept(path, found.read(args.file), args.worlds)
    except Sound as error:
        sys.exit(f"{args.file}: {error}")


if __name__ == "__main__":
    main()
