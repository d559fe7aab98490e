"""Objects that are too large for one piece, and who a bucket is asked as."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from settled import Settled
from tests.shared.checkpoints.bucket import Bucket
from unsynced import says

from diloco_shared.checkpoints import vault_io
from diloco_shared.checkpoints.vault_io import Vault, VaultError

PIECE = 1000
BODY = bytes(n * 7 % 251 for n in range(4567))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault_io, "PIECE_BYTES", PIECE)


def cut(body: bytes, size: int = 700) -> Iterator[memoryview]:
    return (memoryview(body)[at : at + size] for at in range(0, len(body), size))


@pytest.fixture(params=["folder", "s3", "gs"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Bucket | None]]:
    """A root, and the bucket that answers for it."""
    if request.param == "folder":
        yield str(tmp_path / "a b"), None
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with Bucket(request.param) as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bucket.endpoint)
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", bucket.endpoint)
        yield f"{request.param}://some-bucket/a b", bucket


def test_a_large_object_is_written_in_pieces(
    place: tuple[str, Bucket | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tensorstore gets in one piece it copies while no other thread can do anything."""
    root, bucket = place
    wholes: list[int] = []
    write = Vault.write

    def watched(self: Vault, key: str, data: bytes | None) -> None:
        wholes.append(len(data or b""))
        write(self, key, data)

    monkeypatch.setattr(Vault, "write", watched)
    vault = Vault(root)
    vault.write_pieces("f/large", len(BODY), cut(BODY))
    vault.write_pieces("f/small", PIECE, cut(BODY[:PIECE]))
    vault.write_pieces("f/zeros", len(BODY), cut(bytes(len(BODY))))
    assert vault.read("f/large") == BODY and vault.read("f/small") == BODY[:PIECE]
    assert vault.read("f/zeros") == bytes(len(BODY))
    assert vault.keys() == ["f/large", "f/small", "f/zeros"]
    assert wholes == [PIECE]
    if bucket is not None:
        assert bucket.objects["a b/f/large"] == BODY


def test_a_large_object_is_read_in_pieces(place: tuple[str, Bucket | None]) -> None:
    root, bucket = place
    vault = Vault(root)
    vault.write("f/large", BODY)
    pieces = list(vault.pieces("f/large", 0, len(BODY)))
    assert b"".join(pieces) == BODY and max(map(len, pieces)) == PIECE
    assert b"".join(vault.pieces("f/large", 1500, 2100)) == BODY[1500:3600]
    if bucket is not None:
        assert max(bucket.parts) == PIECE, "nor does more of it come at a time"


