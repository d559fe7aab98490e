"""What a power cut took from a tape: the only excuse for what others remember of it."""

from diloco_shared.protocol.messages import TapeCheckpoint, TapeRecord, TapeRestore, TapeRound


class Lost:
    """What a power cut took from a tape after somebody may have seen it, and nothing else."""

    def __init__(self) -> None:
        self.work: set[tuple[str, int, int, int]] = set()  # as in Merges.merged
        self.epochs: set[int] = set()  # in which versions were lost
        self.mark = 0  # newest number of a checkpoint
        self.restores = 0

    def record(self, record: TapeRecord, epoch: int) -> None:
        """It was on the tape, in that epoch, and is not any more."""
        self.epochs.add(epoch)
        if isinstance(record, TapeRound):
            self.epochs.add(record.epoch)
            self.work |= {
                (v.learner, v.incarnation, record.fragment, record.round)
                for v in record.verdicts
                if v.outcome == "merged"
            }
        elif isinstance(record, TapeCheckpoint):
            self.mark = max(self.mark, record.number)
        elif isinstance(record, TapeRestore):
            self.restores += 1
