"""Bytes of each of a run's streams at its worst moment, derived term by term.

The worst moments, each possible in a healthy run:

- UP: a snapshot takes as long to write as the next one is away, so that two intervals of
  contributions are there; or a second learner sends the initial parameters because the first died.
- DN: every fragment is just before its next keyframe, and as many keyframes as the syncer
  publishes at a time are there beside what they replace.
- STATE: all learners but one come back at once, and one donor dies half way.
- TAPE: the whole run's, or as many records as lie there before older ones are archived.
"""

from collections.abc import Sequence

from diloco_shared.budget.job import Job
from diloco_shared.budget.overhead import (
    ROUND,
    ROUND_LEARNER,
    contribution,
    initial,
    inner_state,
    publication,
    stored,
)
from diloco_shared.budget.terms import Need, Term
from diloco_shared.spec.optimizers import STATE_EXTRA

# --------------------------------------------------------------------------------------------------
# How many records a tape holds in its stream: archiving and the stream's limit go by it.

# Records of a shard that lie in the stream before any of them is archived: a day of the
# coordinator's pages and of standbys' reading comes from the stream, a restart reads seconds of it.
RECORDS_IN_STREAM = 2048
# Snapshots on a syncer's disk, whose records may not go yet: two are kept, and one is written.
SNAPSHOTS = 3


def records_max(snapshot_every_rounds: int) -> int:
    """Records of a shard in its stream at the worst moment, for the stream's limit.

    Those that may lie there, those that no kept snapshot covers, and as many again while standbys
    are waited for: a round has one record, and there are fewer others than rounds.
    """
    return 2 * (RECORDS_IN_STREAM + 2 * SNAPSHOTS * snapshot_every_rounds)


# No stream is smaller: what many small messages and their repeats add is not worth counting.
FLOOR = 64 << 20
# A run's rounds are on its tape twice over: skipped rounds, terms and restores are records too.
TAPE_SAFETY = 2
# A standby gets a snapshot fragment by fragment: one on its way, and what a broken attempt left.
# Each is master, anchor, the anchor one version back, and momentum.
SNAPSHOT_PARTS, SNAPSHOT_BYTES = 2, 16
# A snapshot may take so many intervals to write before UP has no room: the one that it covers, and
# the one that is merged meanwhile.
INTERVALS = 2


def streams(job: Job) -> dict[str, Need]:
    """By kind (`subjects.STREAM_KINDS`)."""
    return {"UP": _up(job), "DN": _down(job), "TAPE": _tape(job), "STATE": _state(job)}


def roomy(job: Job) -> dict[str, int]:
    """The limit that each stream should have: what it needs, and not less than a floor.

    `keeping.stream_bytes_max` bounds the floor too: who sets it means it.
    """
    floor = min(FLOOR, job.spec.keeping.stream_bytes_max or FLOOR)
    return {kind: max(need.bytes, floor) for kind, need in streams(job).items()}


def limits(job: Job) -> dict[str, int]:
    """The limit that each stream gets: what it should have, up to `keeping.stream_bytes_max`.

    Submission refuses a run whose bound is too small. But a run may need more later, when more
    learners join or tell how large their model is.
    """
    bound = job.spec.keeping.stream_bytes_max
    needed = roomy(job)
    return needed if bound is None else {kind: min(n, bound) for kind, n in needed.items()}


def window(sizes: Sequence[int], rounds: int) -> int:
    """Most bytes of so many rounds in a row, which take the fragments in turn."""
    full, rest = divmod(rounds, len(sizes))
    if not rest:
        return full * sum(sizes)
    twice = [*sizes, *sizes]
    most = max(sum(twice[start : start + rest]) for start in range(len(sizes)))
    return full * sum(sizes) + most


def contributions(job: Job, rounds: int) -> int:
    """Most bytes in UP of so many rounds of every shard."""
    algorithm = job.spec.algorithm
    each = [contribution(algorithm.codec_up, size) for size in job.sizes]
    shards = range(algorithm.shards)
    return job.learners * sum(
        window([each[p] for p in algorithm.owned(shard)], rounds) for shard in shards
    )


def flying(job: Job) -> int:
    """Most bytes in UP of the rounds in flight, twice: a new leader pulls them again, and where one
    leads on, as many may follow before anybody looks."""
    return 2 * contributions(job, job.spec.algorithm.rounds_in_flight_max)


