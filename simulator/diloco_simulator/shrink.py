"""`python -m diloco_simulator.shrink FILE`: the least that still breaks what a kept world broke.

A drawn world has a dozen faults, most of which have nothing to do with what broke. Smaller, shorter
and calmer worlds are played in turn; one that breaks the same promise takes the place of the one
before it, until nothing that is tried does so any more.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from diloco_simulator import found
from diloco_simulator.options import Options
from diloco_simulator.scenario import play, spec_of

# A fault that strikes in most worlds is bare after some dozens, a rare one after two or three
# hundred. What is left then is read by somebody anyway.
WORLDS_MAX = 600
# Of processor time. Most worlds take between a tenth of a second and one; a large one in which a
# run never ends takes five. For those this limit comes before the one in worlds: longer than five
# minutes nobody waits for less to read.
SECONDS_MAX = 300.0
# One that takes so much processor time goes round in circles.
WORLD_S_MAX = 30.0
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
    "safety_s": (10.0, 15.0, 20.0, 30.0),  # faults strike after five seconds
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

    seed: int
    options: Options
    promise: str
    violations: list[str]
    worlds: int
    complete: bool


def promise(violation: str) -> str:
    """What was broken: the first word, and of an exception the place where it was raised."""
    word = violation.split(maxsplit=1)[0]
    return f"{word} {violation.rpartition(' at ')[2]}" if word == "crash:" else word


def shrink(
    seed: int, options: Options, *, worlds_max: int = WORLDS_MAX, seconds_max: float = SECONDS_MAX
) -> Shrunk:
    """The simplest world found that breaks the same promise; Sound if this one breaks none."""
    violations = _played(seed, options)
    if not violations:
        raise Sound(f"seed {seed} with {found.described(options)} breaks no promise")
    search = _Search(seed, options, violations, worlds_max, seconds_max)
    complete = search.run()
    return Shrunk(
        search.seed, search.options, search.promise, search.violations, search.worlds, complete
    )


class _Search:
    """The simplest world so far, and what may still be spent."""

    def __init__(
        self,
        seed: int,
        options: Options,
        violations: list[str],
        worlds_max: int,
        seconds_max: float,
    ) -> None:
        self.first_seed = seed
        self.seed, self.options, self.violations = seed, options, violations
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
        before = self.options
        names = [n for n in found.described(self.options) if n not in SIZES]
        count = len(names)
        while count:
            for chunk in [names[n : n + count] for n in range(0, len(names), count)]:
                if self._adopt(**{name: getattr(_CALM, name) for name in chunk}):
                    names = [name for name in names if name not in chunk]
            count = min(count // 2, len(names))
        return self.options != before

    def _sizes(self) -> bool:
        """Of what a world has some of, the fewest that will do."""
        before = self.options
        for name, values in SIZES.items():
            for value in (v for v in values if v < getattr(self.options, name)):
                if self._adopt(**{name: value}):
                    break
        return self.options != before

    def _amounts(self) -> bool:
        """Fewer of the faults that must stay."""
        before = self.options
        for name in found.described(self.options):
            value = getattr(self.options, name)
            for less in () if name in SIZES else _less(value, getattr(_CALM, name)):
                if self._adopt(**{name: less}):
                    break
        return self.options != before

    def _adopt(self, **changes: Any) -> bool:
        """Whether a world with these changes breaks the promise too: then it is the one."""
        options = _fitting(self.options.changed(**changes))
        if options == self.options:
            return False
        seeds = dict.fromkeys((self.seed, self.first_seed, *range(SEEDS_TRIED)))
        for seed in list(seeds)[:SEEDS_TRIED]:
            if not _possible(seed, options):
                return False
            if self.worlds >= self.worlds_max or time.process_time() >= self.until:
                raise _Spent
            self.worlds += 1
            same = [v for v in _played(seed, options) if promise(v) == self.promise]
            if same:
                self.seed, self.options, self.violations = seed, options, same
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


def _fitting(options: Options) -> Options:
    """What follows from the sizes: no larger quorum than learners, and no speeds of nobody."""
    return options.changed(
        quorum=min(options.quorum, options.learners), speeds=options.speeds[: options.learners]
    )


def _possible(seed: int, options: Options) -> bool:
    """Whether the product would accept such a run."""
    try:
        spec_of(options, seed)
    except ValueError:
        return False
    return True


def _played(seed: int, options: Options) -> list[str]:
    """What a world breaks; one that goes round in circles is a crash."""
    with _limited():
        return play(seed, options).violations


@contextmanager
def _limited() -> Iterator[None]:
    """No more processor time than a world may take."""

    def stuck(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError("a world goes round in circles")

    before = signal.signal(signal.SIGPROF, stuck)
    signal.setitimer(signal.ITIMER_PROF, WORLD_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def shrink_kept(path: Path, seed: int, options: Options, worlds_max: int = WORLDS_MAX) -> None:
    """Write to `path` what is left of a world, together with that world, and print it."""
    shrunk = shrink(seed, options, worlds_max=worlds_max)
    found.write(path, shrunk.seed, shrunk.options, shrunk.violations, of=(seed, options))
    show(shrunk, path)


def show(shrunk: Shrunk, path: Path) -> None:
    """Print what is left, and how to see it again."""
    end = "nothing simpler breaks it" if shrunk.complete else "a limit came before the end"
    print(f"{shrunk.promise} is broken by less, after {shrunk.worlds} worlds ({end}):")
    print(f"  seed {shrunk.seed}, and of a calm world only this differs:")
    for name, value in found.described(shrunk.options).items():
        print(f"    {name} = {value!r}")
    for violation in shrunk.violations[:1]:
        print(f"  {violation}")
    print(f"  again: {again(path)}", flush=True)


def again(path: Path) -> str:
    """The command that plays a kept world."""
    return f"python -m diloco_simulator.check --kept {path}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a world that `check --keep` has written")
    parser.add_argument("--out", type=Path, help="write what is left there, not beside the file")
    parser.add_argument("--worlds", type=int, default=WORLDS_MAX, help="play at most so many")
    args = parser.parse_args(argv)
    path = args.out or args.file.with_name(f"{args.file.stem}-shrunk.json")
    seed, options = found.read(args.file)
    try:
        shrink_kept(path, seed, options, args.worlds)
    except Sound as error:
        sys.exit(f"{args.file}: {error}")


if __name__ == "__main__":
    main()
