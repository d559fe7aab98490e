"""What ended a process is said once for each fault."""

from structlog.testing import capture_logs

from diloco_shared.bus.port import Unavailable
from diloco_shared.process.faults import leaves, tell


def test_faults_are_told_without_the_groups_around_them() -> None:
    away, wrong = Unavailable("nobody answers"), ValueError("7")
    group = BaseExceptionGroup("outer", [away, BaseExceptionGroup("inner", [wrong])])
    assert leaves(group) == [away, wrong]
    assert leaves(wrong) == [wrong]
    with capture_logs() as said:
        tell(group, "nats://me:geheim@hub:4222")
    assert [(line["event"], line["error"]) for line in said] == [
        ("no bus", "nobody answers"),
        ("failed, to be started again", "ValueError('7')"),
    ]
    assert said[0]["url"] == "hub:4222"
