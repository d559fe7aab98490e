"""What a leader leaves behind: a tape, and the contributions that it names."""

from dataclasses import dataclass, field

import numpy as np
from syncer.small_run import drawn, first_record

from diloco_shared.numerics import codec
from diloco_shared.protocol.chunks import cut
from diloco_shared.protocol.messages import (
    TapeRecord,
    TapeRound,
    TapeTerm,
    Verdict,
)
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import Chosen, Stage
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import build_store, stage_chosen
from diloco_syncer.merging.store import FragmentStore

SPEC = RunSpec.model_validate(
    {
        "name": "t",
        "algorithm": {"fragments": 2, "sync_every_steps": 8, "outer_settle_from": 0.3},
        "budget": {"steps": 80},
    }
)


@dataclass
class Recording:
    """A leader's work written down: the tape, and every contribution's bytes."""

    tape: list[TapeRecord] = field(default_factory=list)
    payloads: dict[str, bytes] = field(default_factory=dict)
    history: History = field(default_factory=lambda: History(SPEC))
    store: FragmentStore | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def append(self, record: TapeRecord) -> None:
        self.history.apply(record, len(self.tape) + 1)
        self.tape.append(record)

    def begin(self) -> None:
        fragments = drawn(self.rng)
        subjects = ("up.t.a.init.0.0", "up.t.a.init.0.1")
        self.payloads |= {
            s: codec.encode("fp32", f) for s, f in zip(subjects, fragments, strict=True)
        }
        self.append(TapeTerm(epoch=0, term=1, leader="s", at=1.0))
        self.append(first_record(self.history.spec, subjects, fragments))
        self.store = build_store(self.history, subjects, self.payloads)

    def round(self, *, skipped: bool = False) -> None:
        assert self.store is not None
        n, h = self.history.next_round, self.history
        p, chosen, verdicts = n % 2, [], []
        for learner in ("a", "b", "c")[: 0 if skipped else 3]:
            subject = f"up.t.{learner}.0.{p}.{n}.1"
            delta = self.rng.standard_normal(h.sizes_P[p]).astype(np.float32) / np.float32(50)
            self.payloads[subject] = codec.encode("bf16", delta)
            weight = float(self.rng.integers(1, 100))
            chosen.append(Chosen(learner, subject, weight, h.versions[p], "bf16", h.sizes_P[p]))
            verdicts.append(
                Verdict(
                    learner=learner,
                    incarnation=0,
                    outcome="merged",
                    reason="",
                    subject=subject,
                    digest=cut(subject, self.payloads[subject]).blob.digest,
                    base=h.versions[p],
                    step_from=4 * n,
                    step_to=4 * n + 4,
                    tokens_from=256 * n,
                    tokens_to=256 * n + 256,
                    weight=weight,
                    norm=1.0,
                    tokens_new=256,
                )
            )
        digests = {"anchor_digest": "", "master_digest": "", "payload_digest": ""}
        keyframe = n == 5
        if not skipped:
            stage = Stage(0, n, p, tuple(chosen), keyframe, n / 10)
            staged = stage_chosen(self.store, stage, self.payloads)
            self.store.install(p, staged)
            digests = {name: getattr(staged, name) for name in digests}
        self.append(
            TapeRound(
                epoch=0,
                term=1,
                round=n,
                fragment=p,
                outcome="skipped" if skipped else "committed",
                reason="",
                quorum_reason="",
                quorum=1,
                version=h.versions[p] + (not skipped),
                verdicts=tuple(verdicts),
                keyframe=keyframe,
                outer_fraction=n / 10,
                stamp=h.stamp_after(n, 3.0 + n),
                quorum_s=0.0,
                grace_s=0.0,
                sync_s=0.0,
                at=3.0 + n,
                **digests,
            )
        )
