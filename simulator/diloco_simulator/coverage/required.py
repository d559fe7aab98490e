"""Which rare states many whole worlds together must reach, and how often promises were checked.

What no seed reaches, no seed has tested. Names are keys of a verdict's `counts`.
"""

from collections import Counter

# Of the 5,000 worlds of docs/results/sim_175.json so many or more reached each state of REQUIRED,
# but for RAREST.
REACHED, OF = 500, 5000
RAREST = {
    "another request under a key refused": 292,
    "chunks altered for a reader": 293,
    "chunks lost for a reader": 284,
    "corrupted": 319,
    "exports cut off by the coordinator's end": 346,
    "exports failed": 497,
    "files told as safe before a power cut": 393,
    "hubs restored": 451,
    "hubs restored twice": 146,
    "islands: a carrier is cut off": 420,
    "islands: a carrier loses the hub": 276,
    "islands: a host dies with an order told and not taken": 249,
    "islands: a host is told to stop": 478,
    "learners rest: epoch": 305,
    "lies about bases": 370,
    "moments of before a stop": 359,
    "purged messages back": 229,
    "refused: non-finite": 491,
    "restart during publication": 243,
    "submitted without room": 290,
    "takeover during publication": 283,
    "takeovers after a stop": 334,
    "the hub's disk full: found by a try": 150,
    "the hub's disk full: said by the leader": 199,
    "told to stop: killed before its end": 382,
    "told to stop: standby": 415,
    "told to stop: told twice": 230,
    "told: donor-failed": 257,
    "told: no-room": 393,
    "told: straggling-host": 307,
    "two leaders at once": 308,
    "without a syncer": 342,
}
# So many seeds reach all of them: fewer may miss one by chance (`chance_to_miss`).
ENOUGH = 400
# Each of these can be reached: tests/sim/whole/test_states.py says by which scripted or kept world.
REQUIRED = (
    "a name again",
    "another request under a key refused",
    "audits",
    "bad input counted",
    "beats of a deposed leader",
    "beats: bootstrapping",
    "beats: finished",
    "beats: finishing",
    "beats: running",
    "beats: starved",
    "beats: stopped",
    "beats: waiting",
    "blackouts",
    "chunks altered for a reader",
    "chunks lost for a reader",
    "contributions given up: no round waits",
    "corrupted",
    "clogs",
    "desired accepted",
    "desired in force",
    "disks lost",
    "donors asked",
    "duplicated",
    "elections",
    "exports cut off by the coordinator's end",
    "exports failed",
    "exports gone with their runs",
    "exports made by themselves",
    "exports ready",
    "files of exports taken home",
    "files that a power cut took",
    "files told as safe before a power cut",
    "from checkpoint",
    "from donor",
    "from fresh",
    "grant sent again",
    "hangs",
    "heirs",
    "hubs restored",
    "hubs restored twice",
    "hubs that know who writes",
    "initial parameters half sent",
    "islands ended",
    "islands lost a host",
    "islands whole again",
    "islands: a carrier is cut off",
    "islands: a carrier loses the hub",
    "islands: a host dies",
    "islands: a host dies with an order told and not taken",
    "islands: a host is told to stop",
    "islands: a host stands still for a while",
    "islands: a host stands still for long",
    "islands: a host's link is slow",
    "islands: a share carried",
    "islands: chunks fetched by another host",
    "islands: process 0 gone without a word",
    "islands: process 0 silent past the limit",
    "islands: silent past the limit",
    "leaders alone",
    "learners rest: epoch",
    "learners rest: paused",
    "learners without a device",
    "learners: Merged",
    "learners: Unmerged",
    "lies about bases",
    "lies about marks",
    "lost",
    "lost for good",
    "machines suspended",
    "machines without power",
    "manifests without their chunks",
    "members: coordinator idle",
    "members: learner idle",
    "members: learner unfit",
    "members: learner working",
    "members: syncer catching up",
    "members: syncer idle",
    "members: syncer leading",
    "members: syncer standby",
    "merges executed again",
    "missed",
    "moments of before a stop",
    "moments saved at a stop",
    "new names",
    "noise to everybody",
    "outages",
    "overtaken",
    "partitions",
    "processes exchanged once all is well",
    "pulls sent again",
    "purged messages back",
    "quorum accepted",
    "quorum in force",
    "refused: non-finite",
    "refused: told",
    "restart during publication",
    "released in another order",
    "requests answered at a stop",
    "restore in force",
    "rounds in flight: 1",
    "samples written once all is well",
    "servers of the hub ended",
    "skipped for want of answers",
    "skipped round",
    "snapshots asked for",
    "squeezes",
    "starvation",
    "states lost",
    "stopped by the user",
    "storms",
    "streams narrowed",
    "submitted without room",
    "takeover during publication",
    "takeovers after a stop",
    "the hub's disk full",
    "the hub's disk full: found by a try",
    "the hub's disk full: said by the leader",
    "the last one told: evaluation",
    "the store of checkpoints away",
    "the store of checkpoints not reached",
    "tokens: refusals found in the audit log",
    "tokens: rotates",
    "told to stop: coordinator",
    "told to stop: killed before its end",
    "told to stop: leader",
    "told to stop: learner",
    "told to stop: standby",
    "told to stop: told twice",
    "told: assigned",
    "told: began",
    "told: checkpoint-failed",
    "told: donated",
    "told: donor-failed",
    "told: end",
    "told: evaluation",
    "told: fault-applied",
    "told: fault-planned",
    "told: full",
    "told: init",
    "told: join",
    "told: learner-alive",
    "told: learner-lost",
    "told: learner-seen",
    "told: leave",
    "told: no-room",
    "told: recovered",
    "told: released",
    "told: restored",
    "told: room-again",
    "told: run-created",
    "told: run-paused",
    "told: run-running",
    "told: run-stopped",
    "told: setting",
    "told: shard-repeated",
    "told: shard-shared",
    "told: straggling-host",
    "told: term",
    "told: unfit",
    "torn",
    "two coordinators",
    "two leaders at once",
    "two learners of a name",
    "two processes of a name",
    "unknown",
    "visitors: asks_for_a_plan",
    "visitors: asks_wrongly",
    "visitors: drains",
    "visitors: forgets",
    "visitors: harms_twice",
    "visitors: inflict",
    "visitors: keeps_a_copy",
    "visitors: lacks_room",
    "visitors: listens",
    "visitors: looks",
    "visitors: repeats",
    "visitors: talks_nonsense",
    "visitors: wants_to_begin_again",
    "went back once all is well",
    "without a syncer",
)
# Fewer than three worlds of a hundred reach these, so ENOUGH may miss one by chance. A scripted or
# a kept world must reach each all the same.
RARER = (
    "DN full",
    "contributions refused: incomplete",
    "contributions refused: no-room",
    "publications refused: incomplete",
    "refused: outlier",
    "STATE full",
    "UP full",
)
# Promises that every few worlds check: all of docs/explanation/simulation.md.
CHECKED = (
    *(f"I{n}" for n in range(1, 14)),
    "liveness",
    "exports",
    "samples",
    "tokens",
    "budget",
    "rates",
    "commands",
    "data",
    "deletion",
    "disks",
    "stops",
)
# ENOUGH worlds check each promise so often at least: of those that fewest worlds look at, 40 worlds
# made 15 checks and more. SOON seeds must have made their share of these.
LOOKS, SOON = 20, 100


