"""The administrator's token: a file that its owner alone may read, and may replace at any time."""

import json
import os
import re
from base64 import urlsafe_b64encode
from contextlib import suppress
from pathlib import Path

import structlog

from diloco_coordinator.access import EARLIER_MAX, digest
from diloco_shared import ambient
from diloco_shared.durable import begin_folder, replace_for_owner, settle_names
from diloco_shared.process.set_up import WrongSetUp, writing

log = structlog.get_logger()

FILE = "admin-token"
# Beside the file while the token is changed over: the old one's digest, and its end.
BEFORE = ".before"
# Between two looks whether somebody replaced the file, in seconds.
LOOK_S = 1.0
# Lines of the file that are tokens, and its bytes: whoever replaces it may list the old one too.
LINES_MAX, FILE_BYTES_MAX = 4, 4096
# Fewer characters could be guessed; what this program makes has 43.
TOKEN_CHARS_MIN = 16
# 256 random bits, as this program writes them, and as 'openssl rand -hex 32' does.
_RANDOM = re.compile(r"[A-Za-z0-9_-]{43}|[0-9a-f]{64}")


class NoToken(WrongSetUp):
    """There is no administrator's token where there must be one."""


def admin_token(data: Path) -> str:
    """The token in `<data>/admin-token`, created (mode 0600) if there is none."""
    begin_folder(data)
    path, flags = data / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        handle = os.open(path, flags | os.O_EXCL, 0o600)
    except FileExistsError:
        if tokens := tokens_in(path):
            return tokens[0]
        # The disk was full when it was made: an empty token must not open the door.
        handle = os.open(path, flags, 0o600)
    token = new_token()
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(handle)
    settle_names(data)  # else a power cut takes it from those who were told it
    return token


def new_token() -> str:
    """256 random bits, safe in a header."""
    return urlsafe_b64encode(bytes.fromhex(ambient.token(32))).decode("ascii").rstrip("=")


def tokens_in(path: Path) -> list[str]:
    """The tokens in a file, one a line, the present one first.

    Raises OSError, and NoToken for one that is not text, or too short to be a secret.
    """
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX)
    try:
        lines = [line.strip() for line in content.decode("ascii").splitlines()]
    except UnicodeDecodeError:
        raise NoToken(f"{path} is not plain text: put the token there, one line") from None
    tokens = [line for line in lines if line][:LINES_MAX]
    if any(len(token) < TOKEN_CHARS_MIN for token in tokens):
        raise NoToken(
            f"a token in {path} has fewer than {TOKEN_CHARS_MIN} characters, and could be guessed: "
            "put a longer one there, for one of 'openssl rand -hex 32'"
        )
    return tokens


class AdminToken:
    """The administrator's token, as it is in a file now; or a fixed one.

    Looks and reads at once, without a thread: a few hundred bytes, once a second.
    """

    def __init__(self, path: Path | None, fixed: str = "") -> None:
        self.path = path
        self._tokens = [digest(fixed)] if fixed else []
        self._random = frozenset[str]()  # those of them that nobody can guess
        self._seen: tuple[int, int, int] | None = None
        self._look_at = 0.0
        self._complained = ""
        if path is not None:
            self._read()
            if not self._tokens:
                raise NoToken(self._complained or f"{path} is empty: put the token there, one line")

    @classmethod
    def at(cls, data: Path, given: Path | None) -> "AdminToken":
        """Of the file that was given, or the data folder's, which is made at the first start.

        Raises NoToken, and WrongSetUp where this user may not write there.
        """
        if given is None:
            with writing(data):
                admin_token(data)
        return cls(given or data / FILE)

    def digests(self) -> tuple[str, ...]:
        """Of what is good now: all lines of the file, and what is being replaced."""
        if self.path is not None and ambient.monotonic() >= self._look_at:
            self._look_at = ambient.monotonic() + LOOK_S
            self._read()
        return (*self._tokens, *(old for old, _ in self._before()))

    def guessable(self, given: str) -> bool:
        """Whether a token of the file, by its digest, has not the form of 256 random bits. What is
        being replaced counts as such: only its digest is kept."""
        return given not in self._random

    def _read(self) -> None:
        """A file that cannot be read, or is empty, changes nothing: somebody is writing it."""
        assert self.path is not None
        try:
            stat = self.path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return
            tokens = tokens_in(self.path)
        except (OSError, NoToken) as error:
            why = str(error)
            if why != self._complained and self._tokens:
                log.error("the administrator's token stays as it was", error=why)
            self._complained = why
            return
        if tokens:
            if self._seen is not None:
                log.info("the administrator's token was replaced")
            self._tokens, self._seen, self._complained = [digest(t) for t in tokens], seen, ""
            self._random = frozenset(digest(t) for t in tokens if _RANDOM.fullmatch(t))

    def _before(self) -> list[tuple[str, float]]:
        """(digest, end) of those that are being replaced, newest first."""
        if self.path is None:
            return []
        place, now = self.path.with_name(self.path.name + BEFORE), ambient.wall()
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(place.read_text("ascii"))
            found = [(kept["digest"], kept["until"]), *kept.get("earlier", ())]
            good = [(str(old), float(until)) for old, until in found if now < float(until)]
            if not good:
                place.unlink()
            return good
        return []

    def rotate(self, overlap_s: float) -> str:
        """Put a new token into the file; the old one stays good for `overlap_s`. Raises OSError."""
        assert self.path is not None
        self._read()  # somebody may have replaced it a moment ago
        present, token = self._tokens[0], new_token()
        before = self.path.with_name(self.path.name + BEFORE)
        # Whoever rotates it once more may have had no answer the first time.
        earlier = self._before()[:EARLIER_MAX] if overlap_s else []
        kept = {"digest": present, "until": ambient.wall() + overlap_s, "earlier": earlier}
        # In this order: whatever is cut off, one of the two is good.
        replace_for_owner(before, json.dumps(kept) + "\n")
        replace_for_owner(self.path, token + "\n")
        self._look_at = 0.0
        return token
