"""What the model is made of, as far as anybody can know before its parameters are on the tape."""

from collections import Counter
from collections.abc import Collection

from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import WrongModel, layout_of
from diloco_syncer.history.history import History

# Learners whose word is remembered: as many as there may be at once, and as many that were refused.
TOLD_MAX = 1024
# Where several are needed to begin, one alone is not believed how large its model is: the hub's
# storage is reserved by it.
AGREEING_MIN = 2
# How long the word of a learner counts that is not there, in seconds: whoever wants to join, and is
# refused, asks again within seconds.
WORD_S = 60.0


def known_layout(spec: RunSpec) -> Layout | None:
    """What the specification says; None for a factory's model, which learners alone know."""
    if spec.model.factory is not None:
        return None
    try:
        return layout_of(spec.model, spec.algorithm.fragments)
    except WrongModel:  # of another release
        return None


class Layouts:
    """Digest and size of the layout that all must have, in one leader's term.

    As the specification or the tape says. Where neither does, as most learners say that are there
    or ask to join; and of two that as many say, the one that was said first.
    """

    def __init__(self, spec: RunSpec, history: History) -> None:
        self.history = history
        self.least = min(spec.membership.learners_min, AGREEING_MIN)
        self.known = known_layout(spec)
        # By learner: digest, how many parameters, and when it said so last.
        self.told: dict[str, tuple[str, int, float]] = {}
        self.final = False

    def hear(
        self, learner: str, digest: str, parameters: int, now: float, there: Collection[str]
    ) -> None:
        """What a learner says that asks to join. `there`: those that have joined, and live."""
        if self._sure() is not None:
            self.told.clear()
            return
        told = self.told.items()
        self.told = {m: word for m, word in told if m in there or now < word[2] + WORD_S}
        if digest:
            self.told[learner] = digest, parameters, now  # in the place of its first word
        if len(self.told) > TOLD_MAX:
            del self.told[next(iter(self.told))]

    def digest(self) -> str:
        """Of the layout that all must have; "" while nobody has said any."""
        sure = self._sure()
        if sure is not None:
            return sure.digest()
        said = Counter(digest for digest, _, _ in self.told.values())
        return max(said, key=lambda digest: said[digest], default="")

    def parameters(self) -> int:
        """N; 0 while it is not known."""
        sure = self._sure()
        if sure is not None:
            return sum(sure.sizes)
        digest = self.digest()
        same = [n for d, n, _ in self.told.values() if d == digest]
        # Who has the same tensors has as many parameters: who says more does not speak the truth.
        return min(same) if len(same) >= self.least else 0

    def _sure(self) -> Layout | None:
        h = self.history
        if h.initialised and not self.final:
            self.known, self.final = Layout.build(h.layout, h.fragments), True
        return self.known
