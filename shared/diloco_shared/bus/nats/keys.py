"""Who a process is to the message server: a key pair in a file, and what signs with it.

NATS calls such a pair an nkey: 32 random bytes, of which Ed25519 makes a key that is told to the
server, and signatures that nobody else can make. The secret never leaves the file's owner; the
server sends some random text (the nonce), and gets it back signed.
"""

import base64
import binascii
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_shared.protocol.subjects import check_id

# A credentials file is a few hundred bytes; what is longer is another file.
FILE_BYTES_MAX = 4096
_SECRET_BYTES = 32
# The first letters of what people see: SU for the secret of a user, U for its public key.
_SEED, _USER = 18 << 3, 20 << 3


@dataclass(frozen=True, slots=True)
class Credentials:
    """An identity's name and its secret. Neither `repr` nor any error shows the secret."""

    name: str
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls, name: str) -> "Credentials":
        """With a secret that nobody knows. Raises ValueError for a name that is no id."""
        return cls(check_id(name, "identity"), secrets.token_bytes(_SECRET_BYTES))

    @property
    def public_key(self) -> str:
        """As the server is told: 56 letters that begin with U."""
        return _text(bytes((_USER,)) + bytes(_signing(self.secret).verify_key))

    @property
    def inbox(self) -> str:
        """Answers to this identity come below this subject, and nobody else may listen there."""
        return inbox_of(self.name)

    def signed(self, nonce: str) -> str:
        """The signature that lets this identity in, in base64."""
        signature = _signing(self.secret).sign(nonce.encode()).signature
        return base64.urlsafe_b64encode(signature).decode().rstrip("=")

    def login(self, info: Mapping[str, Any]) -> dict[str, str]:
        """The part of CONNECT that says who we are, to a server that says `info` of itself."""
        return {"nkey": self.public_key, "sig": self.signed(str(info.get("nonce", "")))}

    @property
    def seed(self) -> str:
        """The secret, as NATS writes it: 58 letters that begin with SU."""
        head = bytes((_SEED | _USER >> 5, (_USER & 31) << 3))
        return _text(head + self.secret)

    def document(self) -> str:
        """What a credentials file holds. It contains the secret."""
        return json.dumps({"identity": self.name, "seed": self.seed}) + "\n"


def inbox_of(name: str) -> str:
    """Below this subject come the answers to an identity."""
    return f"_INBOX_{name}"


def parse_credentials(text: str) -> Credentials:
    """What a credentials file says. Raises ValueError, which never shows what the file holds."""
    try:
        body: Any = json.loads(text)
        name, seed = body["identity"], body["seed"]
        raw = _bytes(seed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            'it must hold {"identity": NAME, "seed": "SU..."}, as diloco site add writes it'
        ) from None
    if len(raw) != 2 + _SECRET_BYTES or raw[:2] != bytes((_SEED | _USER >> 5, (_USER & 31) << 3)):
        raise ValueError("its seed is not that of a user: it must begin with SU and be 58 letters")
    if not isinstance(name, str):
        raise ValueError("its identity is not a name")
    return Credentials(check_id(name, "identity"), raw[2:])


def read_credentials(path: Path) -> Credentials:
    """Of a file. Raises ValueError naming the file and what to do."""
    try:
        with path.open("rb") as file:
            held = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(
            f"the credentials file {path} cannot be read ({error.strerror}): "
            "DILOCO_NATS_CREDENTIALS must name the file that the hub gave to this site"
        ) from None
    try:
        if len(held) > FILE_BYTES_MAX:
            raise ValueError(f"it is longer than {FILE_BYTES_MAX} bytes")
        return parse_credentials(held.decode("utf-8", "replace"))
    except ValueError as error:
        raise ValueError(f"the credentials file {path} is not one: {error}") from None


def check_public_key(text: str) -> str:
    """Return a user's public key; raises ValueError for what is none, a secret above all."""
    try:
        raw = _bytes(text)
    except ValueError:
        raw = b""
    if len(raw) != 1 + _SECRET_BYTES or raw[0] != _USER:
        raise ValueError("that is no public key of a user: it must begin with U and be 56 letters")
    return text


def _text(raw: bytes) -> str:
    """Base32 of these bytes and their checksum, without padding."""
    checked = raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(checked).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    """Inverse of `_text`; ValueError where the checksum says that a letter is wrong."""
    raw = base64.b32decode(text + "=" * (-len(text) % 8))
    if binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little") != raw[-2:]:
        raise ValueError("a letter is wrong")
    return raw[:-2]


def _signing(secret: bytes) -> Any:
    # Here, so that whoever uses a token needs no library that signs.
    from nacl.signing import SigningKey

    return SigningKey(secret)
