"""The bandwidth that each method needs between data centers: a closed link model, no packets.

Data-parallel, DiLoCo and Streaming DiLoCo follow the model of their author's simulator: a step of T
seconds is a third forward and two thirds backward; 128 buckets of gradients become ready evenly
through the backward pass and leave by one FIFO link per data center; an all-reduce over M carries
2 (1 - 1/M) times the bits. What is late at its deadline stalls the step, and the bandwidth needed
is the least at which compute / (compute + stall) reaches the utilisation asked for.

A Decoupled learner never stalls, so there is no utilisation to choose. Its need has two readings,
and both are reported:

- *transfer window*: one fragment within the overlap of tau steps, per direction. The published
  1.7, 0.43 and 0.84 Gbit/s follow it (16 bits; 4.125 bits; 4.125 bits, both directions).
- *shared link*: where tau exceeds H/P, windows of several fragments overlap on the one link there
  is; it must carry a fragment every H/P steps, which is the larger figure and the one to provision.

Publications are changes and, now and then, a keyframe: a whole fragment in more bits. Published
figures leave keyframes out (`keyframe_every=0`); a run has them, in a quarter of its turns. What is
due then is what the shared link must carry: with less, it falls behind by more than a turn.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, get_args

from diloco_shared.spec.algorithm import Algorithm, keyframe_turns
from diloco_shared.spec.codecs import CODECS

Method = Literal["dp", "diloco", "streaming", "decoupled"]
METHODS: tuple[str, ...] = get_args(Method)
BUCKETS = 128  # gradient buckets of a backward pass, in the author's simulator
FORWARD = 1 / 3  # share of a step before the first gradient
# Bursts simulated, the second half of them measured: what queues behind a deadline of tau steps
# settles within tau bursts, so 64 beyond twice those in flight are ample.
BURSTS = 64
GBIT = 1e9
# No link between data centers is outside of it; the search is over its logarithm.
SEARCH_GBIT_PER_S = (1e-6, 1e9)
# Bits per value on our wire, with its share of a scale.
CODEC_BITS = {codec.name: codec.bits_in_all for codec in CODECS}
# What a run has unless it says otherwise.
KEYFRAME_EVERY: int = Algorithm.model_fields["keyframe_every"].default
KEYFRAME_CODEC: str = Algorithm.model_fields["keyframe_codec"].default


class BadSetting(ValueError):
    """A setting out of range: which one, and what it may be."""


@dataclass(frozen=True, slots=True)
class Published:
    """Bits per value of publications: a change's, and a keyframe's at every so many versions."""

    change: float
    keyframe: float
    every: int  # 0: there are no keyframes
    fragments: int  # P

    @property
    def mean(self) -> float:
        """Over all versions."""
        return self._with(1 / self.every if self.every else 0.0)

    @property
    def fullest(self) -> float:
        """Over the fragments of one turn, of one that has the most to carry."""
        if self.every <= 1:
            return self.mean
        keyframes = ceil(self.fragments / keyframe_turns(self.every))
        # Other turns have none, which is more to carry where a keyframe has fewer bits.
        return max(self.change, self._with(keyframes / self.fragments))

    def _with(self, keyframes: float) -> float:
        return self.change + (self.keyframe - self.change) * keyframes


@dataclass(frozen=True, slots=True)
class Link:
    """What is trained and how often it is exchanged; `utilisation` is a share of 1."""

    method: Method
    params: float = 5e9  # N
    learners: int = 2  # M data centers
    step_s: float = 1.0  # T
    sync_every_steps: int = 24  # H
    fragments: int = 24  # P of published figures; a run has fewer unless it says so
    overlap_steps: int = 2  # tau
    utilisation: float = 0.95
    up_bits: float = 16.0  # per value; all-reduces use it both ways
    down_bits: float = 16.0
    keyframe_every: int = KEYFRAME_EVERY  # versions; 0: no keyframes, as published figures have it
    keyframe_bits: float = CODEC_BITS[KEYFRAME_CODEC]

    def __post_init__(self) -> None:
        _within("method", self.method in METHODS, f"one of {', '.join(METHODS)}")
        for name in ("params", "step_s", "up_bits", "down_bits", "keyframe_bits"):
            _within(name, 0 < getattr(self, name) < float("inf"), "a positive number")
        for name in ("learners", "sync_every_steps", "fragments"):
            _within(name, getattr(self, name) >= 1, "at least 1")
        for name in ("overlap_steps", "keyframe_every"):
            _within(name, getattr(self, name) >= 0, "at least 0")
        _within("utilisation", 0 < self.utilisation <= 1, "above 0 and at most 1")
        if self.method == "decoupled":
            fits = self.sync_every_steps % self.fragments == 0
            _within("sync_every_steps", fits, f"a multiple of fragments ({self.fragments})")

    @property
    def steps_per_fragment(self) -> float:
        """H / P: steps between two fragments that are due."""
        return self.sync_every_steps / self.fragments

    @property
    def down(self) -> Published:
        """Of Decoupled."""
        return Published(self.down_bits, self.keyframe_bits, self.keyframe_every, self.fragments)


def _within(name: str, good: bool, wanted: str) -> None:
    if not good:
        raise BadSetting(f"{name} must be {wanted}")


@dataclass(frozen=True, slots=True)
class Bursts:
    """`bits` every `period` steps, ready through one backward pass, due `overlap` steps later."""

    bits: float
    period: float
    overlap: int
    step_s: float

    def utilisation(self, bits_per_s: float) -> float:
        """Compute / (compute + stall) once the queue on the link has settled."""
        ready_s = self.step_s * (FORWARD + (1 - FORWARD) / BUCKETS)  # the first bucket
        sent_s = self.bits / bits_per_s
        count = BURSTS + 2 * (int(self.overlap / self.period) + 1)
        arrived: list[float] = []
        free = stall = settled = 0.0
        judged = 0  # bursts whose deadline has passed; they are judged in order, as they are sent
        for burst in range(count):
            step = burst * self.period
            while (due := judged * self.period + self.overlap + 1) <= step:
                stall += max(0.0, arrived[judged] - (due * self.step_s + stall))
                judged += 1
            if burst == count // 2:
                settled = stall
            start = step * self.step_s + stall
            # Buckets are equal and evenly spaced: either the first or the last one holds it up.
            free = max(max(free, start + ready_s) + sent_s, start + self.step_s + sent_s / BUCKETS)
            arrived.append(free)
        compute = (count - 1 - count // 2) * self.period * self.step_s
        return compute / (compute + stall - settled)

    def needed(self, utilisation: float) -> float:
        """Least bits per second that reach `utilisation`; raises BadSetting where none does."""
        low, high = (GBIT * limit for limit in SEARCH_GBIT_PER_S)
        if self.utilisation(high) < utilisation:
            raise BadSetting(
                f"utilisation must be lower: no link up to {SEARCH_GBIT_PER_S[1]:.0e} Gbit/s "
                f"reaches {utilisation}"
            )
        while high / low > 1.0001:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self.utilisation(middle) >= utilisation else (middle, high)
        return high


def required(link: Link) -> dict[str, Any]:
    """Gbit/s per data center, each figure under the name of its reading."""
    return _decoupled(link) if link.method == "decoupled" else _all_reduced(link)


def on_link(link: Link, gbit_per_s: float) -> dict[str, Any]:
    """What a link of `gbit_per_s` each way makes of it: `utilisation_on_link`, `keeps_up`.

    keeps_up: everything that is due gets through (`link.utilisation` is not looked at). A Decoupled
    learner steps on where it does not, on older parameters; others only become slower.
    """
    _within("link_gbit_per_s", 0 < gbit_per_s < float("inf"), "a positive number")
    if link.method == "decoupled":
        fits = _decoupled(link)["gbit_per_s_shared_link"] <= gbit_per_s
        return {"utilisation_on_link": 1.0, "keeps_up": fits}
    bursts = _bursts(link)
    stepping = bursts.utilisation(gbit_per_s * GBIT) if bursts.bits else 1.0
    return {"utilisation_on_link": stepping, "keeps_up": True}


def _bursts(link: Link) -> Bursts:
    streaming = link.method == "streaming"
    period = {"dp": 1.0, "diloco": float(link.sync_every_steps)}
    bits = 2 * (1 - 1 / link.learners) * link.params * link.up_bits
    return Bursts(
        bits / link.fragments if streaming else bits,
        period.get(link.method, link.steps_per_fragment),
        link.overlap_steps if streaming else 0,
        link.step_s,
    )


def _all_reduced(link: Link) -> dict[str, Any]:
    bursts = _bursts(link)
    gbit = bursts.needed(link.utilisation) / GBIT if bursts.bits else 0.0
    return {
        "gbit_per_s": gbit,
        "gbit_per_s_shared_link": gbit,
        "reading": f"one FIFO link per data center, at {link.utilisation:.0%} compute utilisation",
    }


def _decoupled(link: Link) -> dict[str, Any]:
    # With no overlap allowed, what is handed out at a step boundary is due one step later.
    window_s = max(1, link.overlap_steps) * link.step_s
    every_s = link.steps_per_fragment * link.step_s
    values = link.params / link.fragments / GBIT
    up, down = values * link.up_bits, values * link.down_bits
    shared_s = min(window_s, every_s)
    fullest = values * link.down.fullest
    return {
        "gbit_per_s": max(up, down) / window_s,
        "gbit_per_s_up": up / window_s,
        "gbit_per_s_down": down / window_s,
        "gbit_per_s_both_directions": (up + down) / window_s,
        "gbit_per_s_keyframe": values * link.keyframe_bits / window_s
        if link.keyframe_every
        else 0.0,
        "gbit_per_s_average_up": up / every_s,
        "gbit_per_s_average_down": values * link.down.mean / every_s,
        "gbit_per_s_shared_link": max(up, fullest) / shared_s,
        "gbit_per_s_shared_link_both_directions": (up + fullest) / shared_s,
        "gbit_per_s_hub": link.learners * max(up, fullest) / shared_s,
        "reading": "gbit_per_s: what changed of one fragment in tau steps, per direction (transfer "
        "window); keyframe: a whole fragment in tau steps, down; average: over all versions; "
        "gbit_per_s_shared_link: all that is due while keyframes go out, one link; hub: M of those "
        "links",
    }
