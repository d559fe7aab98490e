"""One learner on several processes: the losses, the bytes and the moments of one device.

What each process does is in `on_hosts.py`.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# In fp32: sums of other orders differ in the last bits.
CLOSE = 1e-5


def island(hosts: int, mesh: str, devices: int) -> dict[str, Any]:
    """What process 0 says; the others end because it has ended the island."""
    script = Path(__file__).with_name("on_hosts.py")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(hosts), str(index), mesh, str(devices)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(hosts)
    ]
    try:
        said = [process.communicate(timeout=800) for process in started]
    finally:
        for process in started:
            process.kill()
    assert started[0].returncode == 0, "\n".join(err[-2000:] for _, err in said)
    assert {process.returncode for process in started[1:]} == {1}
    assert "process 0 has ended the island" in said[1][1]
    found: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("hosts", "mesh", "devices"),
    [(2, "fsdp=2", 1), (2, "data=2,tensor=2", 2), (4, "fsdp=4", 1)],
)
def test_several_processes_are_one_device(hosts: int, mesh: str, devices: int) -> None:
    found = island(hosts, mesh, devices)
    assert found["devices"] == hosts * devices
    assert found["begins"], "fresh parameters are the same everywhere"
    np.testing.assert_allclose(*found["losses"], atol=CLOSE)
    assert len(set(found["losses"][0])) > 1
    assert found["moved"] and found["pieces"], "moments of one device, and back: the same bits"
    assert found["shared"], "what all give of moments and of a fragment is what one would send"
    assert found["adopted"], "what is published, in all its bits"
    np.testing.assert_allclose(*found["after"], atol=CLOSE)
    assert found["sent"] and all(found["sent"].values()), found["sent"]
    np.testing.assert_allclose(*found["evaluated"], atol=CLOSE)
    assert found["failed"].startswith("host 1 (") and "no room" in found["failed"]
    held = found["held"]
    assert held["same"], "anchors made of gathered parts, and adopted, are those of one host"
    assert held["own"] <= held["bytes"] / hosts * 1.2, "process 0 keeps its part of each anchor"
    assert held["others"] == 0, "and none of the anchors before"
    assert len(found["shown"]) == hosts - 1
