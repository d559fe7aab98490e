"""An address reaches a configured place or below it, however it is written, and nothing else."""

from pathlib import Path

import pytest

from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.reach.checkpoint_roots import (
    ADDRESS_CHARS_MAX,
    reach_of,
    reference_in,
    root_of_run,
    roots_of,
)
from diloco_shared.reach.local import OutOfReach

ROOTS = ("/srv/root", "s3://bucket/ckpt", "gs://other/a b")
# Links of a made-up disk; of all others the path is its own.
LINKS = {"/srv/root/out": "/etc", "/srv/root/in": "/srv/root/far", "/tmp/back": "/srv/root/x"}


def resolve(path: str) -> str:
    for link, target in LINKS.items():
        if path == link or path.startswith(f"{link}/"):
            return target + path.removeprefix(link)
    whole = path if path.startswith("/") else f"/home/ada/{path}"
    return "/" + "/".join(name for name in whole.split("/") if name not in ("", "."))


TRICKS = {
    "the folder above": "/srv",
    "a folder that begins alike": "/srv/root-evil",
    "up and out": "/srv/root/../other",
    "up and in again": "/srv/root/../root",
    "up within": "/srv/root/a/../b",
    "another folder": "/etc",
    "the root of all": "/",
    "one's home": "~/root",
    "somebody's home": "~root",
    "a link that leads out": "/srv/root/out",
    "below a link that leads out": "/srv/root/out/deep",
    "a zero byte": "/srv/root\0/../../etc",
    "too long": "/srv/root/" + "a" * ADDRESS_CHARS_MAX,
    "a relative folder": "srv/root",
    "another bucket": "s3://evil/ckpt",
    "a bucket that begins alike": "s3://bucket-evil/ckpt",
    "a key that begins alike": "s3://bucket/ckpt-evil",
    "the whole bucket": "s3://bucket",
    "the whole bucket, with a slash": "s3://bucket/",
    "another store's bucket": "gs://bucket/ckpt",
    "up in a bucket": "s3://bucket/ckpt/../other",
    "up, escaped": "s3://bucket/ckpt/%2e%2e/other",
    "up, escaped twice": "s3://bucket/ckpt/%252e%252e/other",
    "a slash, escaped": "s3://bucket/ckpt%2f..%2fother",
    "a slash, escaped in a name below": "s3://bucket/ckpt/a%2fb",
    "no name between slashes": "s3://bucket/ckpt//a",
    "a user before a host": "s3://bucket@evil/ckpt",
    "a host after a user": "s3://evil@bucket/ckpt",
    "a port": "s3://bucket:80/ckpt",
    "a query": "s3://bucket/ckpt?endpoint=http://evil",
    "an anchor": "s3://bucket/ckpt#/../other",
    "a backslash": "s3://bucket/ckpt\\..\\other",
    "a space before it": " s3://bucket/ckpt/a",
    "a line's end": "s3://bucket/ckpt/a\nb",
    "letters that look alike": "s3://buсket/ckpt",
    "a name in another normal form": "s3://bucket/ckpt\u0301",
    "bytes that are no text": "s3://bucket/ckpt/%ff",
    "another scheme": "http://bucket/ckpt",
    "the metadata of a cloud": "http://169.254.169.254/latest",
    "a scheme in capitals": "S3://bucket/ckpt",
    "two schemes": "s3://s3://bucket/ckpt",
    "memory": "memory://bucket/ckpt",
    "a file elsewhere": "file:///etc",
    "a file on another host": "file://evil/srv/root",
    "a file, up and out, escaped": "file:///srv/root/%2e%2e/other",
    "a file behind a link": "file:///srv/root/out",
    "nothing": "",
}


@pytest.mark.parametrize("address", TRICKS.values(), ids=TRICKS)
def test_no_trick_reaches_further(address: str) -> None:
    with pytest.raises(OutOfReach, match="DILOCO_CHECKPOINT_ROOTS"):
        reach_of(address, ROOTS, resolve)
    for end in ("", "/"):
        text = f"{address}{end}/run.abc/000001"
        try:
            own, _, _ = parse_reference(text)
        except ValueError:
            continue  # it names no checkpoint at all
        if own:
            with pytest.raises(ValueError):
                reference_in(text, ROOTS[0], ROOTS, resolve)


