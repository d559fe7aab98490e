"""What a seeded world is like: drawn once from its seed, so that seeds differ in kind."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from diloco_shared.spec.codecs import NAMES
from diloco_shared.spec.merge_rules import RULES

# Checkpoints of the whole run: (asked for, steps between those made by itself, restores).
CUTS = (*((0, None, 0),) * 6, (1, None, 0), (2, None, 1), (1, None, 1), (1, 12, 2))
# How contributions are weighed: a run keeps to one rule.
WEIGHTINGS = ("quality", "quality", "tokens", "equal")
# What seeds chose from when they were first played: more to choose from would change the choices.
FIRST_CODECS = ("fp32", "bf16", "int8", "int4", "e3m0")
FIRST_RULES = ("rda", "clipped", "trimmed", "median", "mean")
# What some links carry, in bytes a second. What a process says beside payloads comes to thousands:
# of four learners' leader to 10,000. So a link of less keeps everybody out for ever, and shows
# nothing.
THIN_LINKS = (40_000.0, 15_000.0)


@dataclass(frozen=True, slots=True)
class Options:
    """Rates are per event of their kind; times in virtual seconds."""

    learners: int = 3
    quorum: int = 2
    fragments: int = 2
    overlap_steps: int = 2
    steps: int = 48
    safety_s: float = 40.0  # faults happen in this time; afterwards the world is healed
    delay_s: float = 0.1  # mean of one way
    loss: float = 0.0
    duplicate: float = 0.0
    unknown: float = 0.0  # of an append's answer
    syncer_crash: float = 0.0  # between any two effects, leading or standing by
    learner_crash: float = 0.0
    dies_at: tuple[str, int] = ("", 0)  # (role, n): dies before its n-th effect, whatever the rates
    syncer_hangs: int = 0  # half of them with a failover meanwhile
    learner_hangs: int = 0  # some of them with a second process of the learner meanwhile
    partitions: int = 0
    slow_links: int = 0  # for some seconds, everything a process sends or hears takes longer
    overtaken: float = 0.0  # of what a stream holds: its transfer ends after later ones
    wishes: int = 0  # pauses and changes of the quorum by the user
    stop: bool = False  # the user stops the run at some time
    power_cuts: int = 0  # the tape loses records that it had acknowledged
    blackouts: int = 0  # every process dies at once
    disk_s: float = 2.0  # a snapshot takes up to this long
    disk_full: float = 0.0  # of a snapshot
    torn: float = 0.0  # of a snapshot whose writer dies: half of it stays on the disk
    wall_skew_s: float = 0.0  # wall clocks are off by up to this much, anew with every process
    nan: float = 0.0  # of a contribution being poisoned
    garbage: float = 0.0  # of a contribution that lies, and per second of a stranger
    corrupt: float = 0.0  # of a publication on its way to one learner
    jitter: float = 0.1  # of every step's time: without it, learners could stay in step for ever
    speeds: tuple[float, ...] = (1.0,)
    snapshot_every_rounds: int = 5
    keyframe_every: int = 3
    codec_up: str = "bf16"
    codec_down: str = "bf16"
    syncers: int = 1  # per shard: with more than one, the others stand by
    shards: int = 1  # each with syncers, tape and lease of its own
    checkpoints: int = 0  # of the whole run, asked for by the user at some time
    checkpoint_every_steps: int | None = None  # of the whole run, made by itself
    restores: int = 0  # asked for by the user at some time
    budget: str = "steps"  # or tokens, or seconds
    weighting: str = "quality"
    lost_disks: int = 0  # all syncers of a shard are put on empty disks, half under new names
    # Drawn by `Options.drawn` from generators of their own, so that older faults fall as before.
    room: float = math.inf  # limits of streams, as multiples of what the run needs at most
    squeezes: int = 0  # for some seconds the hub's storage is used up: no stream takes anything
    losses: int = 0  # machines that never come back
    replaced: int = 0  # containers that come back under another name, or with an empty disk
    learners_spare: int = 60  # more than it begins with: the most that the run is given
    long_hangs: int = 0  # of learners, for minutes
    stop_late: bool = False  # the user stops the run while somebody hangs for long
    outages: int = 0  # of the hub, for everybody
    tails: int = 0  # power cuts that take the newest of the streams that are not synced
    # They take as much as two minutes bring, and bring back what was purged in that time. Every
    # drawn world has it; kept ones from before are as they were.
    deep_tails: bool = False
    step_s: float = 1.0  # of the fastest learner; longer than a learner's lease in some worlds
    disk_spells: int = 0  # for some seconds a syncer's disk takes no snapshot at all
    link_bytes_per_s: float = math.inf  # of each machine, both ways together
    # Islands of several hosts: processes of each learner, counted as `speeds` are; (): one.
    hosts: tuple[int, ...] = ()
    host_silence_s: float = 2.5  # so long without a sign of life, and a host counts as dead
    host_deaths: int = 0  # of hosts that follow, and of process 0 in the middle of a put
    host_hangs: int = 0  # half of them for longer than a host may be silent
    host_stops: int = 0  # a host is told to stop, and the island ends in order
    slow_hosts: int = 0  # for some seconds, what one host hears and says takes longer
    carriers: bool = False  # hosts of islands carry their shares to and from the hub themselves
    cut_carriers: int = 0  # one of them is without the hub for a while, or dies with its share
    # Every process has credentials of its own, so that the hub knows who writes, and leaders write
    # for learners.
    named: bool = False
    hub_restores: int = 0  # the hub loses its disk, and is put back from a backup
    breaks: int = 0  # connections to the hub are lost, and made anew some seconds later
    clogs: int = 0  # connections of some machines stand still, and go on in another order
    storms: int = 0  # of the hub, a disk and the network at once
    in_order: bool = False  # what met a cut stays in its connection's order; with clogs it does so
    nodes: int = 1  # of the hub
    elections: int = 0  # the hub's nodes exchange their leader, and have none for some seconds
    full_disks: int = 0  # for some seconds the hub's disk is full, which no append's answer tells
    data_shards: int = 0  # of 40 sequences or so, which a run reads to their ends; 0: larger ones
    # Processes that are told to stop; where there are any, some of each kind once all is well too.
    told_to_stop: int = 0
    slow_writes: bool = False  # merges wait for what a snapshot has yet to write
    power_losses: int = 0  # of one machine or of all: their disks forget what was not synced
    merge: str = "rda"  # a run keeps to one rule
    no_names: bool = False  # file systems that know no sync of a folder, as some of a network
    # Share of its own parameters that a learner keeps when it adopts. No seed draws it: it would
    # change what every learner of the world sends.
    alpha: float = 0.0
    # A server of the hub that ends takes everybody's connection with it. Every drawn world has it;
    # kept ones from before are as they were.
    severs: bool = False
    # Of a payload that somebody reads: one of its chunks is altered or lost for it, for a while.
    spoilt: float = 0.0

    @property
    def learners_ever(self) -> int:
        """Names of learners there may have been in the end."""
        return self.learners * (1 + 2 * self.replaced)

    @classmethod
    def calm(cls, **changes: object) -> "Options":
        """No faults at all."""
        return cls(**changes)  # type: ignore[arg-type]

    def changed(self, **changes: Any) -> "Options":
        """The same world but for these."""
        return replace(self, **changes)

    @classmethod
    def drawn(cls, seed: int) -> "Options":
        """A swarm: every seed turns some faults on and others off."""
        rng = random.Random(seed)

        def sometimes(high: float) -> float:
            return rng.choice([0.0, 0.0, high / 4, high])

        learners = rng.choice([2, 3, 3, 4])
        shards = random.Random(f"shards of {seed}").choice([1, 1, 1, 2])
        cuts = random.Random(f"checkpoints of {seed}").choice(CUTS)
        weighting = random.Random(f"weights of {seed}").choice(WEIGHTINGS)
        budget = rng.choice(["steps"] * 6 + ["tokens", "seconds"])
        drawn = cls(
            deep_tails=True,
            learners=learners,
            quorum=rng.randint(1, learners - 1) if learners > 2 else rng.choice([1, 2]),
            fragments={1: (1, 2, 3), 2: (2, 2, 4)}[shards][rng.choice([1, 2, 3]) - 1],
            overlap_steps=rng.choice([1, 2, 6, 9]),  # 9: more rounds in flight than fragments
            steps=rng.choice([36, 48, 60]),
            delay_s=rng.choice([0.01, 0.1, 0.4]),
            loss=sometimes(0.2),
            duplicate=sometimes(0.2),
            unknown=sometimes(0.2),
            syncer_crash=sometimes(0.01),
            learner_crash=sometimes(0.01),
            syncer_hangs=rng.choice([0, 0, 1]),
            learner_hangs=rng.choice([0, 0, 1, 2]),
            partitions=rng.choice([0, 0, 1, 3]),
            slow_links=rng.choice([0, 0, 0, 2]),
            overtaken=sometimes(0.2),
            wishes=rng.choice([0, 0, 0, 1, 2]),
            stop=rng.random() < 0.05,
            power_cuts=rng.choice([0, 0, 0, 1]),
            blackouts=rng.choice([0, 0, 0, 0, 1]),
            disk_s=rng.choice([0.5, 2.0, 15.0]),
            disk_full=sometimes(0.5),
            torn=sometimes(1.0),
            wall_skew_s=rng.choice([0.0, 5.0, 1e5]),
            nan=sometimes(0.1),
            garbage=sometimes(0.1),
            corrupt=rng.choice([0.0, 0.0, 0.0, 0.05]),
            speeds=tuple(rng.choice([1.0, 1.0, 0.8, 0.5]) for _ in range(learners)),
            snapshot_every_rounds=rng.choice([3, 5, 1000]),
            keyframe_every=rng.choice([2, 4]),
            codec_up=rng.choice(FIRST_CODECS[1:]),  # fp32 is what liars claim
            codec_down=rng.choice(FIRST_CODECS),
            syncers=rng.choice([1, 1, 2, 2, 3]),
            budget=budget,
            shards=shards,
            checkpoints=cuts[0],
            checkpoint_every_steps=cuts[1],
            restores=cuts[2],
            weighting=weighting,
        )
        more = beyond(seed) | islands(seed) | seldom(seed) | newer_codecs(seed) | newer_rules(seed)
        more |= {"named": random.Random(f"credentials of {seed}").random() < NAMED}
        more |= {"severs": True}
        if drawn.restores:
            more |= restored_often(seed)
        if drawn.power_cuts:
            # A tape that loses what it had synced, and the bulk streams all that shows it: nobody
            # could know of such a version, nor would anybody have it.
            more["tails"] = 0
        if more.get("elections"):
            more |= several_nodes(seed)
        if more.get("hub_restores"):
            # What a power cut took from the tape, a backup from before may have.
            more["power_cuts"] = 0
        return drawn.changed(**more)


# How many worlds have a hub that knows who writes.
NAMED = 0.3
# How many worlds have islands of several hosts.
ISLANDS = 0.3
# In how many of these the other hosts carry to and from the hub what they can.
CARRIERS = 0.5


def islands(seed: int) -> dict[str, Any]:
    """Of several hosts: some learners of some worlds, from dice of their own."""
    rng = random.Random(f"islands of {seed}")
    if rng.random() >= ISLANDS:
        return {}
    dice = random.Random(f"carriers of {seed}")
    carriers = {"cut_carriers": dice.choice([0, 3, 6]), "carriers": dice.random() < CARRIERS}
    return (carriers if carriers["carriers"] else {}) | {
        "hosts": tuple(rng.choice([1, 2, 2, 3, 4]) for _ in range(4)),
        "host_silence_s": rng.choice([1.5, 2.5, 4.0]),
        "host_deaths": rng.choice([0, 4, 5]),
        "host_hangs": rng.choice([0, 1, 2]),
        "host_stops": rng.choice([0, 0, 1]),
        "slow_hosts": rng.choice([0, 1]),
    }


@dataclass(frozen=True, slots=True)
class Seldom:
    """An option that only some worlds have, drawn from dice of its own."""

    dice: str  # what they are called
    share: float  # of all worlds
    choices: tuple[int | float | str, ...]  # of those that have it


# By option.
SELDOM = {
    # The hub has several nodes, which lose the one that leads.
    "elections": Seldom("elections", 0.15, (1, 2, 3)),
    "hub_restores": Seldom("hubs put back", 0.08, (1,)),
    "breaks": Seldom("broken connections", 0.2, (2, 5, 10)),
    "clogs": Seldom("clogs", 0.2, (1, 2, 4)),
    "storms": Seldom("storms", 0.15, (1, 2)),
    "in_order": Seldom("order", 0.5, (True,)),
    # Learners read one data shard after another.
    "data_shards": Seldom("smaller data", 0.4, (12, 17, 24)),
    "told_to_stop": Seldom("told to stop", 0.3, (1, 2, 4)),
    "power_losses": Seldom("machines without power", 0.2, (1, 2, 3)),
    # Syncers' disks write a snapshot for as long as they take.
    "slow_writes": Seldom("slow writes", 0.3, (True,)),
    "full_disks": Seldom("full disks", 0.15, (1, 2)),
    # Runs that do not merge by the default.
    "merge": Seldom("merges", 0.2, (FIRST_RULES[1], *FIRST_RULES[1:])),
    "no_names": Seldom("file systems that settle no names", 0.2, (True,)),
    "spoilt": Seldom("spoilt payloads", 0.15, (0.05, 0.2)),
}


def seldom(seed: int) -> dict[str, Any]:
    """What this world has of these."""
    drawn: dict[str, Any] = {}
    for option, one in SELDOM.items():
        rng = random.Random(f"{one.dice} of {seed}")
        if rng.random() < one.share:
            drawn[option] = rng.choice(one.choices)
    return drawn


# The nodes of a hub that has several, and how many of these hubs lose all of them, beside those
# whose disks SELDOM takes anyway.
NODES, ALL_LOST = 3, 0.1


def several_nodes(seed: int) -> dict[str, Any]:
    """From dice of its own."""
    lost = random.Random(f"nodes put back of {seed}").random() < ALL_LOST
    return {"nodes": NODES} | ({"hub_restores": 1} if lost else {})


# How many of the worlds whose user goes back to a checkpoint have one who does so time and again.
RESTLESS = 0.3


def restored_often(seed: int) -> dict[str, Any]:
    """From dice of its own."""
    rng = random.Random(f"restores of {seed}")
    return {"restores": rng.choice([4, 8])} if rng.random() < RESTLESS else {}


# How many worlds have a codec that is newer than those, for each of them.
NEWER_CODEC = 0.15


def newer_codecs(seed: int) -> dict[str, Any]:
    """Of each newer codec, from dice of its own: up, down or both ways."""
    drawn: dict[str, Any] = {}
    for name in NAMES[len(FIRST_CODECS) :]:
        rng = random.Random(f"newer codecs of {seed}: {name}")
        if rng.random() < NEWER_CODEC:
            ways = rng.choice([("codec_up",), ("codec_down",), ("codec_up", "codec_down")])
            drawn |= dict.fromkeys(ways, name)
    return drawn


# How many worlds merge by a rule that is newer than those, for each of them.
NEWER_RULE = 0.1


def newer_rules(seed: int) -> dict[str, Any]:
    """Of each newer merge rule, from dice of its own."""
    drawn: dict[str, Any] = {}
    for name in RULES:
        rng = random.Random(f"newer merge rules of {seed}: {name}")
        if name not in FIRST_RULES and rng.random() < NEWER_RULE:
            drawn["merge"] = name
    return drawn


def fresh_seed() -> int:
    """To begin at, where nobody has looked yet; short enough to be typed."""
    return random.SystemRandom().randrange(10**9)


def beyond(seed: int) -> dict[str, Any]:
    """What else a seed draws: what the machines it runs on have room for, what stands still for
    long, and what never comes back."""
    rng = random.Random(f"capacities and losses of {seed}")
    drawn: dict[str, Any] = {
        "room": rng.choice([math.inf, 1.0, 1.2, 5.0]),
        "squeezes": rng.choice([0, 0, 0, 1]),
        "disk_spells": rng.choice([0, 0, 0, 1]),
        "losses": rng.choice([0, 0, 0, 0, 1, 1, 2]),
        "replaced": rng.choice([0, 0, 0, 1]),
        "learners_spare": rng.choice([0, 60]),
        "long_hangs": rng.choice([0, 0, 0, 0, 1]),
        "stop_late": rng.random() < 0.5,
        "outages": rng.choice([0, 0, 0, 1]),
        "tails": rng.choice([0, 0, 0, 0, 1]),
        "step_s": rng.choice([1.0] * 7 + [8.0]),
        "link_bytes_per_s": rng.choice([math.inf] * 5 + [*THIN_LINKS]),
        "lost_disks": random.Random(f"disks of {seed}").choice([0, 0, 0, 0, 1, 2]),
    }
    drawn["stop_late"] = drawn["stop_late"] and drawn["long_hangs"] > 0
    return drawn
