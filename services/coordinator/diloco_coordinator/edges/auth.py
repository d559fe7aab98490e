"""The admin token: made at the first start, kept in a file that only its owner may read."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from fastapi import Request

from diloco_coordinator.edges.problems import Problem

FILE = "admin-token"


def admin_token(data: Path) -> str:
    """The token in `<data>/admin-token`, created (mode 0600) if there is none."""
    data.mkdir(parents=True, exist_ok=True)
    path = data / FILE
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(encoding="ascii").strip()
    token = secrets.token_urlsafe(32)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


class Guard:
    """Lets requests with the right bearer token through. Only a hash of it stays in memory."""

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()

    def __call__(self, request: Request) -> None:
        """Raises a 401 problem for a missing or wrong token."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.encode()).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._digest):
            raise Problem(
                401,
                "A token is needed",
                "send 'Authorization: Bearer <token>'; the admin token is in the file "
                f"'{FILE}' of the coordinator's data folder",
            )