def chance_to_miss(worlds: int, reached: int = REACHED) -> float:
    """That so many more worlds all miss a state which `reached` of OF have reached, if any share of
    worlds that reach it was as likely as any other before: Laplace's rule, again and again."""
    chance = 1.0
    for more in range(worlds):
        chance *= (OF - reached + 1 + more) / (OF + 2 + more)
    return chance


class RequiredStates:
    """Sums over worlds."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.worlds: Counter[str] = Counter()  # that reached a state
        self.looks: Counter[str] = Counter()

    def add(self, counts: Counter[str], looks: Counter[str]) -> None:
        """One more world."""
        self.counts += counts
        self.worlds.update(state for state, n in counts.items() if n)
        self.looks += looks

    def missing(self, worlds: int = 0) -> list[str]:
        """What must be reached, and was not; and promises that hardly anybody checked."""
        unreached = [state for state in REQUIRED if not self.worlds[state]]
        return unreached + self.unchecked(worlds)

    def unchecked(self, worlds: int = 0) -> list[str]:
        """Promises that so many worlds checked too seldom."""
        least = max(LOOKS * min(worlds, ENOUGH) // ENOUGH, 1)
        return [f"a check of {name}" for name in CHECKED if self.looks[name] < least]

    def report(self) -> None:
        """Print all, the rarest last, and how often each promise was checked."""
        for what, count in self.counts.most_common():
            print(f"{count:>8}  in {self.worlds[what]:>4} worlds  {what}")
        print("checks made: " + "  ".join(f"{n} {c}" for n, c in sorted(self.looks.items())))
