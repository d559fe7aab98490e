"""Starts the message server of one machine with a secret of its own, which it makes the first time.

    python with_secret.py FOLDER COMMAND ...

FOLDER is a volume that the containers of one project mount, and nobody else. `token` in it is for
those that connect (DILOCO_NATS_TOKEN_FILE); the server's configuration includes the other file. It
is made once: containers that are made anew, of whichever service, find the same one.
Only the standard library: the image has nothing else.
"""

import os
import re
import secrets
import sys
from pathlib import Path

TOKEN, CONFIGURATION = "token", "authorization.conf"


def prepare(folder: Path) -> None:
    """Both files, for their owner alone. SystemExit says what is wrong."""
    token = folder / TOKEN
    try:
        if not token.exists():
            _write(token, secrets.token_hex(32))
        found = token.read_text(encoding="ascii").strip()
        # It stands between quotes, and an empty one would let everybody in.
        if not re.fullmatch(r"[\w-]{16,}", found):
            sys.exit(f"{token} holds no secret: remove it, and start all containers again")
        _write(folder / CONFIGURATION, f'authorization {{ token: "{found}" }}')
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"the secret of the message server cannot be kept in {folder}: {error}")


def _write(path: Path, line: str) -> None:
    """All of it or nothing, whenever this is interrupted."""
    aside = path.with_name(path.name + ".part")
    aside.unlink(missing_ok=True)
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
