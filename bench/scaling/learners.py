"""What learners say that exist on paper only: for benches that drive a leader's machine by hand."""

from collections.abc import Sequence

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Blob,
    ContributionManifest,
    Cursor,
    Join,
    Progress,
    Pull,
)
from diloco_shared.spec.run import RunSpec, config_hash, shared_keys

DIGEST = "0" * 32
# Of a fragment: decisions never look at them.
VALUES = 1000


class Voice:
    """Of every learner of one run. `layout`: the digest of its layout."""

    def __init__(self, spec: RunSpec, layout: str) -> None:
        self.spec = spec
        self.hash = config_hash(spec)
        self.config = shared_keys(spec) | {"layout": layout}

    def join(self, learner: str) -> Join:
        return Join(learner=learner, incarnation=0, nonce=f"{learner}-0-1", config=self.config)

    def progress(
        self,
        learner: str,
        epoch: int,
        step: int,
        adopted: Sequence[int],
        adopted_at: Sequence[int],
        *,
        state: str = "stepping",
        cursor: Cursor | None = None,
    ) -> Progress:
        """After `step` steps of a second each; versions adopted by fragment, and at which steps."""
        per_step, since = self.spec.tokens_per_step, [step - at for at in adopted_at]
        return Progress.model_validate(
            {
                "learner": learner,
                "incarnation": 0,
                "epoch": epoch,
                "state": state,
                "step": step,
                "tokens": step * per_step,
                "c_steps": tuple(since),
                "c_tokens": tuple(steps * per_step for steps in since),
                "adopted": tuple(adopted),
                "adopted_at": tuple(adopted_at),
                "loss": 1.0,
                "step_s": 1.0,
                "wait_s": 0.0,
                "cursor": cursor,
            }
        )

    def contribution(
        self,
        pull: Pull,
        learner: str,
        base: int,
        step_from: int,
        step_to: int,
        *,
        cursor: Cursor | None = None,
    ) -> ContributionManifest:
        """The answer to a pull, of steps taken since version `base` was adopted."""
        run, p, per_step = self.spec.name, pull.fragment, self.spec.tokens_per_step
        where = subjects.contribution(run, learner, pull.epoch, p, pull.round, pull.term)
        return ContributionManifest(
            run=run,
            learner=learner,
            incarnation=0,
            epoch=pull.epoch,
            term=pull.term,
            round=pull.round,
            fragment=p,
            base=base,
            step_from=step_from,
            step_to=step_to,
            tokens_from=step_from * per_step,
            tokens_to=step_to * per_step,
            cursor=cursor,
            codec=self.spec.algorithm.codec_up,
            values=VALUES,
            config_hash=self.hash,
            blob=Blob(subject=where, bytes=2016, chunk_bytes=2016, chunks=1, digest=DIGEST),
        )
