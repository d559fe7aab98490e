"""How many bytes each stream of a tiny world may have to hold: what its limits are multiples of.

Every stream at its worst moment, of a run without faults that lasts; what faults add there must be
room for in the rest, or be waited for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diloco_shared.config import RunSpec
from diloco_shared.numerics import codec
from diloco_shared.protocol.messages import TapeRecord, TapeRound
from diloco_simulator.world import MESSAGE_BYTES

# Of a record on the tape, as encoded: a round's grows with its verdicts.
RECORD_BYTES, VERDICT_BYTES = 500, 350
# Records that a run's tape may have beside its rounds: terms, snapshots, settings, checkpoints.
RECORDS_BESIDE = 40


@dataclass(frozen=True, slots=True)
class Capacities:
    """Bytes of each stream."""

    up: float = math.inf
    down: float = math.inf
    state: float = math.inf
    tape: float = math.inf  # of one shard

    def times(self, factor: float) -> "Capacities":
        """So many times as much of each."""
        return Capacities(*(factor * each for each in (self.up, self.down, self.state, self.tape)))


def record_bytes(record: TapeRecord) -> int:
    """What a record takes on the tape."""
    verdicts = len(record.verdicts) if isinstance(record, TapeRound) else 0
    return RECORD_BYTES + VERDICT_BYTES * verdicts


def needed(spec: RunSpec, sizes_P: Sequence[int], learners: int, state_bytes: int) -> Capacities:
    """Of a run of so many learners, whose inner state has `state_bytes`; sizes in values.

    DN: the newest keyframe of everything, `keyframe_every - 1` deltas, and as many keyframes of
    the largest fragment as may be on their way at once (rounds in flight, one on demand, and one
    that is being replaced). UP: what two intervals of snapshots and the rounds in flight bring, or
    initial parameters of everybody. STATE: of every learner once, and one that is replaced.
    """
    a, values, largest = spec.algorithm, sum(sizes_P), max(sizes_P)
    down = 4 * values + MESSAGE_BYTES * a.fragments
    delta = codec.bytes_of(a.codec_down, values) + MESSAGE_BYTES * a.fragments
    down += (a.keyframe_every - 1) * delta
    down += a.shards * (a.rounds_in_flight_max + 2) * (4 * largest + MESSAGE_BYTES)
    rounds = _rounds(spec)
    kept = min(2 * spec.keeping.snapshot_every_rounds, rounds) + a.rounds_in_flight_max + 1
    each = codec.bytes_of(a.codec_up, largest) + MESSAGE_BYTES
    initial = learners * (4 * values + MESSAGE_BYTES * a.fragments)
    return Capacities(
        up=a.shards * learners * kept * each + initial,
        down=down,
        state=(learners + 1) * (state_bytes + MESSAGE_BYTES),
        tape=rounds * (RECORD_BYTES + VERDICT_BYTES * learners) + RECORDS_BESIDE * RECORD_BYTES,
    )


def _rounds(spec: RunSpec) -> int:
    """Of one shard, in a run whose budget is about as many steps; skipped ones come on top."""
    b, a = spec.budget, spec.algorithm
    learners = spec.membership.learners_min
    steps = b.steps or (b.tokens or 0) / (spec.tokens_per_step * learners) or (b.seconds or 0)
    return math.ceil(1.5 * steps / a.steps_per_round) + len(a.owned(0))
