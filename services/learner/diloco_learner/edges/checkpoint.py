"""Asynchronous checkpoints of inner moments and counts with orbax; the last N are kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from diloco_shared.edges.crash_points import passing


def sequence_of(epoch: int, incarnation: int, step: int) -> int:
    """What a checkpoint is kept under: grows with each, first of all with the epoch."""
    return (epoch * 10**6 + incarnation) * 10**9 + step


def epoch_of(sequence: int) -> int:
    return sequence // 10**15


class Checkpoints:
    """One folder per run. Parameters are not among them: they come from the anchors.

    Not for an event loop: every method may touch the disk. Orbax is imported when it is first
    needed, since a restarted learner is in a hurry and has, nearly always, a donor.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.keep = keep
        self._manager: Any = None

    @property
    def manager(self) -> Any:
        if self._manager is None:
            import orbax.checkpoint as ocp

            self._manager = ocp.CheckpointManager(
                self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=self.keep)
            )
        return self._manager

    def save(self, sequence: int, moments: dict[str, Any], meta: dict[str, Any]) -> None:
        """Begin writing under an ever-growing `sequence`; returns after copying."""
        manager = self.manager
        import orbax.checkpoint as ocp

        arrays = {name: np.array(leaf) for name, leaf in moments.items()}
        manager.save(
            sequence,
            args=ocp.args.Composite(
                moments=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta)
            ),
        )
        passing("checkpoint")

    @property
    def newest(self) -> int | None:
        """Sequence of the newest complete one, if there is any."""
        return max(self._complete(), default=None)

    def _complete(self) -> list[int]:
        # Orbax writes under another name and renames at the end.
        return [int(p.name) for p in self.folder.iterdir() if p.name.isdigit()]

    def load(
        self, like: dict[str, Any], check: Callable[[bytes], None]
    ) -> tuple[bytes | None, list[str]]:
        """The newest sound moments as safetensors, and why newer ones were passed over.

        `check` raises ValueError for moments that cannot be used.
        """
        faults: list[str] = []
        for sequence in sorted(self._complete(), reverse=True):
            try:
                data = self._read(sequence, like)
                check(data)
                return data, faults
            except Exception as error:  # orbax raises many kinds for a torn folder
                faults.append(f"checkpoint {sequence} passed over: {str(error)[:200]}")
        return None, faults

    def _read(self, sequence: int, like: dict[str, Any]) -> bytes:
        manager = self.manager
        import orbax.checkpoint as ocp

        restored = manager.restore(
            sequence, args=ocp.args.Composite(moments=ocp.args.StandardRestore(like))
        )
        data: bytes = save({k: np.array(v) for k, v in restored["moments"].items()})
        return data

    def wait(self) -> None:
        """Until what is being written is on disk."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for what is being written, and let go of it."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._manager.close()
            self._manager = None
