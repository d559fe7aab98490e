"""From hardware, links and failures to a run's settings, each with its reason and what to expect.

Closed forms only: goodput_model.py for failures, bandwidth.py for links. Choices, in this order:

- *M*: fewest learners (a multiple of the data centers) that reach the goodput asked for: more
  learners lose less to failures, but cost quality.
- *H and codec*: the first of H = 24, 48, 96 and of bf16, int8, int4 that the links carry while
  keyframes go out: a smaller codec costs less quality than a larger H.
- *keyframes*: the usual ones, or rarer ones where the links carry a codec only with these.
- *P*: as many fragments as rounds can be told apart, for the smoothest load.
- *tau*: the least overlap, from the paper's 2 up, in which a round fits; up to 4 one with a
  keyframe, too.
- *K* = 1 with a grace window, as in the paper: nobody waits for a learner that is down.
- *shards*: syncers until each one's memory, network, disk and processors suffice, by the laws that
  were measured (hub_model.py).
- *snapshots*: as often as a syncer's disk carries: a smaller interval leaves a restart less to
  execute, and the message server less to keep.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil, log2, pow
from typing import Any, NamedTuple

from diloco_planner import hub_model
from diloco_planner.bandwidth import (
    CODEC_BITS,
    GBIT,
    KEYFRAME_CODEC,
    KEYFRAME_EVERY,
    Bursts,
    Published,
)
from diloco_planner.goodput_model import job_goodput, uptime
from diloco_planner.plan_request import PlanRequest
from diloco_shared.budget import assumed, streams
from diloco_shared.budget.memory import disks, processes, snapshots_per_step, written_per_round
from diloco_shared.protocol.subjects import STREAM_KINDS
from diloco_shared.spec.algorithm import SHARDS_MAX, STEPS_MAX, Algorithm
from diloco_shared.spec.mesh import MeshSizes
from diloco_shared.spec.run import Keeping, RunSpec

DAY_S = 86_400.0
GIB, GB = float(1 << 30), hub_model.GB
SYNC_EVERY = (24, 48, 96)  # H: 24 is the paper's; longer rounds drift further apart
# Codecs, best first (others of four bits need as many as int4), and versions between keyframes,
# best first. Whoever joins reads as many versions, so there may be more of them where they have
# fewer bits: with each codec a newcomer reads up to 8.5 to 9 times the parameters in fp32.
KEYFRAMES_EVERY = {
    "bf16": (KEYFRAME_EVERY,),
    "int8": (KEYFRAME_EVERY, 2 * KEYFRAME_EVERY),
    "int4": (KEYFRAME_EVERY, 2 * KEYFRAME_EVERY, 4 * KEYFRAME_EVERY),
}
CODECS = tuple(KEYFRAMES_EVERY)
OVERLAPS = (2, 4)  # tau: 2 is the paper's; Streaming DiLoCo is robust below 5
OVERLAP_SHARE_MAX = 0.5  # of H: past it, rounds of one fragment would nearly meet
LEARNERS_MAX = 16  # more than the paper tried would be a guess
LOAD_MAX = 0.8  # of a link's bandwidth: bursts and repeats need the rest
# Of a run's grace window, which a plan leaves as they are.
GRACE_FACTOR: float = Algorithm.model_fields["grace_factor"].default
GRACE_S_MAX: float = Algorithm.model_fields["grace_s_max"].default
# Rounds between two snapshots, as a run has them by itself; and, where a disk does not carry these,
# how often every fragment is merged in between. Beyond 16 times a syncer writes little less, for
# each round writes an anchor in any case, while a restart has as many rounds more to execute.
SNAPSHOT_EVERY: int = Keeping.model_fields["snapshot_every_rounds"].default
SNAPSHOT_TURNS = (2, 4, 8, 16)
SMALLEST_FRAGMENT = 16_384  # values: below, a round's messages outweigh its payload
# Loss = A N ** alpha of DiLoCo at H = 30 and of data-parallel (Scaling Laws, 2503.09799).
LOSS = {1: (18.363, -0.0961), 2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
LOSS_DATA_PARALLEL = (18.129, -0.0953)
# What a syncer host runs out of, and the wish that says how much of it there is.
_LIMITED_BY = {
    "network": "hub_gbit_per_s",
    "memory": "syncer_memory_gib",
    "merging": "syncer_cores",
    "one thread": "batch_tokens",
    "disk": "syncer_disk_gb_per_s",
}


# Settings that the table [algorithm] of a run does not have, or calls otherwise.
_ELSEWHERE = ("learners", "syncer_shards", "snapshot_every_rounds")


class Infeasible(ValueError):
    """No settings do: what is short, and by how much."""


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
    syncer_shards: int = 1
    keyframe_every: int = KEYFRAME_EVERY
    keyframe_codec: str = KEYFRAME_CODEC
    snapshot_every_rounds: int = SNAPSHOT_EVERY

    @property
    def up_bits(self) -> float:
        """Per value of a contribution."""
        return CODEC_BITS[self.codec_up]

    @property
    def down(self) -> Published:
        """Of publications, of which one in `keyframe_every` is whole parameters."""
        bits = CODEC_BITS[self.codec_down], CODEC_BITS[self.keyframe_codec]
        return Published(*bits, self.keyframe_every, self.fragments)

    @property
    def in_flight(self) -> int:
        """D: rounds at a time."""
        return max(1, ceil(self.overlap_steps * self.fragments / self.sync_every_steps))


class PlannedTraffic(NamedTuple):
    """Of one choice of H, P and codec, on a data center's link, the busier way.

    `share` is of the link in the fullest turns, those with keyframes. One that carried the mean
    alone would fall behind in these.
    """

    gbit_per_s: float  # on average
    gbit_per_s_fullest: float
    share: float
    sync_s: float  # of a round
    keyframe_s: float  # of one that publishes a keyframe


def plan(request: PlanRequest) -> dict[str, Any]:
    """Settings, why, and predictions, JSON-ready; raises Infeasible with what is short."""
    learners, why_learners = _learners(request)
    settings, why = _exchange(request, learners)
    settings, why_shards = _sharded(request, settings)
    settings, why_snapshots = _snapshots(request, settings)
    reasons = {
        "learners": why_learners,
        **why,
        "quorum": "the paper's: one learner suffices, a grace window waits for the others",
        "syncer_shards": why_shards,
        "snapshot_every_rounds": why_snapshots,
    }
    predicted = predict(request, settings)
    algorithm = {
        "preset": "long",
        "shards": settings.syncer_shards,
        **{k: v for k, v in asdict(settings).items() if k not in _ELSEWHERE},
    }
    budget = _budget(request, settings, algorithm, predicted["steps"])
    hub = _hub(request, settings, GB * sum(budget[f"stream_{kind}"] for kind in STREAM_KINDS))
    return {
        "settings": asdict(settings),
        "reasons": reasons,
        "predicted": predicted,
        "hub": hub,
        "notes": _notes(request, settings, predicted, hub),
        "budget_gb": budget,
        "algorithm": algorithm,
    }


def sensitivity(request: PlanRequest) -> list[dict[str, Any]]:
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
            found = plan(_changed(request, name, factor))
        except ValueError as error:
            row["error"] = str(error).splitlines()[0]
        else:
            row |= {k: found["predicted"][k] for k in ("days", "goodput", "gbit_per_s_link")}
            row |= found["settings"]
        rows.append(row)
    return rows


def _changed(request: PlanRequest, name: str, factor: float) -> PlanRequest:
    """Only what is named changes: tokens stay, and a measured step time goes as the work does."""
    value = getattr(request, name) * factor
    changed = request.model_dump() | {"tokens": request.tokens_total}
    changed[name] = max(1, round(value)) if name == "chips" else value
    if request.step_s is not None and name in ("params", "chips"):
        changed["step_s"] = request.step_s * (factor if name == "params" else 1 / factor)
    return PlanRequest.model_validate(changed)


def _goodput(request: PlanRequest, learners: int) -> float:
    """Of M learners; one of a single slice cannot scale down, and stands until it is back."""
    chips = request.chips / learners
    return job_goodput(request.failures, chips, elastic=chips >= 2 * request.slice_chips)


def _learners(request: PlanRequest) -> tuple[int, str]:
    if request.centers > request.chips:
        raise Infeasible(f"chips must be at least one per data center ({request.centers})")
    most = max(LEARNERS_MAX, request.centers)
    able = [m for m in range(request.centers, most + 1, request.centers) if m <= request.chips]
    for learners in able:
        reached = _goodput(request, learners)
        if reached >= request.goodput_min:
            text = f"fewest that reach a goodput of {request.goodput_min:.0%} ({reached:.1%})"
            return learners, text
    best = max(able, key=lambda m: _goodput(request, m))
    text = f"none of up to {able[-1]} reaches {request.goodput_min:.0%}: the best one"
    return best, f"{text} ({_goodput(request, best):.1%})"


def _exchange(request: PlanRequest, learners: int) -> tuple[Settings, dict[str, str]]:
    """H, codec, keyframes, P and tau: the first that the links carry."""
    step_s = request.seconds_per_step
    tried = [(found, _traffic(request, found)) for found in _choices(request, learners)]
    carried = [one for one in tried if one[1].share <= LOAD_MAX]
    if not carried:
        needed = min(traffic.gbit_per_s_fullest for _, traffic in tried) / LOAD_MAX
        raise Infeasible(
            f"link_gbit_per_s must be at least {needed:.3g} (given {request.link_gbit_per_s:g}): "
            f"H = {SYNC_EVERY[-1]} with {CODECS[-1]} needs it while keyframes go out"
        )
    # Beyond the usual overlaps (steps so short that the round trip counts), the least share of H.
    usual = [one for one in carried if one[1].sync_s <= OVERLAPS[-1] * step_s]
    found, traffic = (
        usual[0] if usual else min(carried, key=lambda one: one[1].sync_s / one[0].sync_every_steps)
    )
    overlap = max(OVERLAPS[0], ceil(traffic.sync_s / step_s))
    if overlap > found.sync_every_steps * OVERLAP_SHARE_MAX:
        raise Infeasible(
            f"a round takes {traffic.sync_s:.2f} s, longer than {OVERLAP_SHARE_MAX:.0%} of H = "
            f"{found.sync_every_steps} steps of {step_s:.3g} s: a shorter round_trip_s, a faster "
            "link, more syncer_cores or a larger batch_tokens would help"
        )
    # No more for keyframes alone: nobody waits for one that comes later, but a round waits longer
    # for stragglers the larger the overlap is.
    overlap = max(overlap, min(ceil(traffic.keyframe_s / step_s), OVERLAPS[-1]))
    busy = f"the link is {traffic.share:.0%} busy while keyframes go out, {LOAD_MAX:.0%} allowed"
    seldom = found.keyframe_every != KEYFRAME_EVERY
    why = {
        "sync_every_steps": f"the shortest that the links carry: {busy}",
        "codec_up": "the most bits that the links carry at that H",
        "codec_down": "as up",
        "fragments": f"most of H at {request.round_s_min:g} s a round at least",
        "overlap_steps": f"a round takes {traffic.sync_s:.2f} s, one with a keyframe "
        f"{traffic.keyframe_s:.2f} s, a step {step_s:.3g} s",
        "keyframe_every": "so seldom that the link carries them: who joins reads up to "
        f"{found.keyframe_every - 1} versions"
        if seldom
        else "the default: what somebody who joins must read",
        "keyframe_codec": "the default: exact",
    }
    return replace(found, overlap_steps=overlap), why


def _choices(request: PlanRequest, learners: int) -> Iterator[Settings]:
    """Of H, codec and keyframes, best first."""
    for every in SYNC_EVERY:
        fragments = _fragments(request, every)
        for codec, often in KEYFRAMES_EVERY.items():
            usual = Settings(learners, every, fragments, OVERLAPS[0], 1, codec, codec)
            yield from (replace(usual, keyframe_every=keyframes) for keyframes in often)


def _fragments(request: PlanRequest, every: int) -> int:
    """The largest divisor of H whose rounds are neither too frequent nor too small."""
    for fragments in range(every, 1, -1):
        apart_s = every / fragments * request.seconds_per_step
        small = request.params / fragments < SMALLEST_FRAGMENT
        if every % fragments == 0 and apart_s >= request.round_s_min and not small:
            return fragments
    return 1


def _traffic(request: PlanRequest, s: Settings) -> PlannedTraffic:
    """Learners of a data center share its link: their transfers of a round run side by side."""
    beside = ceil(s.learners / request.centers)
    values = request.params / s.fragments
    every_s = s.sync_every_steps * request.seconds_per_step
    mean, fullest = (
        beside * request.params * max(s.up_bits, down_bits) / GBIT / every_s
        for down_bits in (s.down.mean, s.down.fullest)
    )
    link = LOAD_MAX * request.link_gbit_per_s
    up_s, down_s, keyframe_s = (
        beside * values * CODEC_BITS[codec] / GBIT / link
        for codec in (s.codec_up, s.codec_down, s.keyframe_codec)
    )
    merge_s = hub_model.merge_s(s.learners, values, s.codec_up) / request.syncer_cores
    # Pull and contribution, then the publication: a round trip and a half, rounded up.
    before_s = up_s + merge_s + 2 * request.round_trip_s
    share = fullest / request.link_gbit_per_s
    return PlannedTraffic(mean, fullest, share, before_s + down_s, before_s + keyframe_s)


def _sharded(request: PlanRequest, s: Settings) -> tuple[Settings, str]:
    """With the fewest syncer shards of which each one's host has enough."""
    possible = [n for n in range(1, min(s.fragments, SHARDS_MAX) + 1) if s.fragments % n == 0]
    for shards in possible:
        needs = _needs(request, s, shards)
        most = max(needs, key=lambda need: needs[need])
        if needs[most] <= 1:
            text = f"{most} decides: {needs[most]:.2g} of what one host of {shards} has"
            return replace(s, syncer_shards=shards), text
    raise Infeasible(
        f"{possible[-1]} syncers for {s.fragments} fragments are not enough: a larger "
        f"{_LIMITED_BY[most]} would help"
    )


