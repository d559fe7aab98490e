"""What is refused, and why (invariant I11): bad input changes nothing and is counted."""

from collections import Counter
from dataclasses import dataclass

from diloco_shared.protocol.messages import COUNT_MAX, ContributionManifest, Progress
from diloco_syncer.events import Effect, Tell
from diloco_syncer.history.history import History

# Times that a learner may say a data shard was read to its end: one that takes a second was read
# so often in 30,000 years. What is made of it, one more among them, has room in a message.
PASSES_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class Refusal:
    """`kind` is counted, `reason` is for people."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What a contribution to an open round must be."""

    config_hash: str
    epoch: int
    term: int
    incarnation: int
    fragment: int
    version: int  # head of the fragment
    staleness_max: int
    values: int
    codec: str
    tokens_per_step: int
    merged_to: int = 0  # tokens of this life up to which all of the fragment's fate is settled
    step_max: int = COUNT_MAX  # the step that it may have reached, by its own reports


def expecting(
    h: History, fragment: int, learner: str, incarnation: int, step_max: int = COUNT_MAX
) -> Expected:
    """Of a participant in a round of `fragment` that is pulled now."""
    life = h.ledger.lives.get(learner, {}).get(incarnation)
    return Expected(
        config_hash=h.config_hash,
        epoch=h.epoch,
        term=h.term,
        incarnation=incarnation,
        fragment=fragment,
        version=h.versions[fragment],
        staleness_max=h.spec.algorithm.staleness_max,
        values=h.sizes_P[fragment],
        codec=h.spec.algorithm.codec_up,
        tokens_per_step=h.spec.tokens_per_step,
        merged_to=0 if life is None else life.mark_P[fragment],
        step_max=step_max,
    )


def judge(
    manifest: ContributionManifest, expected: Expected, *, finite: bool, norm: float
) -> Refusal | None:
    """The first fault of a contribution, or None. Norm outliers are judged per round."""
    m, e = manifest, expected
    stale = e.version - m.base
    steps, tokens = m.step_to - m.step_from, m.tokens_to - m.tokens_from
    passes = _passes(m)
    checks: tuple[tuple[bool, str, str], ...] = (
        (m.config_hash != e.config_hash, "config", "made under another configuration"),
        (m.epoch != e.epoch, "epoch", f"of epoch {m.epoch}, the run is in {e.epoch}"),
        (m.term != e.term, "term", f"of term {m.term}, the leader's is {e.term}"),
        (
            m.incarnation != e.incarnation,
            "incarnation",
            f"of incarnation {m.incarnation}, the newest is {e.incarnation}",
        ),
        (
            m.fragment != e.fragment,
            "malformed",
            f"fragment {m.fragment} in a round of fragment {e.fragment}",
        ),
        (
            m.values != e.values,
            "malformed",
            f"{m.values} values, the fragment has {e.values}",
        ),
        (m.codec != e.codec, "malformed", f"codec {m.codec[:20]}, the run's is {e.codec}"),
        (stale < 0, "ahead", f"based on version {m.base}, the head is {e.version}"),
        (stale > e.staleness_max, "stale", f"based on a version {stale} behind"),
        (steps < 1, "malformed", f"{steps} steps"),
        (
            tokens < 1 or tokens > steps * e.tokens_per_step,
            "tokens",
            f"claims {tokens} tokens in {steps} steps of at most {e.tokens_per_step}",
        ),
        (
            m.tokens_to > m.step_to * e.tokens_per_step,
            "tokens",
            f"claims {m.tokens_to} tokens in a life of {m.step_to} steps",
        ),
        (
            # It adopted the head after all that is merged in it.
            stale == 0 and m.tokens_from < e.merged_to,
            "counters",
            f"begins at token {m.tokens_from}, though {e.merged_to} of its life are settled",
        ),
        (
            m.step_to > e.step_max,
            "counters",
            f"ends at step {m.step_to}, though by its own reports it is at {e.step_max} at most",
        ),
        (
            passes > PASSES_MAX,
            "counters",
            f"has read a data shard {passes} times, and {PASSES_MAX} is the most",
        ),
        (not finite, "non-finite", "has values that are not finite"),
        (not norm >= 0.0, "non-finite", "has no norm"),
    )
    for bad, kind, reason in checks:
        if bad:
            return Refusal(kind, reason)
    return None


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
    if max(p.c_tokens, default=0) > p.tokens:
        return "more tokens than it has done"
    if p.tokens > p.step * tokens_per_step:
        return f"{p.tokens} tokens in a life of {p.step} steps"
    return ""


# --------------------------------------------------------------------------------------------------
# Input that changed nothing, counted by kind and told (invariant I11).


class Refusals(Counter[str]):
    """At the door of one leader's term; the tape counts those in rounds."""

    def tell(self, kind: str, source: str, what: str) -> list[Effect]:
        """Count one ("" for none); told at powers of two: bad input must not flood the events."""
        if not kind:
            return []
        self[kind] += 1
        count = self[kind]
        if count & (count - 1):
            return []
        return [Tell("refused", f"{source}: {kind} ({what}), {count} so far", {"kind": kind})]
