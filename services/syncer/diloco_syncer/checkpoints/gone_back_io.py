"""The history that a restore went back to, kept when its checkpoint is removed.

    <root>/<run's folder>/gone-back/shard-<s>/<serial>.<digest of the manifest>.json

A checkpoint goes once newer ones follow. A hub that was put back from a backup may still have the
record that goes back to it, and nothing newer: without its history no syncer could follow that
tape, and the run could not begin again from what is published either. Numbers of parameters are
not in it. Kept with a run's checkpoints when the run is deleted.

Not for an event loop: every function waits for the vault.
"""

import json
from typing import Any

from diloco_shared.checkpoints.vault_io import Vault
from diloco_shared.protocol.messages import TapeRestore
from diloco_shared.spec.run import RunSpec
from diloco_syncer.history.replay import RestoredState

# Restores whose history is kept, the newest ones: a model of 3000 tensors takes 1 MB for each.
KEPT_MAX = 64


def keep(spec: RunSpec, shard: int, root: str, serial: int, state: RestoredState) -> None:
    """Keep what the wish `serial` goes back to. Raises VaultError."""
    vault, key = Vault(root), _key(spec, shard, serial, state.digest)
    vault.write(key, json.dumps(state.history).encode())
    # On a hub that was put back, serials of before are higher.
    others = sorted({*vault.keys(_place(spec, shard))} - {key})
    for old in others[: max(len(others) - KEPT_MAX + 1, 0)]:
        vault.write(old, None)


def found(spec: RunSpec, shard: int, root: str, restore: TapeRestore) -> dict[str, Any] | None:
    """`History.meta` of what a restore on the tape goes back to; None: it was not kept.

    Raises VaultError, or ValueError for a file that holds none.
    """
    key = _key(spec, shard, restore.serial, restore.digest)
    body = Vault(root).read(key)
    if body is None:
        return None
    meta = json.loads(body)
    if not isinstance(meta, dict):
        raise ValueError(f"{key} in {root} is damaged")
    return meta


def _place(spec: RunSpec, shard: int) -> str:
    return f"{spec.folder}/gone-back/shard-{shard}/"


def _key(spec: RunSpec, shard: int, serial: int, digest: str) -> str:
    return f"{_place(spec, shard)}{serial:010d}.{digest}.json"
