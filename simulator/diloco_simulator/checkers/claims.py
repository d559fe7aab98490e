"""What learners say of their own work, against what they were seen to do (I2, I5, I9)."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_learner.events import Contribute, Merged, Unmerged
from diloco_shared.protocol.messages import Progress
from diloco_simulator.checkers.promises import Merges, Report

Done = tuple[int, int]  # steps and tokens


@dataclass(slots=True)
class ClaimedWork:
    """One process, as seen from outside."""

    began: int | None = None  # epoch
    steps: int = 0
    tokens: int = 0
    # fragment -> (epoch, version, steps and tokens when it was adopted)
    bases: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    # fragment -> steps and tokens at each of its adoptions, in order
    adoptions: dict[int, list[Done]] = field(default_factory=lambda: defaultdict(list))

    def based(self, p: int, base: Done, said: Done) -> bool:
        """Whether `base` is where the newest adoption of a fragment was, in a report of what was
        `said` to be done: one of the same moment may have been before it."""
        earlier = [at for at in self.adoptions[p] if at < said]
        return base in earlier[-1:] or (base == said and said in self.adoptions[p])


class Claims:
    """Counts steps and adoptions of every process."""

    def __init__(self, report: Report, merges_of: Callable[[int], Merges]) -> None:
        """`merges_of`: what the tape of a fragment's shard merged."""
        self.report = report
        self.merges_of = merges_of
        self.work: dict[str, ClaimedWork] = {}
        self.newest: dict[str, int] = {}  # learner -> its newest life that trains

    def stepped(self, life: str, tokens: int) -> None:
        work = self.work.setdefault(life, ClaimedWork())
        work.steps += 1
        work.tokens += tokens

    def adopted(self, life: str, epoch: int, p: int, version: int) -> None:
        """A life has adopted that version of fragment p: from now on that is its base."""
        work = self.work.setdefault(life, ClaimedWork())
        work.began = epoch if work.began is None else work.began
        learner, _, incarnation = life.rpartition("/")
        self.newest[learner] = max(int(incarnation), self.newest.get(learner, -1))
        work.bases[p] = (epoch, version, work.steps, work.tokens)
        work.adoptions[p].append((work.steps, work.tokens))

    def voided(self, life: str) -> None:
        """History began again: what this life did since its adoptions is void."""
        if work := self.work.get(life):
            for p, (epoch, *_) in work.bases.items():
                work.bases[p] = (epoch, -1, work.steps, work.tokens)

    def told(self, p: Progress) -> None:
        """I5: a report that has reached a leader says how far its life was once, in steps and in
        tokens, and where it had adopted every fragment by then. Of an adoption that is void nothing
        is said."""
        self.report.looked("I5")
        life = f"{p.learner}/{p.incarnation}"
        work = self.work.get(life, ClaimedWork())
        said = p.step, p.tokens
        if p.tokens > work.tokens or p.step > work.steps:
            done = f"{work.steps} steps and {work.tokens} tokens"
            self.report("I5", f"{life} reports {p.step} steps and {p.tokens} tokens, it did {done}")
        for q, version in enumerate(p.adopted):
            base = p.adopted_at[q], p.tokens - p.c_tokens[q]
            # It has adopted all before its first turn, for which it waits for data.
            waits = life not in self.work and base == said == (0, 0)
            if version >= 0 and not waits and not work.based(q, base, said):
                at = f"at {said}, that it adopted fragment {q} at {base}"
                self.report("I5", f"{life} reports {at}; it did at {work.adoptions[q]}")
            # Who may have skipped all its steps since then says that it has none.
            since = {p.step - p.adopted_at[q], 0 if p.steps_skipped else p.step - p.adopted_at[q]}
            if version >= 0 and p.c_steps[q] not in since:
                at = f"{p.c_steps[q]} steps since it adopted fragment {q} at {p.adopted_at[q]}"
                self.report("I5", f"{life} reports {at}, after {p.step}")

    def contributed(self, life: str, c: Contribute) -> None:
        """I5: a contribution is the work since its fragment was adopted, all of it and no other."""
        self.report.looked("I5")
        work = self.work[life]
        said = (c.epoch, c.base, c.step_from, c.tokens_from, c.step_to, c.tokens_to)
        done = (*work.bases[c.fragment], work.steps, work.tokens)
        if said != done:
            self.report("I5", f"{life} claims {said} for round {c.round}, where it did {done}")
        elif c.step_to == c.step_from:
            self.report("I5", f"{life} answers round {c.round} without a step of work")

    def decided(self, learner: str, incarnation: int, fate: Merged | Unmerged) -> None:
        """I9: a learner's residual follows what the tape says of its contributions."""
        tape = self.merges_of(fate.fragment)
        work = (learner, incarnation, fate.fragment, fate.round)
        if work in tape.undone:
            return  # it was merged, and is not in what the run went back to
        life = self.work[f"{learner}/{incarnation}"]
        if life.began is not None and life.began < tape.restored:
            return  # publications since the restore name nobody of before; a new life begins
        if incarnation < self.newest[learner]:
            return  # they name its newest life; this one ends as soon as it hears of that
        if (learner, incarnation) in tape.left:
            return  # they need not name one that is over, and it begins anew as soon as it hears
        merged = work in tape.merged
        if isinstance(fate, Merged) and work in tape.lost.work:
            return  # the record was lost after its publication was seen
        if merged != isinstance(fate, Merged):
            self.report(
                "I9",
                f"{learner} takes its contribution to round {fate.round} for "
                f"{'not merged' if merged else 'merged'}",
            )