def _snapshots(request: PlanRequest, s: Settings) -> tuple[Settings, str]:
    """With the shortest interval of snapshots that a syncer's disk carries."""
    shards, most = s.syncer_shards, request.syncer_disk_gb_per_s
    tried = [(every, _written_s(request, s, shards, every)) for every in _intervals(s, shards)]
    # The longest does: there are as many shards as it takes.
    every, rate = next((one for one in tried if one[1] <= most), tried[-1])
    carried = f"a syncer's disk writes {rate:.3g} GB/s, {most:.3g} allowed"
    why = "the default" if every == SNAPSHOT_EVERY else "the shortest that the disk carries"
    return replace(s, snapshot_every_rounds=every), f"{why}: {carried}"


def _intervals(s: Settings, shards: int) -> list[int]:
    """Rounds of a shard between two snapshots, the shortest first."""
    turns = (turns * s.fragments // shards for turns in SNAPSHOT_TURNS)
    return [SNAPSHOT_EVERY, *(every for every in turns if every > SNAPSHOT_EVERY)]


def _written_s(request: PlanRequest, s: Settings, shards: int, every: int) -> float:
    """GB that each of so many syncers writes to its disk a second, on average."""
    values, owned = request.params / s.fragments, s.fragments // shards
    a_round = written_per_round(values, hub_model.STATE_BYTES, owned, every)
    return a_round * owned / (s.sync_every_steps * request.seconds_per_step) / GB


def _needs(request: PlanRequest, s: Settings, shards: int) -> dict[str, float]:
    """Of one shard's host, each as a share of what it may be used for."""
    written_s = _written_s(request, s, shards, _intervals(s, shards)[-1])
    step_s, values = request.seconds_per_step, request.params / s.fragments
    rounds_per_s = s.fragments / (s.sync_every_steps * step_s) / shards
    up_bits = s.learners * s.up_bits
    round_bits = values * max(up_bits, s.down.mean)
    fullest_bits = values * max(up_bits, s.down.fullest)
    merge_s = hub_model.merge_s(s.learners, values, s.codec_up)
    moved_s = hub_model.moved_s(round_bits / 8)
    held = hub_model.memory_bytes(
        request.params / shards, values, s.learners, s.up_bits / 8, ceil(s.in_flight / shards)
    )
    # What one thread does: it hears everybody and decides. Others fetch, merge and publish.
    thread_s = hub_model.report_s(s.learners, s.fragments) / step_s
    thread_s += hub_model.decision_s(s.learners) * rounds_per_s
    work_s = (merge_s + moved_s) * rounds_per_s + thread_s
    return {
        "network": fullest_bits * rounds_per_s / GBIT / (LOAD_MAX * request.hub_gbit_per_s),
        "memory": held / GIB / request.syncer_memory_gib,
        "merging": work_s / (LOAD_MAX * request.syncer_cores),
        "one thread": thread_s / LOAD_MAX,
        "disk": written_s / request.syncer_disk_gb_per_s,
    }


def _hub(request: PlanRequest, s: Settings, streams_bytes: float) -> dict[str, float]:
    """What the syncers and the message server must carry and hold, all together."""
    n, every_s = request.params, s.sync_every_steps * request.seconds_per_step
    bits = (s.up_bits, s.down.mean, s.down.fullest)
    up, down, fullest = (each / 8 * n / every_s for each in bits)  # of one learner
    stored, given = s.learners * up + down, s.learners * (up + down)
    merge_s = hub_model.merge_s(s.learners, n / s.fragments, s.codec_up) * s.fragments / every_s
    held = hub_model.memory_bytes(n, n / s.fragments, s.learners, s.up_bits / 8, s.in_flight)
    return {
        "gbit_per_s_each_way": s.learners * max(up, fullest) * 8 / GBIT,
        "memory_gib": held / GIB,
        "disk_gib": streams_bytes / GIB,
        "merging_cores": merge_s,
        "server_stores_gb_per_s": stored / GB,
        "server_cores": hub_model.server_s(stored, given),
    }


def _budget(
    request: PlanRequest, s: Settings, algorithm: dict[str, Any], steps: float
) -> dict[str, float]:
    """Of `diloco budget` for such a run: what streams, processes and syncers' disks need, in GB.

    All devices of a learner share its state.
    """
    spec = RunSpec.model_validate(
        {
            "name": "planned",
            "model": {"factory": "planned:model"},
            "algorithm": algorithm,
            "keeping": {"snapshot_every_rounds": s.snapshot_every_rounds},
            "membership": {"learners_max": s.learners},
            "budget": {"steps": min(max(ceil(steps), 1), STEPS_MAX)},
        }
    )
    job = assumed(spec, learners=s.learners, parameters=ceil(request.params))
    needs = {f"stream_{kind}": need for kind, need in streams(job).items()}
    of_each = processes(job, MeshSizes(fsdp=request.chips // s.learners))
    memory = {f"memory_{name.replace(' ', '_')}": need for name, need in of_each.items()}
    disk = {"disk_syncer": disks(job)["syncer"]}
    found = {name: need.bytes / GB for name, need in (needs | memory | disk).items()}
    written_s = snapshots_per_step(job) / request.seconds_per_step
    return found | {"disk_syncer_gb_per_s": written_s / GB}


def predict(request: PlanRequest, s: Settings) -> dict[str, float]:
    """What a run under these settings comes to, and data-parallel training on the same hardware."""
    traffic = _traffic(request, s)
    step_s, steps = request.seconds_per_step, request.tokens_total / request.batch_tokens
    goodput = _goodput(request, s.learners)
    # One island per data center; inside it gradients travel for nothing.
    bits = 2 * (1 - 1 / request.centers) * request.params * CODEC_BITS["bf16"]
    waits = Bursts(bits, 1, 0, step_s).utilisation(request.link_gbit_per_s * GBIT)
    synchronous = waits * _goodput(request, 1)
    days = steps * step_s / DAY_S
    slack_s = s.overlap_steps * step_s - traffic.sync_s
    per_step = request.params / s.sync_every_steps / 8
    return {
        "days": days / goodput,
        "goodput": goodput,
        "uptime": uptime(goodput, s.learners),
        "step_s": step_s,
        "steps": steps,
        "rounds": steps * s.fragments / s.sync_every_steps,
        "gbit_per_s_link": traffic.gbit_per_s,
        "gbit_per_s_link_keyframes": traffic.gbit_per_s_fullest,
        "link_load": traffic.share,
        "bytes_up_per_step": per_step * s.up_bits,
        "bytes_down_per_step": per_step * s.down.mean,
        "round_s": traffic.sync_s,
        "keyframe_round_s": traffic.keyframe_s,
        "staleness_steps": float(ceil(traffic.sync_s / step_s)),
        "grace_s": min(max(GRACE_FACTOR * slack_s, 0.0), GRACE_S_MAX),
        "loss_gap": loss_gap(request.params, s.learners),
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


def _notes(
    request: PlanRequest, s: Settings, predicted: dict[str, float], hub: dict[str, float]
) -> list[str]:
    """What a reader should know before trusting the plan."""
    notes = []
    limit, days = request.deadline_days, predicted["days"]
    if limit is not None and days > limit:
        notes.append(
            f"takes {days:.1f} days, {limit:g} were wanted: about {days / limit:.2g} times the "
            "chips would do, if the links carry the shorter steps"
        )
    if s.learners > max(LOSS):
        notes.append(f"no published fit of the loss goes beyond {max(LOSS)} learners: extrapolated")
    if not 3.5e7 <= request.params <= 1e10:
        notes.append("the fits of the loss are of models from 35M to 10B: extrapolated")
    if s.overlap_steps > OVERLAPS[-1]:
        notes.append(f"an overlap above {OVERLAPS[-1]} steps is untried: a round outlasts them")
    late = ceil(predicted["keyframe_round_s"] / predicted["step_s"]) - s.overlap_steps
    if late > 0:
        steps = "a step" if late == 1 else f"{late} steps"
        notes.append(
            f"a round with a keyframe outlasts the overlap by {steps}: learners take that up so "
            "much later"
        )
    if s.fragments == 1:
        notes.append("one fragment: rounds or fragments would otherwise be too small")
    if hub["server_stores_gb_per_s"] > hub_model.STORED_GB_PER_S:
        notes.append(
            f"the message server is to store {hub['server_stores_gb_per_s']:.2g} GB/s; shards do "
            f"not relieve it, and {hub_model.STORED_GB_PER_S:g} GB/s is what two cores were seen "
            "to do: measure yours (bench/scale.py)"
        )
    if request.step_s is None:
        notes.append("the step time follows from 6 N flops a token: measure it, and give step_s")
    return notes