@pytest.mark.parametrize("most", [400, 1500])
def test_what_is_too_large_for_one_object_of_s3_becomes_several(
    place: tuple[str, Bucket | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """It refuses more than 5 GiB at once, and no checkpoint with a larger array could be made."""
    monkeypatch.setattr(vault_io, "S3_BYTES_MAX", most)
    root, bucket = place
    vault = Vault(root)
    vault.write_pieces("f/large", len(BODY), cut(BODY))
    vault.write_pieces("f/one", most, cut(BODY[:most]))
    parts = [f"f/large{f'.{n}' if n else ''}" for n in range(-(-len(BODY) // most))]
    whole = not root.startswith("s3://")
    assert vault.keys() == sorted(["f/large", "f/one"] if whole else [*parts, "f/one"])
    if bucket is not None and not whole:
        sizes = [len(bucket.objects[f"a b/{part}"]) for part in parts]
        assert sum(sizes) == len(BODY) and {*sizes[:-1]} == {most}
    copied = Vault(str(tmp_path / "copied"))
    for key in sorted(vault.keys()):
        copied.write(key, vault.read(key))
    for there in (vault, copied):
        for first, size in ((0, len(BODY)), (most - 1, 2), (most, most), (2 * most + 7, 1234)):
            pieces = list(there.pieces("f/large", first, size))
            assert b"".join(pieces) == BODY[first : first + size]
        assert len(b"".join(there.pieces("f/large", 0, len(BODY) + 10))) <= len(BODY)
        assert b"".join(there.pieces("f/one", 0, most)) == BODY[:most]


def test_of_what_is_not_there_nothing_is_read(place: tuple[str, Bucket | None]) -> None:
    vault = Vault(place[0])
    vault.write("f/short", BODY[:1200])
    assert list(vault.pieces("f/none", 0, 10)) == []
    assert b"".join(vault.pieces("f/short", 0, len(BODY)))[:PIECE] == BODY[:PIECE]
    assert len(b"".join(vault.pieces("f/short", 0, len(BODY)))) <= 1200
    assert list(vault.pieces("f/short", 2000, 100)) == []


def test_an_object_that_is_not_written_whole_is_not_there(tmp_path: Path) -> None:
    def torn() -> Iterator[bytes]:
        yield BODY[:1500]
        raise OSError("the disk that it comes from")

    vault = Vault(str(tmp_path))
    with pytest.raises(OSError, match="comes from"):
        vault.write_pieces("f/torn", len(BODY), torn())
    assert vault.keys() == []


def test_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("no folder")
    with pytest.raises(VaultError, match="every process of the run reaches and may write"):
        Vault(str(file)).write_pieces("a/b", len(BODY), cut(BODY))


class Away:
    """A place that does not answer."""

    def read(self, key: str, **_: Any) -> "Away":
        return self

    def result(self) -> None:
        raise ValueError("UNAVAILABLE: nobody there")


def test_a_place_that_does_not_answer_is_named(tmp_path: Path) -> None:
    vault = Vault(str(tmp_path))
    vault._opened = Away()
    with pytest.raises(VaultError, match=r"f/large cannot be read: UNAVAILABLE"):
        list(vault.pieces("f/large", 0, 10))


KEYS = "[{}]\naws_access_key_id = {}\naws_secret_access_key = b\n"


@pytest.mark.parametrize(
    ("set_", "asked_as"),
    [
        ({}, "of-the-file"),
        ({"AWS_PROFILE": ""}, "of-the-file"),
        ({"AWS_PROFILE": "other"}, "of-another"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "of-the-file"),
        ({"AWS_ACCESS_KEY_ID": "given", "AWS_SECRET_ACCESS_KEY": "b"}, "given"),
    ],
)
def test_the_keys_of_a_bucket_may_be_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_: dict[str, Any], asked_as: str
) -> None:
    """As deploy/kubernetes mounts it. Without its keys a bucket is asked as nobody."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "bucket"
    file.write_text(KEYS.format("default", "of-the-file") + KEYS.format("other", "of-another"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for name, value in set_.items():
        monkeypatch.setenv(name, value)
    with Bucket("s3") as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bucket.endpoint)
        Vault("s3://some-bucket/a").write("k", b"1")
        assert bucket.asked and all(f"Credential={asked_as}/" in text for text in bucket.asked)


def test_keys_that_are_changed_in_their_file_are_those_of_a_bucket_that_is_open_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of the tape's archive, for a whole run: the first keys may have ended by then."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "bucket"
    file.write_text(KEYS.format("default", "of-monday"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with Bucket("s3") as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bucket.endpoint)
        vault = Vault("s3://some-bucket/a")
        vault.write("k", b"1")
        file.write_text(KEYS.format("default", "of-tuesday"))
        monkeypatch.setattr(vault_io, "OPENED_S", 0.0)
        vault.write("k", b"2")
        assert "Credential=of-monday/" in bucket.asked[0]
        assert "Credential=of-tuesday/" in bucket.asked[-1]


IN_A_FOLDER = """
import sys
from diloco_shared.checkpoints import vault_io
vault_io.PIECE_BYTES = 1000
vault_io.make_folder = lambda folder: None  # which would fail before anything is written
vault = vault_io.Vault(sys.argv[1])
for write in (
    lambda: vault.write("f/small", b"whole"),
    lambda: vault.write_pieces("f/large", 3000, [bytes(1500)] * 2),
):
    try:
        write()
        print("written")
    except vault_io.VaultError as error:
        print(error)
"""


def test_what_is_written_to_a_folder_is_on_the_disk(tmp_path: Path) -> None:
    """The tape's records are removed from the hub once they are in such a folder, and so is what a
    checkpoint covers. With 'diloco up' and Compose that is a folder of the same machine."""
    said = says(IN_A_FOLDER, str(tmp_path)).splitlines()
    assert len(said) == 2 and all("fsync" in line for line in said), said


def test_the_names_of_new_folders_are_on_the_disk_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all that is stored in them goes with them: tensorstore makes them, and syncs no name."""
    settled, vault = Settled(monkeypatch), Vault(str(tmp_path / "place"))
    (tmp_path / "place").mkdir()
    vault.write("run/0/small", b"whole")
    assert settled.calls == [{"place"}, {"run"}, {"0"}], "each before there is anything in it"
    vault.write_pieces("run/0/large", len(BODY), cut(BODY))
    vault.write("run/0/small", None)
    assert len(settled.calls) == 3
    vault.write_pieces("run/1/large", len(BODY), cut(BODY))
    assert settled.calls[3:] == [{"run"}, {"0", "1"}]
    vault.remove("run/1")
    vault.write("run/1/small", b"whole")
    assert settled.calls[5:] == [{"run"}, {"0", "1"}], "it is a new one"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no folder")
    for write in (
        lambda: Vault(str(tmp_path)).write("run/small", b"whole"),
        lambda: Vault(str(tmp_path)).write_pieces("run/large", len(BODY), cut(BODY)),
    ):
        with pytest.raises(VaultError, match=r"cannot be written .*must be a folder"):
            write()
