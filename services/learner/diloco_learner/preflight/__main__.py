"""`python -m diloco_learner.preflight`: checks one run, in a process of its own.

The run comes as JSON on standard input. On standard output comes a line of JSON before each check,
{"begins": NAME}, which comes again while it gets on, and one after it: what `Finding.view` makes.
What a model prints goes to standard error. Exit status 0 when nothing is wrong, 1 when something
is, 2 when nothing could be checked.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diloco_learner.hosts.place import hosts_of
from diloco_learner.preflight.findings import SOFTWARE, Finding, wrong
from diloco_shared.process.stopping import die_with
from diloco_shared.reach.checkpoint_roots import roots_of
from diloco_shared.reach.local import DataRoots, Factories, Reach
from diloco_shared.spec.mesh import MeshSizes, mesh_of

Say = Callable[[dict[str, Any]], None]

# Seconds between signs that a check gets on: whoever started this waits an hour for one.
SIGN_S = 60.0


@dataclass(frozen=True, slots=True)
class IslandSettings:
    """What the settings say of the devices and hosts that make a learner: see `checks.check`."""

    mesh: MeshSizes | None
    kept_at: str
    hosts: Callable[[], int]


def main() -> None:
    """Check it, and say what was found."""
    parser = argparse.ArgumentParser(prog="diloco_learner.preflight", description=__doc__)
    parser.add_argument("--data-root", default=".", help="folders that the run may read")
    parser.add_argument("--factories", default="", help="whose modules model.factory may name")
    parser.add_argument("--cache", type=Path, help="where text is prepared")
    parser.add_argument("--checkpoints", default="", help="where run-wide checkpoints are")
    parser.add_argument("--checkpoint-roots", default="", help="where they may be besides")
    parser.add_argument("--mesh", default="auto", help="how devices share the work (DILOCO_MESH)")
    parser.add_argument("--kept-at", default="", help="where all hosts keep their checkpoints")
    hosts = os.environ.get("DILOCO_HOSTS", "1")
    parser.add_argument("--hosts", default=hosts, help="of which a learner consists (DILOCO_HOSTS)")
    parser.add_argument("--parent", type=int, help="process with which this one is to end")
    given = parser.parse_args()
    if given.parent is not None:
        die_with(given.parent)
    # Whoever started this hears the same key, and says what there is to say.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    say = _mouth()
    try:
        places = roots_of(given.checkpoints, given.checkpoint_roots)
        reach = Reach(DataRoots.of(given.data_root), Factories.of(given.factories), places)
        mesh, run = mesh_of(given.mesh), sys.stdin.read()
        island = IslandSettings(mesh, given.kept_at, partial(hosts_of, given.hosts, os.environ))
        findings = _checked(reach, given.cache, island, run, say)
    except ImportError as error:
        remedy = "install what learners need: pip install 'decoupled-diloco[learner]'"
        findings = [wrong(SOFTWARE, str(error), remedy)]
        say(findings[0].view())
    sys.stderr.flush()
    # Threads of a model or of a compiler, and what they do at exit, concern nobody any more.
    os._exit(0 if all(f.ok or f.skipped for f in findings) else 1)


def _mouth() -> Say:
    """Standard output for this alone: a model of the user's own may print what it likes."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=out, flush=True)

    return say


def _checked(
    reach: Reach, cache: Path | None, island: IslandSettings, run: str, say: Say
) -> list[Finding]:
    """What each check found, said as it is found. Raises ImportError where software is missing."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from diloco_learner.data.cache import BYTES_MAX, CorpusCache, users_cache
    from diloco_learner.preflight.checks import check
    from diloco_learner.training import platforms
    from diloco_learner.training.compilation_cache import keep_for_user
    from diloco_shared import ambient
    from diloco_shared.checkpoints.parameters_io import beginning_of
    from diloco_shared.spec.run import RunSpec

    platforms.settle()
    if why := keep_for_user(os.environ.get("DILOCO_CACHE", "")):
        print(why, file=sys.stderr)
    spec = RunSpec.model_validate_json(run)

    # Learners remove what they have room for no more. A check does not know their limit, and runs
    # that are under way come before one that is tried.
    bytes_max = BYTES_MAX if cache is None else sys.maxsize
    tell = partial(print, file=sys.stderr)
    signs = _Signs(say, ambient.monotonic)
    made = check(
        spec,
        reach.data,
        CorpusCache(cache or users_cache(), bytes_max, tell, makes_room=False),
        now=ambient.monotonic,
        begins=signs.begins,
        goes_on=signs.goes_on,
        factories=reach.factories,
        mesh=island.mesh,
        kept_at=island.kept_at,
        hosts=island.hosts,
        beginning=lambda model, root, *, moved: beginning_of(
            model, root, reach.checkpoint_root, reach.checkpoints, moved
        ),
    )
    findings = []
    for finding in made:
        findings.append(finding)
        say(finding.view())
    return findings


class _Signs:
    """Whoever waits for a check learns that it goes on, however often `goes_on` is called.

    A tenth of a corpus, of which its process tells in words, may take longer than anybody waits;
    so may what another process prepares, and weights that are read for their digest.
    """

    def __init__(self, say: Say, now: Callable[[], float]) -> None:
        self.say, self.now = say, now
        self.under_way, self.said = "", now()

    def begins(self, name: str) -> None:
        """This check."""
        self.under_way, self.said = name, self.now()
        self.say({"begins": name})

    def goes_on(self) -> None:
        """Whichever is under way."""
        if self.now() >= self.said + SIGN_S:
            self.said = self.now()
            self.say({"begins": self.under_way})


if __name__ == "__main__":
    main()
