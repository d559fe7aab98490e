"""Runs nats-server, and starts it anew once it ran out of disk and there is room again.

    keep.py STORE COMMAND ...

After a full disk the server answers no append to what it could not write, however much room there
is later, until it starts anew. Its log passes through; its exit status is ours.
"""

import shutil
import signal
import subprocess
import sys
import threading

NO_SPACE = b"no space left on device"
ROOM_BYTES = 64 << 20  # several of the server's 8 MiB blocks
LOOK_S = 2.0


def run(store: str, command: list[str], told_to_stop: threading.Event) -> int | None:
    """One life of the server: its exit status; None: it shall be started anew."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    no_space = threading.Event()

    def pass_on() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            if NO_SPACE in line:
                no_space.set()

    threading.Thread(target=pass_on, daemon=True).start()
    while True:
        try:
            return process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            pass
        mended = no_space.is_set() and shutil.disk_usage(store).free >= ROOM_BYTES
        if mended or told_to_stop.is_set():
            process.terminate()
            status = process.wait()
            return status if told_to_stop.is_set() else None


def main() -> int:
    told_to_stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told_to_stop.set())
    store, *command = sys.argv[1:]
    while True:
        status = run(store, command, told_to_stop)
        if status is not None:
            return status
        print("keep.py: there is room on the disk again, starting anew", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
