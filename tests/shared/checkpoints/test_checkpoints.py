"""RunCheckpoints in a folder: whole or not listed, and never read back changed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tests.shared.checkpoints.bucket import Bucket

from diloco_shared.bus.port import Stored
from diloco_shared.checkpoints.checkpoints_io import (
    CheckpointError,
    CheckpointMissing,
    RunCheckpoints,
)
from diloco_shared.checkpoints.tape_archive_io import TapeArchive
from diloco_shared.checkpoints.vault_io import Vault, VaultError
from diloco_shared.numerics.arrays import pack, unpack
from diloco_shared.protocol.checkpoints import (
    MANIFEST,
    CheckpointManifest,
    Object,
    ShardPart,
    parse_reference,
    reference,
)
from diloco_shared.protocol.messages import Stamp

REF = reference("r.ab12", 3)
ARRAYS = {"a": np.arange(5, dtype=np.float32), "b": np.array(7, np.int32), "c": np.ones((2, 3))}


def part_in(there: RunCheckpoints, ref: str = REF, seq: int = 4) -> Any:
    arrays = {**ARRAYS, "b": np.array(7 + seq - 4, np.int32)}
    objects = there.write_arrays(ref, "shard-0", pack(arrays, blob_bytes=30))
    part = ShardPart(shard=0, history={"seq": seq}, store={"versions": [1]}, arrays=objects)
    return there.write_part(ref, "shard-0", part)


def manifest(shard: Any, number: int = 3) -> CheckpointManifest:
    return CheckpointManifest(
        run="r",
        run_id="ab12",
        number=number,
        reason="as the user asked",
        at=5.0,
        epoch=0,
        stamp=Stamp(round=1, steps=8, fraction=0.1, fraction_per_step=0.01),
        versions=(1,),
        parameters=12,
        spec={"name": "r"},
        shards=(shard,),
        learners={},
        missing={},
        leases=(),
        incarnations={"a": 2},
        bytes=100,
    )


@pytest.fixture
def there(tmp_path: Path) -> RunCheckpoints:
    return RunCheckpoints(str(tmp_path / "some where"))


def test_what_is_read_back_is_what_was_written(there: RunCheckpoints) -> None:
    there.seal(REF, manifest(part_in(there)))
    found, _ = there.manifest(REF)
    part = there.part(REF, found.shards[0], ShardPart)
    assert len(part.arrays) == 2, "in blobs of bounded size"
    arrays: dict[str, Any] = {}
    for blob in there.blobs(REF, part):
        arrays |= unpack(blob)
    assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in arrays.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in ARRAYS.items()
    }
    assert (part.history, part.store) == ({"seq": 4}, {"versions": [1]})


def test_a_torn_checkpoint_is_never_listed(there: RunCheckpoints) -> None:
    part_in(there)
    assert (there.complete(), there.begun("r.ab12")) == ([], [REF])
    with pytest.raises(CheckpointError, match=r"no checkpoint .*000003 in .*known: none"):
        there.manifest(REF)
    there.seal(REF, manifest(part_in(there)))
    other = reference("s.cd34", 1)
    there.seal(other, manifest(part_in(there, other), 1))
    assert there.complete("r.ab12") == [REF]
    assert there.complete() == [REF, other]
    with pytest.raises(CheckpointError, match=r"known: r\.ab12/000003$"):
        there.manifest(reference("r.ab12", 9))


@pytest.mark.parametrize("pattern", ["shard-0.????*.json", "shard-0.001.*.safetensors"])
def test_what_is_damaged_is_named(there: RunCheckpoints, pattern: str) -> None:
    there.seal(REF, manifest(part_in(there)))
    (path,) = (Path(there.root) / REF).glob(pattern)
    name = path.name
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)

    def read() -> None:
        found, _ = there.manifest(REF)
        list(there.blobs(REF, there.part(REF, found.shards[0], ShardPart)))

    with pytest.raises(CheckpointError, match=f"{name} has digest"):
        read()
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is gone"):
        read()


def test_a_number_that_comes_again_changes_nothing_that_a_manifest_names(
    there: RunCheckpoints,
) -> None:
    """A power cut may take the record of a complete checkpoint: its number is given again."""
    there.seal(REF, manifest(part_in(there)))
    before, digest = there.manifest(REF)
    again = part_in(there, seq=9)
    assert again != before.shards[0]
    with pytest.raises(CheckpointError, match="complete already"):
        there.seal(REF, manifest(again))
    assert there.manifest(REF) == (before, digest)
    part = there.part(REF, before.shards[0], ShardPart)
    assert len(list(there.blobs(REF, part))) == len(part.arrays)


def test_a_manifest_that_is_none_is_said_to_be_damaged(there: RunCheckpoints) -> None:
    there.vault.write(f"{REF}/{MANIFEST}", b'{"run": "r"}')
    with pytest.raises(CheckpointError, match="damaged"):
        there.manifest(REF)


def test_removing_leaves_nothing(there: RunCheckpoints) -> None:
    there.seal(REF, manifest(part_in(there)))
    there.remove(REF)
    there.vault.remove(REF)  # another coordinator may have been first
    assert there.complete() == there.begun("r.ab12") == []
    assert not (Path(there.root) / REF).exists()


def test_a_folder_goes_as_a_whole_and_with_nothing_beside_it(there: RunCheckpoints) -> None:
    for ref in (REF, reference("r.ab12", 4), reference("r.ab123", 1), reference("r.ab1", 1)):
        there.seal(ref, manifest(part_in(there, ref)))
    for folder in ("r.ab12", "r.ab1"):
        TapeArchive(there.root, folder, 1).write([Stored("tape.r.1", b"x", {}, 7)])
    assert there.archived() == ["r.ab1", "r.ab12"]
    there.remove_folder("r.ab12")
    assert there.archived() == ["r.ab1"]
    assert there.complete() == there.begun() == ["r.ab1/000001", "r.ab123/000001"]
    with pytest.raises(CheckpointMissing, match="nothing of a run lies in"):
        there.remove_folder("r.ab12")


def test_a_reference_is_of_the_root_in_use_or_has_its_own() -> None:
    assert parse_reference("r.ab12/000003") == ("", "r.ab12", 3)
    assert parse_reference("/some/where/r/000012/") == ("/some/where", "r", 12)
    assert parse_reference("gs://bucket/x/r.ab/000001") == ("gs://bucket/x", "r.ab", 1)
    for bad in ("r", "r/3", "../x/000001/y", "R/000001"):
        with pytest.raises(ValueError, match="names no checkpoint"):
            parse_reference(bad)


def test_an_address_that_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(VaultError, match="begins with file://, gs://, s3://"):
        Vault("ftp://here")
    file = tmp_path / "file"
    file.write_text("no folder")
    with pytest.raises(VaultError, match="every process of the run reaches and may write"):
        Vault(f"file://{file}").write("a/b", b"x")
    with pytest.raises(VaultError, match="cannot be opened"):
        Vault("s3://").keys()


def test_a_file_address_and_its_folder_are_one_place(tmp_path: Path) -> None:
    Vault((tmp_path / "a b").as_uri()).write("k/x", b"1")
    assert Vault(str(tmp_path / "a b")).read("k/x") == b"1"
    assert Vault(str(tmp_path / "a b")).keys() == ["k/x"]
    assert Vault(str(tmp_path / "none")).read("k/x") is None


@pytest.mark.parametrize(
    ("scheme", "endpoint"), [("s3", "AWS_ENDPOINT_URL_S3"), ("gs", "TENSORSTORE_GCS_HTTP_URL")]
)
def test_a_bucket_holds_what_a_folder_does(
    monkeypatch: pytest.MonkeyPatch, scheme: str, endpoint: str
) -> None:
    """Of any store that speaks their protocol, at the address that their tools take it from."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with Bucket(scheme) as bucket:
        monkeypatch.setenv(endpoint, bucket.endpoint)
        there = RunCheckpoints(f"{scheme}://some-bucket/a b")
        assert there.complete() == []
        there.seal(REF, manifest(part_in(there)))
        assert all(key.startswith(f"a b/{REF}/") for key in bucket.objects)
        found, _ = RunCheckpoints(f"{scheme}://some-bucket/a b").manifest(REF)
        part = there.part(REF, found.shards[0], ShardPart)
        assert len(list(there.blobs(REF, part))) == 2
        assert there.complete("r.ab12") == there.begun("r.ab12") == [REF]
        there.remove(REF)
        assert not bucket.objects


@pytest.mark.parametrize(
    "key", ["../../etc/passwd", "/etc/passwd", "a/b", "..", "", "a\0b", "x" * 256]
)
def test_no_object_of_a_manifest_lies_elsewhere(key: str) -> None:
    with pytest.raises(ValidationError, match="key"):
        Object(key=key, bytes=1, digest="0" * 32)
