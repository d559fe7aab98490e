"""From hardware, links and failures to a run's settings, each with its reason and what to expect.

Closed forms only: goodput_model.py for failures, bandwidth.py for links. Choices, in this order:

- *M*: fewest learners (a multiple of the data centers) that reach the goodput asked for: more
  learners lose less to failures, but cost quality.
- *H and codec*: the first of H = 24, 48, 96 and of bf16, int8, int4 that the links carry: a smaller
  codec costs less quality than a larger H.
- *P*: as many fragments as rounds can be told apart, for the smoothest load.
- *tau*: the least overlap, from the paper's 2 up, in which a round fits.
- *K* = 1 with a grace window, as in the paper: nobody waits for a learner that is down.
- *shards*: syncers until each one's memory, network and merging suffice.
"""

from dataclasses import asdict, dataclass
from math import ceil, log2, pow
from typing import Any, NamedTuple

from pydantic import Field

from diloco_shared.config import Spec
from diloco_simulator.bandwidth import CODEC_BITS, GBIT, Bursts
from diloco_simulator.goodput_model import YEAR_S, Failures, job_goodput, uptime

DAY_S = 86_400.0
GIB = float(1 << 30)
SYNC_EVERY = (24, 48, 96)  # H: 24 is the paper's; longer rounds drift further apart
CODECS = ("bf16", "int8", "int4")  # best first; e3m0 needs as many bits as int4
OVERLAPS = (2, 4)  # tau: 2 is the paper's; Streaming DiLoCo is robust below 5
OVERLAP_SHARE_MAX = 0.5  # of H: past it, rounds of one fragment would nearly meet
LEARNERS_MAX = 16  # more than the paper tried would be a guess
LOAD_MAX = 0.8  # of a link's bandwidth: bursts and repeats need the rest
KEYFRAME_EVERY, SNAPSHOT_EVERY = 16, 24  # versions and rounds: the defaults of a run
SMALLEST_FRAGMENT = 16_384  # values: below, a round's messages outweigh its payload
# Loss = A N ** alpha of DiLoCo at H = 30 and of data-parallel (Scaling Laws, 2503.09799).
LOSS = {1: (18.363, -0.0961), 2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
LOSS_DATA_PARALLEL = (18.129, -0.0953)
# What a syncer host runs out of, and the wish that says how much of it there is.
_LIMITED_BY = {
    "network": "hub_gbit_per_s",
    "memory": "syncer_memory_gib",
    "merging": "merge_values_per_s",
}


class Infeasible(ValueError):
    """No settings do: what is short, and by how much."""


class Wishes(Spec):
    """What there is, and what is wanted of it. All chips are alike."""

    params: float = Field(gt=0, le=1e14, description="N, parameters of the model.")
    chips: int = Field(ge=1, le=100_000_000, description="Accelerators in all.")
    tokens: float | None = Field(
        None, gt=0, le=1e18, description="To train on; 20 per parameter if left out."
    )
    centers: int = Field(2, ge=1, le=1024, description="Data centers, each with a link to the hub.")
    link_gbit_per_s: float = Field(
        5.0, gt=0, le=1e6, description="Of each data center, each way. 2 to 5 is the paper's."
    )
    round_trip_s: float = Field(0.06, ge=0, le=60, description="Between a data center and the hub.")
    hub_gbit_per_s: float = Field(
        25.0, gt=0, le=1e6, description="Of one syncer host's network, each way."
    )
    batch_tokens: float = Field(
        4e6, gt=0, le=1e12, description="Tokens per step of all learners together."
    )
    chip_flops: float = Field(4e14, gt=0, le=1e18, description="Peak of a chip, per second.")
    flops_share: float = Field(0.4, gt=0, le=1, description="Of the peak that training reaches.")
    step_s: float | None = Field(
        None, gt=0, le=86_400, description="Seconds of an inner step, where it was measured."
    )
    mtbi_years: float = Field(
        1.0, gt=0, le=1e6, description="Mean years between interruptions of a chip."
    )
    slice_chips: int = Field(256, ge=1, le=1_000_000, description="Chips that fail together.")
    goodput_min: float = Field(
        0.85, gt=0, lt=1, description="Learners are added until it is reached."
    )
    deadline_days: float | None = Field(None, gt=0, le=1e6, description="No later than this.")
    round_s_min: float = Field(
        0.25, gt=0, le=3600, description="Least time between rounds: messages and commits."
    )
    merge_values_per_s: float = Field(
        2e9,
        gt=0,
        le=1e15,
        description="Values of contributions that one syncer host merges: an assumption about tens "
        "of cores; bench/merge.py measures it.",
    )
    syncer_memory_gib: float = Field(256.0, gt=0, le=1e6, description="Of one syncer host.")

    @property
    def tokens_total(self) -> float:
        """Tokens of the whole run."""
        return 20 * self.params if self.tokens is None else self.tokens

    @property
    def seconds_per_step(self) -> float:
        """T: the same for any M, since learners share chips and batch alike."""
        if self.step_s is not None:
            return self.step_s
        return (
            6 * self.params * self.batch_tokens / (self.chips * self.chip_flops) / self.flops_share
        )

    @property
    def failures(self) -> Failures:
        """With the fitted times of goodput_model.py."""
        return Failures(mtbi_s=self.mtbi_years * YEAR_S, slice_chips=self.slice_chips)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is given."""

    learners: int  # M
    sync_every_steps: int  # H
    fragments: int  # P
    overlap_steps: int  # tau
    quorum: int  # K
    codec_up: str
    codec_down: str
    syncer_shards: int


class Traffic(NamedTuple):
    """Of one choice of H, P and codec; `share` is of a data center's link."""

    gbit_per_s: float
    share: float
    sync_s: float


def plan(wishes: Wishes) -> dict[str, Any]:
    """Settings, why, and predictions, JSON-ready; raises Infeasible with what is short."""
    learners, why_learners = _learners(wishes)
    settings, traffic, why = _exchange(wishes, learners)
    shards, hub, why_shards = _hub(wishes, settings)
    settings = Settings(**(asdict(settings) | {"syncer_shards": shards}))
    reasons = {
        "learners": why_learners,
        **why,
        "quorum": "the paper's: one learner suffices, a grace window waits for the others",
        "syncer_shards": why_shards,
    }
    predicted = _predicted(wishes, settings, traffic)
    return {
        "settings": asdict(settings),
        "reasons": reasons,
        "predicted": predicted,
        "hub": hub,
        "notes": _notes(wishes, settings, predicted),
        "algorithm": {
            "preset": "long",
            **{k: v for k, v in asdict(settings).items() if k not in ("learners", "syncer_shards")},
        },
    }


def sensitivity(wishes: Wishes) -> list[dict[str, Any]]:
    """The plan again with one wish halved or doubled at a time, and failures ten times as often."""
    changes: list[tuple[str, float]] = [
        (name, factor)
        for name in ("params", "link_gbit_per_s", "chips", "mtbi_years")
        for factor in (0.5, 2.0)
    ]
    rows = []
    for name, factor in [*changes, ("mtbi_years", 0.1), ("round_trip_s", 4.0)]:
        row: dict[str, Any] = {"changed": f"{name} x {factor:g}"}
        try:
            found = plan(_changed(wishes, name, factor))
        except ValueError as error:
            row["error"] = str(error).splitlines()[0]
        else:
            row |= {k: found["predicted"][k] for k in ("days", "goodput", "gbit_per_s_link")}
            row |= found["settings"]
        rows.append(row)
    return rows


def _changed(wishes: Wishes, name: str, factor: float) -> Wishes:
    """Only what is named changes: tokens stay, and a measured step time goes as the work does."""
    value = getattr(wishes, name) * factor
    changed = wishes.model_dump() | {"tokens": wishes.tokens_total}
    changed[name] = max(1, round(value)) if name == "chips" else value
    if wishes.step_s is not None and name in ("params", "chips"):
        changed["step_s"] = wishes.step_s * (factor if name == "params" else 1 / factor)
    return Wishes.model_validate(changed)


def _goodput(wishes: Wishes, learners: int) -> float:
    """Of M learners; one of a single slice cannot scale down, and stands until it is back."""
    chips = wishes.chips / learners
    return job_goodput(wishes.failures, chips, elastic=chips >= 2 * wishes.slice_chips)


def _learners(wishes: Wishes) -> tuple[int, str]:
    if wishes.centers > wishes.chips:
        raise Infeasible(f"chips must be at least one per data center ({wishes.centers})")
    most = max(LEARNERS_MAX, wishes.centers)
    able = [m for m in range(wishes.centers, most + 1, wishes.centers) if m <= wishes.chips]
    for learners in able:
        reached = _goodput(wishes, learners)
        if reached >= wishes.goodput_min:
            text = f"fewest that reach a goodput of {wishes.goodput_min:.0%} ({reached:.1%})"
            return learners, text
    best = max(able, key=lambda m: _goodput(wishes, m))
    text = f"none of up to {able[-1]} reaches {wishes.goodput_min:.0%}: the best one"
    return best, f"{text} ({_goodput(wishes, best):.1%})"


def _exchange(wishes: Wishes, learners: int) -> tuple[Settings, Traffic, dict[str, str]]:
    """H, codec, P and tau: the first that the links carry."""
    step_s = wishes.seconds_per_step
    tried = [
        (every, codec, fragments, _traffic(wishes, learners, every, fragments, codec))
        for every in SYNC_EVERY
        for fragments in [_fragments(wishes, every)]
        for codec in CODECS
    ]
    carried = [one for one in tried if one[3].share <= LOAD_MAX]
    if not carried:
        needed = min(traffic.gbit_per_s for *_, traffic in tried) / LOAD_MAX
        raise Infeasible(
            f"link_gbit_per_s must be at least {needed:.3g} (given {wishes.link_gbit_per_s:g}): "
            f"H = {SYNC_EVERY[-1]} with {CODECS[-1]} needs it"
        )
    # Beyond the usual overlaps (steps so short that the round trip counts), the least share of H.
    usual = [one for one in carried if one[3].sync_s <= OVERLAPS[-1] * step_s]
    every, codec, fragments, traffic = (
        usual[0] if usual else min(carried, key=lambda one: one[3].sync_s / one[0])
    )
    overlap = max(OVERLAPS[0], ceil(traffic.sync_s / step_s))
    if overlap > every * OVERLAP_SHARE_MAX:
        raise Infeasible(
            f"a round takes {traffic.sync_s:.2f} s, longer than {OVERLAP_SHARE_MAX:.0%} of H = "
            f"{every} steps of {step_s:.3g} s: a shorter round_trip_s, a faster link or a larger "
            "batch_tokens would help"
        )
    busy = f"the link is {traffic.share:.0%} busy, {LOAD_MAX:.0%} allowed"
    why = {
        "sync_every_steps": f"the shortest that the links carry: {busy}",
        "codec_up": "the most bits that the links carry at that H",
        "codec_down": "as up",
        "fragments": f"most of H at {wishes.round_s_min:g} s a round at least",
        "overlap_steps": f"a round takes {traffic.sync_s:.2f} s, a step {step_s:.3g} s",
    }
    return Settings(learners, every, fragments, overlap, 1, codec, codec, 1), traffic, why


def _fragments(wishes: Wishes, every: int) -> int:
    """The largest divisor of H whose rounds are neither too frequent nor too small."""
    for fragments in range(every, 1, -1):
        apart_s = every / fragments * wishes.seconds_per_step
        small = wishes.params / fragments < SMALLEST_FRAGMENT
        if every % fragments == 0 and apart_s >= wishes.round_s_min and not small:
            return fragments
    return 1


def _traffic(wishes: Wishes, learners: int, every: int, fragments: int, codec: str) -> Traffic:
    """Learners of a data center share its link: their transfers of a round run side by side."""
    beside = learners // wishes.centers
    fragment_gbit = wishes.params / fragments * CODEC_BITS[codec] / GBIT
    gbit = beside * fragment_gbit * fragments / (every * wishes.seconds_per_step)
    transfer_s = beside * fragment_gbit / (LOAD_MAX * wishes.link_gbit_per_s)
    merge_s = learners * wishes.params / fragments / wishes.merge_values_per_s
    # Pull and contribution, then the publication: a round trip and a half, rounded up.
    sync_s = 2 * transfer_s + merge_s + 2 * wishes.round_trip_s
    return Traffic(gbit, gbit / wishes.link_gbit_per_s, sync_s)


def _hub(wishes: Wishes, s: Settings) -> tuple[int, dict[str, float], str]:
    """Syncer shards, what the hub must carry and hold, and what decided."""
    n, bits = wishes.params, CODEC_BITS[s.codec_up]
    round_bytes = s.learners * n / s.fragments * bits / 8
    in_flight = max(1, ceil(s.overlap_steps * s.fragments / s.sync_every_steps))
    values_per_s = s.learners * n / (s.sync_every_steps * wishes.seconds_per_step)
    # Master, anchor, its history and momentum in 4 bytes each, and encoded contributions.
    memory_gib = (16 * n + in_flight * round_bytes) / GIB
    # Contributions up to a snapshot; a keyframe and the deltas after it; one joiner's moments.
    kept = SNAPSHOT_EVERY * round_bytes + n * (4 + KEYFRAME_EVERY * bits / 8) + 8 * n
    needs = {
        "network": values_per_s * bits / GBIT / (LOAD_MAX * wishes.hub_gbit_per_s),
        "memory": memory_gib / wishes.syncer_memory_gib,
        "merging": values_per_s / wishes.merge_values_per_s,
    }
    most = max(needs, key=lambda need: needs[need])
    shards = max(1, ceil(needs[most]))
    if shards > s.fragments:
        raise Infeasible(
            f"{shards} syncers are needed, but {s.fragments} fragments employ no more: a larger "
            f"{_LIMITED_BY[most]} would help"
        )
    hub = {
        "gbit_per_s_each_way": values_per_s * bits / GBIT,
        "memory_gib": memory_gib,
        "disk_gib": kept / GIB,
    }
    return shards, hub, f"{most} decides: {needs[most]:.2g} of what one host has"


def _predicted(wishes: Wishes, s: Settings, traffic: Traffic) -> dict[str, float]:
    """Of the run under these settings, and of data-parallel training on the same hardware."""
    step_s, steps = wishes.seconds_per_step, wishes.tokens_total / wishes.batch_tokens
    goodput = _goodput(wishes, s.learners)
    # One island per data center; inside it gradients travel for nothing.
    bits = 2 * (1 - 1 / wishes.centers) * wishes.params * CODEC_BITS["bf16"]
    waits = Bursts(bits, 1, 0, step_s).utilisation(wishes.link_gbit_per_s * GBIT)
    synchronous = waits * _goodput(wishes, 1)
    days = steps * step_s / DAY_S
    slack_s = s.overlap_steps * step_s - traffic.sync_s
    return {
        "days": days / goodput,
        "goodput": goodput,
        "uptime": uptime(goodput, s.learners),
        "step_s": step_s,
        "steps": steps,
        "gbit_per_s_link": traffic.gbit_per_s,
        "link_load": traffic.share,
        "round_s": traffic.sync_s,
        "staleness_steps": float(ceil(traffic.sync_s / step_s)),
        "grace_s": min(max(0.8 * slack_s, 0.0), step_s),
        "loss_gap": loss_gap(wishes.params, s.learners),
        "days_data_parallel": days / synchronous,
        "utilisation_data_parallel": waits,
        "times_faster_than_data_parallel": goodput / synchronous,
    }


def loss_gap(params: float, learners: int) -> float:
    """Relative loss above data-parallel at equal tokens, by published fits of DiLoCo at H = 30.

    Between the fitted M = 1, 2, 4, 8, and beyond 8, a straight line over log2 M.
    """
    ideal, power = LOSS_DATA_PARALLEL
    gaps = {m: a / ideal * pow(params, alpha - power) - 1 for m, (a, alpha) in LOSS.items()}
    low = max(m for m in (1, 2, 4) if m <= max(1, learners))
    place = log2(learners / low)
    return gaps[low] + place * (gaps[2 * low] - gaps[low])


def _notes(wishes: Wishes, s: Settings, predicted: dict[str, float]) -> list[str]:
    """What a reader should know before trusting the plan."""
    notes = []
    limit, days = wishes.deadline_days, predicted["days"]
    if limit is not None and days > limit:
        notes.append(
            f"takes {days:.1f} days, {limit:g} were wanted: about {days / limit:.2g} times the "
            "chips would do, if the links carry the shorter steps"
        )
    if s.learners > max(LOSS):
        notes.append(f"no published fit of the loss goes beyond {max(LOSS)} learners: extrapolated")
    if not 3.5e7 <= wishes.params <= 1e10:
        notes.append("the fits of the loss are of models from 35M to 10B: extrapolated")
    if s.overlap_steps > OVERLAPS[-1]:
        notes.append(f"an overlap above {OVERLAPS[-1]} steps is untried: a round outlasts them")
    if s.fragments == 1:
        notes.append("one fragment: rounds or fragments would otherwise be too small")
    if wishes.step_s is None:
        notes.append("the step time follows from 6 N flops a token: measure it, and give step_s")
    return notes
