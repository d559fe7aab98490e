"""Keys of identities: what a credentials file says, what is refused, and that no secret shows."""

import base64
import json
import traceback
from pathlib import Path

import pytest
from nacl.signing import VerifyKey

from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.keys import (
    Credentials,
    check_public_key,
    parse_credentials,
    read_credentials,
)

# Made by another implementation of NATS's keys (nkeys 0.2.1) from the bytes 0, 1, ... 31.
SEED = "SUAAAAICAMCAKBQHBAEQUCYMBUHA6EARCIJRIFIWC4MBSGQ3DQOR4H776Y"
PUBLIC = "UAB2CB576PHBBPQ5ODORRZ2LYCMWPZGWGCN2KDK7DXOIMZASKUY3RLKK"


def test_seed_and_public_key_are_those_of_other_implementations() -> None:
    found = parse_credentials(json.dumps({"identity": "one", "seed": SEED}))
    assert (found.name, found.secret, found.public_key) == ("one", bytes(range(32)), PUBLIC)
    assert json.loads(found.document()) == {"identity": "one", "seed": SEED}
    assert check_public_key(PUBLIC) == PUBLIC


def test_a_signature_is_of_the_nonce_and_of_that_key() -> None:
    credentials = Credentials.new("one")
    signature = base64.urlsafe_b64decode(credentials.signed("abc") + "==")
    raw = base64.b32decode(credentials.public_key)[1:33]
    VerifyKey(raw).verify(b"abc", signature)


def test_every_new_key_is_another() -> None:
    assert Credentials.new("one").public_key != Credentials.new("one").public_key


@pytest.mark.parametrize(
    "text",
    [
        "",
        SEED,
        "[]",
        json.dumps({"identity": "one"}),
        json.dumps({"identity": "One!", "seed": SEED}),
        json.dumps({"identity": 1, "seed": SEED}),
        json.dumps({"identity": "one", "seed": SEED[:-1]}),
        json.dumps({"identity": "one", "seed": SEED[:20] + "7" + SEED[21:]}),
        json.dumps({"identity": "one", "seed": PUBLIC}),
        json.dumps({"identity": "one", "seed": "é"}),
        "[" * 100_000,
    ],
)
def test_what_is_no_credentials_file_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text(text)
    with pytest.raises(ValueError, match="credentials") as found:
        read_credentials(path)
    said = "".join(traceback.format_exception_only(found.value))
    assert str(path) in said
    assert SEED[:20] not in said


def test_a_file_that_is_not_there_or_is_another_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read.*DILOCO_NATS_CREDENTIALS"):
        read_credentials(tmp_path / "none")
    (tmp_path / "big").write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="longer than 4096 bytes"):
        read_credentials(tmp_path / "big")


@pytest.mark.parametrize("text", ["", SEED, PUBLIC[:-1] + "A", "U" * 56])
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no public key"):
        check_public_key(text)


def test_nothing_shows_a_secret(tmp_path: Path) -> None:
    credentials = Credentials.new("one")
    path = tmp_path / "credentials"
    path.write_text(credentials.document())
    address = Address("nats://hub:4222", "t0ken", "user", "passw0rd", credentials=path)
    shown = repr(credentials) + repr(address) + str(address.login({"nonce": "n"}))
    seed = json.loads(credentials.document())["seed"]
    for secret in (seed, repr(credentials.secret)[2:-1], "t0ken", "passw0rd"):
        assert secret not in shown


def test_credentials_beat_tokens_and_are_read_for_every_connection(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    old, new = Credentials.new("one"), Credentials.new("one")
    address = Address("nats://tok@hub:4222", credentials=path)
    for credentials in (old, new):
        path.write_text(credentials.document())
        assert address.login({"nonce": "n"}) == {
            "nkey": credentials.public_key,
            "sig": credentials.signed("n"),
        }
        assert address.inbox() == "_INBOX_one"
    assert Address("nats://tok@hub:4222").login({}) == {"auth_token": "tok"}
    assert (Address("nats://hub").api, address.api) == ("$JS.API", "$JS.hub.API")