@pytest.mark.parametrize(
    ("address", "opened"),
    [
        ("/srv/root", "/srv/root"),
        ("/srv/root/", "/srv/root"),
        ("/srv/root/team/a", "/srv/root/team/a"),
        ("/srv/root/in/x", "/srv/root/far/x"),
        ("/tmp/back", "/srv/root/x"),
        ("file:///srv/root/team", "/srv/root/team"),
        ("file:///srv/root/a%20b", "/srv/root/a b"),
        ("s3://bucket/ckpt", "s3://bucket/ckpt"),
        ("s3://bucket/ckpt/", "s3://bucket/ckpt"),
        ("s3://bucket/ckpt/team", "s3://bucket/ckpt/team"),
        ("s3://bucket/c%6bpt/team", "s3://bucket/ckpt/team"),
        ("gs://other/a b", "gs://other/a b"),  # as it is configured, whatever is in it
        ("/srv/root/täm", "/srv/root/täm"),
    ],
)
def test_what_is_configured_is_reached_with_all_below_it(address: str, opened: str) -> None:
    assert reach_of(address, ROOTS, resolve) == opened


def test_a_link_on_the_disk_is_followed_before_anything_is_compared(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    (root / "run.abc").mkdir(parents=True)
    secret.mkdir()
    (root / "leads").symlink_to(secret)
    (tmp_path / "other-name").symlink_to(root)
    allowed = (str(root),)
    with pytest.raises(OutOfReach):
        reach_of(str(root / "leads"), allowed)
    # A run's folder may be a link, too: it is part of a reference that needs no address.
    with pytest.raises(OutOfReach) as refused:
        reference_in("leads/000001", str(root))
    assert str(tmp_path) not in str(refused.value), "whoever asks need not know where that is"
    assert reference_in("run.abc/000001", str(root)) == (str(root), "run.abc", 1)
    assert reach_of(str(tmp_path / "other-name"), allowed) == str(root)
    (root / "round").symlink_to(root / "round")
    with pytest.raises(OutOfReach):
        reach_of(f"{root}/round/../../secret", allowed)


def test_a_refusal_says_the_same_of_what_is_there_and_of_what_is_not(tmp_path: Path) -> None:
    def said(name: str) -> str:
        with pytest.raises(OutOfReach) as refused:
            reach_of(str(tmp_path / name), (str(tmp_path / "root"),))
        return str(refused.value).replace(name, "NAME")

    (tmp_path / "there").mkdir()
    assert said("there") == said("absent")
    assert str(tmp_path / "root") not in said("there")


def test_a_run_keeps_its_checkpoints_in_the_first_place_unless_it_names_another() -> None:
    places = roots_of("/srv/root", " s3://bucket/ckpt ,,/more ")
    assert places == ("/srv/root", "s3://bucket/ckpt", "/more")
    assert root_of_run("", places) == "/srv/root"
    assert root_of_run("s3://bucket/ckpt/mine", places) == "s3://bucket/ckpt/mine"
    with pytest.raises(OutOfReach):
        root_of_run("s3://bucket/others", places)
    with pytest.raises(ValueError, match="at most 256"):
        roots_of("", "/x," * 257)


def test_a_reference_has_its_own_address_or_is_in_the_root_in_use() -> None:
    found = reference_in("s3://bucket/ckpt/a/run.abc/000012", "/srv/root", ROOTS, resolve)
    assert found == ("s3://bucket/ckpt/a", "run.abc", 12)
    assert reference_in("run.abc/000012", "gs://any", (), resolve) == ("gs://any", "run.abc", 12)
    for wrong in ("run.abc", "run.abc/12", "../run.abc/000001", "a" * 10**6 + "/000001"):
        with pytest.raises(ValueError):
            reference_in(wrong, "/srv/root", ROOTS, resolve)
