"""What is refused, and why (invariant I11): bad input changes nothing and is counted."""

from collections import Counter
from dataclasses import dataclass

from diloco_shared.protocol.messages import COUNT_MAX, ContributionManifest, Progress
from diloco_syncer.events import ContributionSeen, Effect, Malformed, Tell
from diloco_syncer.history.history import History
from diloco_syncer.rounds.round import Round

# Times that a learner may say a data shard was read to its end: one that takes a second was read
# so often in 30,000 years. What is made of it, one more among them, has room in a message.
PASSES_MAX = 1 << 40
# Seconds that an inner step may take, by the learner's own report. A step of a large model takes a
# minute; rounds wait for several, and a wait of many times as long as there are numbers is none.
STEP_S_MAX = 86_400.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """`kind` is counted, `reason` is for people."""

    kind: str
    reason: str


# Each: whether it is so, the kind of fault, and what is wrong.
Checks = tuple[tuple[bool, str, str], ...]


def judge(
    event: ContributionSeen, r: Round, h: History, step_max: int = COUNT_MAX
) -> Refusal | None:
    """The first fault of a participant's contribution to a round that is pulled now, or None.

    `step_max`: the step that this life may have reached, by its own reports. Norm outliers are
    judged per round.
    """
    m, head, per_step = event.manifest, h.versions[r.fragment], h.spec.tokens_per_step
    incarnation, codec_up = r.participants[m.learner], h.spec.algorithm.codec_up
    merged_to = h.ledger.settled_to(m.learner, incarnation, r.fragment)
    steps, tokens = m.step_to - m.step_from, m.tokens_to - m.tokens_from
    passes = _passes(m)
    checks: Checks = (
        (m.config_hash != h.config_hash, "config", "made under another configuration"),
        (m.epoch != h.epoch, "epoch", f"of epoch {m.epoch}, the run is in {h.epoch}"),
        (m.term != h.term, "term", f"of term {m.term}, the leader's is {h.term}"),
        (
            m.incarnation != incarnation,
            "incarnation",
            f"of incarnation {m.incarnation}, the newest is {incarnation}",
        ),
        (
            m.fragment != r.fragment,
            "malformed",
            f"fragment {m.fragment} in a round of fragment {r.fragment}",
        ),
        (
            m.values != h.sizes_P[r.fragment],
            "malformed",
            f"{m.values} values, the fragment has {h.sizes_P[r.fragment]}",
        ),
        (m.codec != codec_up, "malformed", f"codec {m.codec[:20]}, the run's is {codec_up}"),
        *_of_base(m.base, head, h.began_P[r.fragment], h.spec.algorithm.staleness_max),
        (steps < 1, "malformed", f"{steps} steps"),
        (
            tokens < 1 or tokens > steps * per_step,
            "tokens",
            f"claims {tokens} tokens in {steps} steps of at most {per_step}",
        ),
        (
            m.tokens_to > m.step_to * per_step,
            "tokens",
            f"claims {m.tokens_to} tokens in a life of {m.step_to} steps",
        ),
        (
            # It adopted the head after all that is merged in it.
            m.base == head and m.tokens_from < merged_to,
            "counters",
            f"begins at token {m.tokens_from}, though {merged_to} of its life are settled",
        ),
        (
            m.step_to > step_max,
            "counters",
            f"ends at step {m.step_to}, though by its own reports it is at {step_max} at most",
        ),
        (
            passes > PASSES_MAX,
            "counters",
            f"has read a data shard {passes} times, and {PASSES_MAX} is the most",
        ),
        (not event.finite, "non-finite", "has values that are not finite"),
        (not event.norm >= 0.0, "non-finite", "has no norm"),
    )
    for bad, kind, reason in checks:
        if bad:
            return Refusal(kind, reason)
    return None


def _of_base(base: int, head: int, first: int, behind_max: int) -> Checks:
    """Of the version that it is measured against; `first` is the one that the fragment began with.

    One behind the first is not too old by its number, but nobody has it, nor ever had.
    """
    behind = head - base
    return (
        (behind < 0, "ahead", f"based on version {base}, the head is {head}"),
        (behind > behind_max, "stale", f"based on a version {behind} behind"),
        (base < first, "stale", f"based on version {base}, though the first one is {first}"),
    )


def _passes(manifest: ContributionManifest) -> int:
    """The most that it says of any data shard."""
    if (cursor := manifest.cursor) is None:
        return 0
    return max([cursor.passes, *(passes for _, passes in cursor.finished)])


def impossible(progress: Progress, fragments: int, tokens_per_step: int) -> str:
    """What no learner can report of itself; "" if it may be so."""
    p = progress
    if any(len(of_P) != fragments for of_P in (p.c_steps, p.c_tokens, p.adopted)):
        return "progress of another layout"
    if max(p.c_steps, default=0) > p.step:
        return "more steps than it has taken"
    if max(p.c_tokens, default=0) > p.tokens:
        return "more tokens than it has done"
    if p.tokens > p.step * tokens_per_step:
        return f"{p.tokens} tokens in a life of {p.step} steps"
    if p.step_s > STEP_S_MAX:
        return f"steps of {p.step_s:.3g} s"
    return ""


# --------------------------------------------------------------------------------------------------
# Input that changed nothing, counted by kind and told (invariant I11).


# Why a contribution was refused that belongs to no round of now, by the kind that is counted.
WHY_REFUSED = {
    "late": "as late",
    "second": "since the round has one of this learner already",
    "uninvited": "since nobody had asked for it",
    "epoch": "since it is of another epoch",
    "term": "since it answers another leader",
    "incarnation": "since another life of this learner was asked",
}


class Refusals(Counter[str]):
    """At the door of one leader's term; the tape counts those in rounds."""

    def tell(self, kind: str, what: str) -> list[Effect]:
        """Count one ("" for none), and say `what` was refused, in a sentence. Told at powers of
        two: bad input must not flood the events."""
        if not kind:
            return []
        self[kind] += 1
        count = self[kind]
        if count & (count - 1):
            return []
        times = "the first so far" if count == 1 else f"{count} such refusals so far"
        return [Tell("refused", f"{what} ({times})", {"kind": kind})]

    def contribution(self, kind: str, learner: str) -> list[Effect]:
        """One that was not looked into ("" for one that was)."""
        why = WHY_REFUSED.get(kind, f"as {kind}")
        return self.tell(kind, f"a contribution of {learner} was refused {why}")

    def message(self, bad: Malformed) -> list[Effect]:
        """One that could not be read, or is not what it says. Its source is a learner, whose name
        has no dots, or a subject."""
        what = f"a message on {bad.source}" if "." in bad.source else f"what {bad.source} sent"
        return self.tell(bad.kind, f"{what} was refused as {bad.kind}: {bad.reason}")
