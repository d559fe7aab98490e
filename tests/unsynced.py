"""A process in which nothing can be put on a disk: whoever asks for that hears of a fault (EIO).

It is the system that refuses, so that libraries are judged which call it by themselves. Linux only.
"""

import ctypes
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

# Numbers of `fsync` and `fdatasync`, by machine.
_CALLS = {"x86_64": (74, 75), "aarch64": (82, 83)}
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # of prctl
_LOAD, _JUMP_IF, _RETURN = 0x20, 0x15, 0x06  # of a filter, as of packets
_ALLOW, _ERRNO, _EIO = 0x7FFF0000, 0x00050000, 5


def refuse() -> None:
    """From now on, in this process and in the threads that it begins."""
    first, second = _CALLS[platform.machine()]
    steps = (
        (_LOAD, 0, 0, 0),  # the number of the call
        (_JUMP_IF, 1, 0, first),
        (_JUMP_IF, 0, 1, second),
        (_RETURN, 0, 0, _ERRNO | _EIO),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 5, ctypes.addressof(code)))
    system = ctypes.CDLL(None, use_errno=True)
    for call in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, program, 0, 0)):
        if system.prctl(*call):
            raise OSError(ctypes.get_errno(), "this system takes no filter")


def says(program: str, *given: str) -> str:
    """What a program prints that is begun in such a process."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        pytest.skip("no filter of system calls is known here")
    command = [sys.executable, "-c", f"import unsynced\nunsynced.refuse()\n{program}", *given]
    here = Path(__file__).parent  # where it finds this module
    done = subprocess.run(
        command, cwd=here, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
