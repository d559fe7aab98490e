"""Weights out of a run of real processes: while it trains, from a checkpoint, after its end."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live.stack import SELDOM, Stack, spec, up

from diloco_client import ApiError
from diloco_shared.hf.config import folds_scale
from diloco_shared.hf.weights import open_weights
from diloco_shared.numerics.arrays import digest_array, flatten
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import Model
from diloco_shared.spec.shapes import shape_of, tensors

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

FRAGMENTS = 6
# Half of every fragment is another shard's.
SHARDED: dict[str, Any] = {"fragments": FRAGMENTS, "quorum": 1, "overlap_steps": 8, "shards": 2}


EMBEDDING = "embedding/tokens_VxD"


def layout() -> Layout:
    return Layout.build(tensors(shape_of(Model(preset="nano"))), FRAGMENTS)


def recorded(stack: Stack, shards: int) -> dict[tuple[int, int, int], str]:
    """Digests of the anchors by (epoch, fragment, version), as the run's tape has them."""
    found: dict[tuple[int, int, int], str] = {}
    tapes = [stack.diloco("tape", "show", "r", "--shard", str(shard)) for shard in range(shards)]
    for r in (record for tape in tapes for record in tape):
        if r["kind"] == "init":
            found |= {(0, p, 0): d for p, d in enumerate(r["anchor_digests"]) if d}
        elif r["kind"] == "round" and r["outcome"] == "committed":
            found[r["epoch"], r["fragment"], r["version"]] = r["anchor_digest"]
    return found


def as_merged(folder: Path) -> dict[str, np.ndarray]:
    """The run's tensors, of a checkpoint that transformers could load.

    The factor of nano's embedding, which Llama does not have, is 8: nothing is lost.
    """
    weights, shape = open_weights(folder), shape_of(Model(preset="nano"))
    assert folds_scale(shape) and weights.shape.embed_scale is False
    found = {name: weights.read(name) for name in weights}
    return found | {EMBEDDING: found[EMBEDDING] / 8}


def checked(stack: Stack, folder: Path) -> dict[str, Any]:
    """What `diloco.json` says; every fragment in the weights has the digest that the tape has."""
    told: dict[str, Any] = json.loads((folder / "diloco.json").read_text("utf-8"))
    weights, tape = as_merged(folder), recorded(stack, SHARDED["shards"])
    assert all(np.isfinite(array).all() for array in weights.values())
    for p, f in enumerate(told["fragments"]):
        assert f["fragment"] == p
        assert f["digest"] == tape[told["epoch"], p, f["version"]]
        assert digest_array(flatten(layout(), p, weights)) == f["digest"]
    return told


@pytest.mark.long
def test_a_run_gives_its_weights_while_it_trains_and_afterwards(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--learners", "2", "--syncers", "2") as stack:
        stack.client.create_run(spec(algorithm=SHARDED, keeping=SELDOM))
        with pytest.raises(ApiError, match="has published no parameters yet"):
            stack.client.export("r")
        stack.wait_until(lambda: len(stack.committed()) > 2 * FRAGMENTS, "the first rounds")

        said = stack.run("export", "r", "--to", str(tmp_path / "during"))
        assert "model.safetensors" in said and "checked" in said
        during = checked(stack, tmp_path / "during")
        assert max(f["version"] for f in during["fragments"]) > 0
        assert during["tokens_merged"] > 0 and during["run"] == "r"
        stack.goes_on("the export")

        kept = stack.diloco("checkpoint", "create", "r")
        stack.run("export", "r", "--checkpoint", "1", "--to", str(tmp_path / "kept"))
        of_kept = checked(stack, tmp_path / "kept")
        assert [f["version"] for f in of_kept["fragments"]] == kept["versions"]
        assert of_kept["checkpoint"] == kept["ref"]

        stack.end()
        stack.wait_until(lambda: stack.status()["settled"], "everybody to have left")
        stack.run("export", "r", "--to", str(tmp_path / "after"), "--dtype", "fp32")
        after = checked(stack, tmp_path / "after")
        assert [f["version"] for f in after["fragments"]] == stack.status()["versions"]
        stack.run("export", "r", "--to", str(tmp_path / "old"), "--version", "0", status=1)
        assert not (tmp_path / "old").exists()
        (failed,) = [e for e in stack.client.exports("r") if e["state"] == "failed"]
        assert "version 0 of run 'r' is not kept" in failed["reason"]


@pytest.mark.long
def test_a_run_exports_by_itself_and_a_restart_keeps_what_is_whole(tmp_path: Path) -> None:
    keeping = SELDOM | {"export_every_rounds": 6, "exports": 2}
    with up(tmp_path / "data", "--learners", "2") as stack:
        stack.client.create_run(spec(keeping=keeping))

        def complete() -> list[dict[str, Any]]:
            return [e for e in stack.client.exports("r") if e["state"] == "complete"]

        first = stack.wait_until(complete, "an export")[0]
        stack.wait_until(
            lambda: len(complete()) == 2 and complete()[0]["id"] != first["id"], "the first to go"
        )
        stack.end()
        last = stack.wait_until(lambda: [e for e in complete() if e["final"]], "the last one")[0]
        assert last["versions"] == stack.status()["versions"]
        folders = list((tmp_path / "data" / "coordinator" / "exports").glob("r.*/*"))
        assert {f.name for f in folders} == {e["id"] for e in stack.client.exports("r")}
        pid = stack.pid("coordinator")
        stack.send(signal.SIGKILL, "coordinator")  # its supervisor starts it again
        stack.wait_until(lambda: stack.pid("coordinator") != pid and complete(), "it again")
        assert last in complete()
        assert not [e for e in stack.client.exports("r") if e["state"] == "failed"]
