"""What a process has imported stays for as long as it lives, and is no garbage.

Python looks through all objects for garbage from time to time, and holds every thread meanwhile:
0.07 s after a coordinator's imports, 0.15 s after a learner's, which is longer than anything may
hold an event loop (loop_watch.HELD_S).

    with importing():
        from diloco_syncer.app import serve
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Nothing is collected meanwhile, which saves a sixth of the time, and what is there
    afterwards is never looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
