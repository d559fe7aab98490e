"""A whole run, from a program: submitted, kept, followed, and begun again."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_client import OVER, ApiError, Client, Unreachable


def until(there: Callable[[], Any], within_s: float = 600.0) -> Any:
    """What `there` finds as soon as it finds something."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if found := there():
                return found
        except Unreachable as error:  # the run goes on meanwhile
            print(f"asks again: {error}")
        time.sleep(1.0)
    raise SystemExit(f"not there after {within_s:.0f} s")


def whole_run(client: Client, run: str) -> None:
    """Submit a run, keep it as it is on its way, and begin another one with that."""
    spec = {"name": run, "model": {"preset": "nano"}, "budget": {"steps": 1000}}
    # With a key of your own you may ask twice: it makes one run.
    client.create_run(spec, idempotency_key=f"{run}-1")

    # After the first merge there is something to keep.
    until(lambda: [r for r in client.rounds(run) if r["outcome"] == "committed"])
    number = client.checkpoint(run)["number"]
    until(lambda: [kept for kept in client.checkpoints(run) if kept["number"] == number])

    until(lambda: client.run(run)["state"] in OVER, within_s=3600.0)
    for event in client.events(run):
        print(event["kind"], event["text"])

    # Without `as_run` the run itself goes back, if it is not over.
    again = client.restore(run, number, as_run=f"{run}-again")
    print(client.run(again["run"])["reason"])


token = Path("diloco-data/admin-token").read_text().split()[0]
with Client("http://127.0.0.1:8400", token) as client:
    try:
        whole_run(client, "by-script")
    except ApiError as error:  # the coordinator said no
        raise SystemExit(f"{error.detail} {error.errors}") from None
