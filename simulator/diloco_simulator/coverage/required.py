"""Which rare states many whole worlds together must reach, and how often promises were checked.

What no seed reaches, no seed has tested. Names are keys of a verdict's `counts`.
"""

from collections import Counter

# Of 90 worlds (seeds 3000 to 3089) ten or more reached each state of REQUIRED, but for RAREST.
REACHED, OF = 10, 90
RAREST = {
    "without a syncer": 4,
    # Of 300 worlds (seeds 9940000 to 9940299), counted as of 90.
    "exports cut off by the coordinator's end": 5,
    "exports failed": 9,
    "exports made by themselves": 9,
    # Of 229 worlds (seeds 900000 to 900228), counted as of 90. Some states of islands were reached
    # by few of these, or are newer, and are left to tests/sim/whole/test_islands.py: a host that
    # dies with its part not given, with an anchor not adopted or in the middle of a gather, and
    # process 0 in the middle of a put; and of what hosts carry, what becomes of one that cannot.
    "islands: a host dies": 9,
    "islands: a host dies with an order told and not taken": 4,
    "islands: a host is told to stop": 8,
    "told: straggling-host": 9,
    # Of 400 worlds (seeds 61000000 to 61000399), counted as of 90.
    "hubs restored": 8,
    "islands: a carrier is cut off": 6,
    "islands: a carrier loses the hub": 4,
    "islands: a share carried": 9,
    "islands: chunks fetched by another host": 8,
}
# What hardships bring was reached by one of twenty worlds or more, of some dozens.
# So many seeds reach all of them: fewer may miss one by chance, 400 do so in two of 10,000 runs
# (`chance_to_miss`), and 300 would in six.
ENOUGH = 400
REQUIRED = (
    "another request under a key refused",
    "audits",
    "bad input counted",
    "beats: bootstrapping",
    "beats: finished",
    "beats: finishing",
    "beats: running",
    "beats: starved",
    "beats: stopped",
    "beats: waiting",
    "desired accepted",
    "desired in force",
    "disks lost",
    "donors asked",
    "duplicated",
    "exports cut off by the coordinator's end",
    "exports failed",
    "exports gone with their runs",
    "exports made by themselves",
    "exports ready",
    "files of exports taken home",
    "grant sent again",
    "hangs",
    "heirs",
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
    "learners without a device",
    "learners: Merged",
    "learners: Unmerged",
    "lost",
    "lost for good",
    "machines suspended",
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
    "new names",
    "noise to everybody",
    "outages",
    "partitions",
    "pulls sent again",
    "quorum accepted",
    "quorum in force",
    "refused: told",
    "rounds in flight: 1",
    "skipped for want of answers",
    "skipped round",
    "samples written once all is well",
    "squeezes",
    "elections",
    "hubs restored",
    "hubs that know who writes",
    "leaders alone",
    "lies about marks",
    "starvation",
    "states lost",
    "stopped by the user",
    "streams narrowed",
    "submitted without room",
    "the hub's disk full",
    "the hub's disk full: found by a try",
    "the hub's disk full: said by the leader",
    "the store of checkpoints away",
    "the store of checkpoints not reached",
    "tokens: refusals found in the audit log",
    "tokens: rotates",
    "told: assigned",
    "told: began",
    "told: donated",
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
    "two coordinators",
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
    "without a syncer",
)
# Promises that every few worlds check.
CHECKED = (*(f"I{n}" for n in range(1, 14)), "liveness")


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

    def missing(self) -> list[str]:
        """What must be reached, and was not; and promises that nobody checked."""
        unreached = [state for state in REQUIRED if not self.worlds[state]]
        return unreached + [f"a check of {name}" for name in CHECKED if not self.looks[name]]

    def report(self) -> None:
        """Print all, the rarest last, and how often each promise was checked."""
        for what, count in self.counts.most_common():
            print(f"{count:>8}  in {self.worlds[what]:>4} worlds  {what}")
        print("checks made: " + "  ".join(f"{n} {c}" for n, c in sorted(self.looks.items())))
