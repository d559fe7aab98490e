"""One round of one fragment, from due to ready for the tape: which phase may follow which, and why.

Pure data and decisions; `rounds.Rounds` moves it along, and only as MOVES allows. A round is gone
once its record says that it was skipped, or once its publication is out.
"""

from dataclasses import dataclass, field
from enum import Enum

from diloco_shared.numerics.merge import weight
from diloco_shared.protocol.messages import ContributionManifest, Verdict
from diloco_shared.spec.algorithm import Weighting
from diloco_syncer.events import Chosen, Staged


class Phase(Enum):
    """Where a round is; MOVES says which phase may follow which, and when."""

    COLLECTING = "collecting"
    GRACE = "grace"
    PULLING = "pulling"
    STAGING = "staging"
    READY = "ready"
    PUBLISHING = "publishing"


# The documentation's table of a round is made of this one.
MOVES: dict[tuple[Phase, Phase], str] = {
    (Phase.COLLECTING, Phase.GRACE): "enough learners have taken their steps",
    (Phase.COLLECTING, Phase.READY): "a stop waits no longer: skipped",
    (Phase.GRACE, Phase.PULLING): "the grace window is over, or everybody is ready",
    (Phase.GRACE, Phase.READY): "a stop waits no longer: skipped",
    (
        Phase.PULLING,
        Phase.STAGING,
    ): "all have answered, or time is over, and it is enough",
    (Phase.PULLING, Phase.READY): "too few may answer, or have answered: skipped",
    (Phase.STAGING, Phase.READY): "the merge is computed, or cannot be: skipped",
    (Phase.READY, Phase.PUBLISHING): "its record is on the tape: committed",
}


@dataclass(frozen=True, slots=True)
class KeptContribution:
    """A contribution that passed the gate."""

    manifest: ContributionManifest
    norm: float
    weight: float


@dataclass(slots=True)
class Round:
    """Mutated only by `rounds.Rounds`."""

    n: int
    fragment: int
    opened_at: float
    # (learner, incarnation) -> step from which this round's steps are counted.
    since: dict[tuple[str, int], int]
    phase: Phase = Phase.COLLECTING
    quorum_at: float = 0.0
    quorum_reason: str = ""
    grace_until: float = 0.0
    pulled_at: float = 0.0
    deadline: float = 0.0
    resend_at: float = 0.0
    closed_at: float = 0.0
    quorum: int = 0  # K when it closed: a change by the user counts for rounds to come
    # learner -> incarnation, of those pulled.
    participants: dict[str, int] = field(default_factory=dict)
    kept: dict[str, KeptContribution] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    # learner -> seconds from the pull for which it is worth waiting for, once enough have answered.
    worth_s: dict[str, float] = field(default_factory=dict)
    chosen: tuple[Chosen, ...] = ()
    staged: Staged | None = None
    publishes: tuple[int, int, int] = (-1, -1, -1)  # epoch, fragment and version
    fraction: float = 0.0  # of the budget, when it closed
    keyframe: bool = False  # what it publishes is whole
    skip_reason: str = ""
    pushed: bool = False  # its record is on its way to the tape

    def becomes(self, phase: Phase) -> None:
        """The next phase. Raises RuntimeError where nothing leads there: a fault of `rounds`."""
        if (self.phase, phase) not in MOVES:
            raise RuntimeError(f"round {self.n} is {self.phase.name} and cannot be {phase.name}")
        self.phase = phase

    @property
    def unanswered(self) -> tuple[str, ...]:
        """Participants of whom nothing was kept or refused yet, sorted."""
        return tuple(
            sorted(p for p in self.participants if p not in self.kept and p not in self.verdicts)
        )

    @property
    def complete(self) -> bool:
        """Whether nobody is unanswered; looked at with every event."""
        return all(p in self.kept or p in self.verdicts for p in self.participants)

    def answer(self, learner: str) -> str:
        """Subject of what was kept or refused of a participant; "" while nothing was."""
        if learner in self.kept:
            return self.kept[learner].manifest.blob.subject
        return self.verdicts[learner].subject if learner in self.verdicts else ""

    def keep(self, manifest: ContributionManifest, norm: float, weighting: Weighting) -> None:
        """A participant's contribution is to be merged; `weighting` names how much it counts."""
        tokens = manifest.tokens_to - manifest.tokens_from
        w = weight(tokens, manifest.step_to - manifest.step_from, weighting)
        self.kept[manifest.learner] = KeptContribution(manifest, norm, w)

    def refuse(self, manifest: ContributionManifest, reason: str, norm: float = 0.0) -> None:
        """A participant's contribution is not merged; `reason` is `kind: text`."""
        self.kept.pop(manifest.learner, None)
        self.verdicts[manifest.learner] = contribution_verdict(
            manifest, "refused", reason, norm=norm
        )

    def leave_out(self, learner: str, incarnation: int, outcome: str, reason: str) -> None:
        """Nothing came of a learner, or nothing was asked."""
        assert outcome in ("missed", "ineligible")
        self.verdicts[learner] = Verdict(
            learner=learner,
            incarnation=incarnation,
            outcome="missed" if outcome == "missed" else "ineligible",
            reason=reason,
        )


def contribution_verdict(
    manifest: ContributionManifest,
    outcome: str,
    reason: str,
    *,
    norm: float = 0.0,
    weight: float = 0.0,
    tokens_new: int = 0,
) -> Verdict:
    """A verdict that carries what the contribution claimed."""
    return Verdict(
        learner=manifest.learner,
        incarnation=manifest.incarnation,
        outcome="merged" if outcome == "merged" else "refused",
        reason=reason[:500],
        subject=manifest.blob.subject,
        digest=manifest.blob.digest,
        base=manifest.base,
        step_from=manifest.step_from,
        step_to=manifest.step_to,
        tokens_from=manifest.tokens_from,
        tokens_to=manifest.tokens_to,
        weight=weight,
        norm=norm,
        tokens_new=tokens_new,
        cursor=manifest.cursor,
    )
