"""What learners say of the newest mark on the first shard's tape, until it is looked for. Pure.

A mark is on the tape before anybody meets it: so what was told before a look began is true, or was
never true. What is told while one is under way may be of a mark since, and is looked for again.

Learners repeat themselves every second, a look may take longer than that, and no round is recorded
meanwhile. So what was looked for in vain is not looked for again because the same learner repeats
it. That one may be honest: the checkpoint is over, and its mark in the archive; or the tape has
lost its end.
"""

# Of learners that are not heard any more; as many as a run has (`roster.MEMBERS_MAX`).
REFUTED_MAX = 512


class MarkClaims:
    """Of one leader's term; as many as there are learners."""

    def __init__(self) -> None:
        self.before: dict[str, int] = {}  # learner -> mark, told before the look
        self.meanwhile: dict[str, int] = {}  # told since it began
        self.looking = False
        self.refuted: dict[str, int] = {}  # learner -> its last claim that was not borne out
        self.wrong = set[str]()  # whose were not by the looks that follow each other now

    @property
    def newest(self) -> int:
        """The newest mark that is told of and not settled; 0: none is."""
        return max([0, *self.before.values(), *self.meanwhile.values()])

    def tell(self, number: int, learner: str) -> None:
        """A learner says that it has met this mark, which is newer than what is known."""
        if number != self.refuted.get(learner) and learner not in self.wrong:
            claims = self.meanwhile if self.looking else self.before
            claims[learner] = max(number, claims.get(learner, 0))

    def look(self) -> bool:
        """Whether a look shall begin now."""
        begins = bool(self.before) and not self.looking
        self.looking |= begins
        return begins

    def found(self, newest: int) -> str:
        """The look is over: who told of what is not there, "" for nobody."""
        wrong = {learner: n for learner, n in self.before.items() if n > newest}
        self._refute(wrong)
        self.before = {
            learner: n
            for learner, n in self.meanwhile.items()
            if n > newest and learner not in self.wrong
        }
        self.meanwhile, self.looking = {}, False
        if not self.before:
            self.wrong.clear()
        return max(wrong, key=lambda learner: wrong[learner], default="")

    def _refute(self, claims: dict[str, int]) -> None:
        self.wrong |= claims.keys()
        self.refuted |= claims
        while len(self.refuted) > REFUTED_MAX:
            del self.refuted[next(iter(self.refuted))]
