"""Exports on the coordinator's disk: whole, of one version set, and with nothing beside them.

Nobody is asked: what is there is read, and compared with what the run published.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from diloco_coordinator.exports.shelf_io import FILES, PAST, RECORD
from diloco_shared.durable import PART
from diloco_shared.numerics.arrays import digest_array, flatten
from diloco_shared.protocol.exports import MANIFEST, ExportManifest
from diloco_shared.spec.fragmentation import Layout
from diloco_simulator.checkers.watch import RunWatch
from diloco_simulator.worlds.tiny import tensors_of

WEIGHTS = "model.safetensors"
# numpy's own reader of the format does not know the second one.
DTYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16)}


def not_whole(place: Path, view: Mapping[str, Any], watch: RunWatch) -> str:
    """What is wrong with a ready export; "" for nothing. `place`: its folder; `view`: as it is
    shown; `watch`: what the run published."""
    folder, listed = place / FILES, {f["name"]: f for f in view["files"]}
    try:
        there = {path.name: path.read_bytes() for path in folder.iterdir()}
    except OSError as error:
        return f"it cannot be read: {error}"
    if there.keys() != listed.keys():
        return f"it has the files {sorted(there)}, and shows {sorted(listed)}"
    for name, body in there.items():
        digest = hashlib.sha256(body).hexdigest()
        if (len(body), digest) != (listed[name]["bytes"], listed[name]["sha256"]):
            return f"{name} is not as it is shown"
    manifest = ExportManifest.model_validate_json(there[MANIFEST])
    return next(_mixed(manifest, view, watch), "") or _other_values(manifest, there[WEIGHTS], watch)


def _mixed(m: ExportManifest, view: Mapping[str, Any], watch: RunWatch) -> Iterator[str]:
    """It is of one epoch, in which each version was published so; and of the version asked for."""
    wanted, fragments = view["asked"]["version"], watch.spec.algorithm.fragments
    if [f.fragment for f in m.fragments] != list(range(fragments)):
        yield f"it has the fragments {[f.fragment for f in m.fragments]} of {fragments}"
    shown = view["epoch"], tuple(view["versions"])
    if shown != (m.epoch, tuple(f.version for f in m.fragments)):
        yield f"it is shown with epoch and versions {shown}"
    for f in m.fragments:
        if wanted is not None and f.version != wanted:
            yield f"fragment {f.fragment} has version {f.version}, and {wanted} was asked for"
        known, _ = watch.anchors.digests.get((m.epoch, f.fragment, f.version), ("", ""))
        if known != f.digest and not (m.checkpoint and not known):
            yield (
                f"fragment {f.fragment} is version {f.version} of epoch {m.epoch} with digest "
                f"{f.digest}, which was published with {known or 'none'}"
            )


def _tensors(body: bytes) -> dict[str, NDArray[Any]]:
    """Of a file of weights, by name."""
    begin = 8 + int.from_bytes(body[:8], "little")
    found = {}
    for name, t in json.loads(body[8:begin]).items():
        if name != "__metadata__":
            start, end = t["data_offsets"]
            values = np.frombuffer(body[begin + start : begin + end], DTYPES[t["dtype"]])
            found[name] = values.reshape(t["shape"])
    return found


def _other_values(m: ExportManifest, body: bytes, watch: RunWatch) -> str:
    fragments = watch.spec.algorithm.fragments
    layout, tensors = Layout.build(tensors_of(fragments), fragments), _tensors(body)
    for f in m.fragments:
        values_F = flatten(layout, f.fragment, tensors)
        if m.dtype == "fp32":
            same = digest_array(values_F) == f.digest
        else:
            exact_F = watch.exact(f.fragment, f.digest)
            half = None if exact_F is None else exact_F.astype(ml_dtypes.bfloat16)
            same = half is None or np.array_equal(half.astype(np.float32), values_F, equal_nan=True)
        if not same:
            return f"the values of fragment {f.fragment} are others than were published"
    return ""


def beside(folder: Path, shown: Mapping[str, str]) -> list[str]:
    """What lies in a run's folder and should not; `shown` is the state of each export by its id."""
    found = []
    for place in sorted(folder.glob("*")):
        if place.name in (PAST, f"{PAST}{PART}"):
            continue  # of one that was removed
        state, names = shown.get(place.name, ""), {path.name for path in place.iterdir()}
        if not state:
            found.append(f"{place.name} is shown nowhere, and has {sorted(names)}")
        elif state != "running" and names - {RECORD, f"{RECORD}{PART}"} != (
            {FILES} if state == "complete" else set()
        ):
            found.append(f"{place.name} is {state}, and has {sorted(names)}")
    return found
