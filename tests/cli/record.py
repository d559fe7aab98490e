"""Records what a live coordinator answers, for the golden screens of `test_screens.py`.

    DILOCO_URL=http://127.0.0.1:8400 DILOCO_TOKEN=$(cat diloco-data/admin-token) \
        python tests/cli/record.py RUN

Writes tests/cli/screens/answers.json: the newest rounds and events of the run, its status, members,
faults, checkpoints, tokens and audit log. Then `UPDATE_SCREENS=1 pytest tests/cli/test_screens.py`
writes the screens anew: look at every one of them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from diloco_client import Client

ANSWERS = Path(__file__).parent / "screens" / "answers.json"
# Enough for every kind of line, and not so much that nobody reads the screens.
ROUNDS, EVENTS = 12, 60


def recorded(client: Client, run: str) -> dict[str, Any]:
    """Answers by method and path."""
    one = client.run(run)
    found: dict[str, Any] = {
        "GET /v1/runs": {"runs": [one], "next": None},
        f"GET /v1/runs/{run}": one,
        f"GET /v1/runs/{run}/rounds": {"rounds": client.rounds(run)[-ROUNDS:], "next": None},
        f"GET /v1/runs/{run}/metrics": client.metrics(run),
        f"GET /v1/runs/{run}/recoveries": {"recoveries": client.recoveries(run)},
        "GET /v1/events": {"events": client.events(run)[-EVENTS:], "next": 1 << 40},
        "GET /v1/members": client.all_members(),
        "GET /v1/chaos": {"faults": client.faults()},
        "GET /v1/tokens": {"tokens": client.tokens()},
        "GET /v1/access": client.access(),
        "GET /v1/audit": {"rows": client.audit()},
        f"GET /v1/runs/{run}/checkpoints": {"checkpoints": client.checkpoints(run)},
    }
    for ref in client.checkpoints(run):
        place = f"GET /v1/runs/{run}/checkpoints/{ref['number']}"
        found[place] = client.show_checkpoint(run, ref["number"])
    return found


def main() -> None:
    with Client(os.environ["DILOCO_URL"], os.environ["DILOCO_TOKEN"]) as client:
        answers = recorded(client, sys.argv[1])
    ANSWERS.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
