"""Asynchronous checkpoints of inner moments and counts with orbax; the last N are kept."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import structlog
from safetensors.numpy import save

log = structlog.get_logger()


class Checkpoints:
    """One folder per run. Parameters are not among them: they come from the anchors."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep)
        )

    def save(self, sequence: int, moments: dict[str, Any], meta: dict[str, Any]) -> None:
        """Begin writing under an ever-growing `sequence`; returns at once after copying."""
        arrays = {name: np.array(leaf) for name, leaf in moments.items()}
        self.manager.save(
            sequence,
            args=ocp.args.Composite(
                moments=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta)
            ),
        )

    @property
    def newest(self) -> int | None:
        """Sequence of the newest one, if there is any."""
        found: int | None = self.manager.latest_step()
        return found

    def load(self, like: dict[str, Any]) -> bytes | None:
        """The newest sound moments as safetensors; torn ones are passed over and logged."""
        abstract = {
            k: jax.ShapeDtypeStruct(v.shape, v.dtype)  # type: ignore[no-untyped-call]
            for k, v in like.items()
        }
        for sequence in sorted(self.manager.all_steps(), reverse=True):
            try:
                restored = self.manager.restore(
                    sequence,
                    args=ocp.args.Composite(moments=ocp.args.StandardRestore(abstract)),
                )
                moments = {k: np.array(v) for k, v in restored["moments"].items()}
                data: bytes = save(moments)
                return data
            except Exception as error:  # orbax raises many kinds for a torn folder
                log.warning("checkpoint passed over", sequence=sequence, error=str(error)[:200])
        return None

    def close(self) -> None:
        """Wait for what is being written."""
        self.manager.wait_until_finished()
        self.manager.close()