def _up(job: Job) -> Need:
    algorithm, keeping = job.spec.algorithm, job.spec.keeping
    every, m, up = keeping.snapshot_every_rounds, job.learners, algorithm.codec_up
    first = sum(initial(size, job.layout) for size in job.sizes)
    began = (
        Term("initial parameters", first, "4 bytes x N, until the first snapshot covers them"),
        Term("a second set of them", first, "4 bytes x N: the first initializer died half way"),
    )
    again = Term(
        "rounds in flight, twice",
        flying(job),
        f"{m} learners x {algorithm.rounds_in_flight_max} rounds: pulled again by a new leader",
    )
    if keeping.contributions == "all":
        kept = Term(
            "contributions of the whole run",
            contributions(job, job.rounds),
            f"{m} learners x {job.rounds} rounds x a fragment in {up}: keeping.contributions = "
            '"all"',
        )
        lower = 'keeping.contributions = "until_snapshot", or a shorter run'
        return Need("UP", (*began, kept, again), lower)
    lower = "algorithm.codec_up, keeping.snapshot_every_rounds, or fewer learners"
    interval = contributions(job, every)
    how = f"{m} learners x {every} rounds x a fragment in {up}"
    merged = Term("contributions of an interval", interval, f"{how}: until a snapshot covers them")
    if 2 * first >= (INTERVALS - 1) * interval:
        return Need("UP", (*began, merged, again), lower)
    longer = Term(
        "contributions of another",
        (INTERVALS - 1) * interval,
        f"{how}: while that snapshot is written and standbys execute the rounds",
    )
    return Need("UP", (merged, longer, again), lower)


def _down(job: Job) -> Need:
    algorithm, m = job.spec.algorithm, job.learners
    every, down = algorithm.keyframe_every, algorithm.codec_down
    owned = algorithm.fragments // algorithm.shards
    at_once = algorithm.shards * (min(algorithm.rounds_in_flight_max + 1, owned) + 1)
    largest = publication("fp32", job.largest, m)
    newest = sum(publication("fp32", size, m, job.layout) for size in job.sizes)
    deltas = (every - 1) * sum(publication(down, size, m) for size in job.sizes)
    return Need(
        "DN",
        (
            Term("newest keyframes", newest, "4 bytes x N: version 0, or the last whole one"),
            Term(
                "publications since",
                deltas,
                f"{every - 1} versions of every fragment in {down}: keyframe_every - 1",
            ),
            Term(
                "keyframes on their way",
                at_once * largest,
                f"{at_once} x 4 bytes x the largest fragment: rounds in flight of every shard, "
                "one more at a time, and one that replaces what is not yet removed",
            ),
        ),
        "algorithm.keyframe_every, algorithm.codec_down, or more fragments",
    )


def _tape(job: Job) -> Need:
    algorithm, m = job.spec.algorithm, job.learners
    record = ROUND + ROUND_LEARNER * m
    begun = algorithm.shards * (job.layout + 256 * algorithm.fragments + ROUND)
    most = records_max(job.spec.keeping.snapshot_every_rounds)
    count = algorithm.shards * min(TAPE_SAFETY * job.rounds, most)
    how = (
        f"{count} records of {record} bytes ({ROUND} + {ROUND_LEARNER} x {m} learners): of every "
        f"shard the rounds of the run twice, or the {most} that lie there before older ones are "
        "archived"
    )
    rounds = Term("records of rounds", count * record, how)
    first = Term("first records", begun, "the layout of every shard: tensors and fragments by name")
    return Need("TAPE", (first, rounds), "keeping.snapshot_every_rounds, or fewer learners")


def _state(job: Job) -> Need:
    shards, m = job.spec.algorithm.shards, job.learners
    state = inner_state(job.state, len(job.sizes))
    part = stored(SNAPSHOT_BYTES * job.largest, STATE_EXTRA)
    return Need(
        "STATE",
        (
            Term(
                "inner states on their way",
                (m - 1) * state,
                f"{m - 1} newcomers x moments and counts ({job.spec.inner.optimizer}): all but "
                "one learner come back at once",
            ),
            Term(
                "one that was given up",
                state if m > 1 else 0,
                "moments and counts of a donor that died half way",
            ),
            Term(
                "a snapshot for a standby",
                SNAPSHOT_PARTS * shards * part,
                f"{SNAPSHOT_PARTS} x {SNAPSHOT_BYTES} bytes x the largest fragment for each shard",
            ),
        ),
        "inner.optimizer with less state, more fragments, or fewer learners",
    )
