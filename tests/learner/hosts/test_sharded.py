"""What makes a checkpoint of several hosts whole, who checks which file, and what hosts tell."""

import numpy as np
import pytest

from diloco_learner.hosts.sharded import (
    TEXT_MAX,
    CompleteCheckpoint,
    Damaged,
    Told,
    described,
    fault_of,
    faults_of,
    is_sequence,
    is_whole,
    share,
)

LEAVES = described({"0/mu/w": np.zeros((4, 8), np.float32), "0/count": np.zeros((), np.int32)})
FILES = {f"moments/ocdbt.process_{n}/d/{n}": (1000 * n, f"{n:032x}") for n in range(1, 8)}
WHOLE = CompleteCheckpoint(LEAVES, "layers", FILES)


def test_what_is_written_last_says_what_there_must_be() -> None:
    name, data = WHOLE.encoded()
    assert is_whole(name) and CompleteCheckpoint.decoded(name, data) == WHOLE
    WHOLE.check(LEAVES, "layers")


def test_a_changed_byte_of_it_is_noticed_wherever_it_is() -> None:
    name, data = WHOLE.encoded()
    for at in range(0, len(data), 7):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(Damaged, match="is not what was written"):
            CompleteCheckpoint.decoded(name, changed)
    for short in (b"", data[:-1]):
        with pytest.raises(Damaged):
            CompleteCheckpoint.decoded(name, short)


@pytest.mark.parametrize(
    "leaves",
    [
        LEAVES | {"0/nu/w": ("float32", (4, 8))},
        {"0/mu/w": LEAVES["0/mu/w"]},
        LEAVES | {"0/mu/w": ("float32", (8, 4))},
        LEAVES | {"0/mu/w": ("bfloat16", (4, 8))},
    ],
)
def test_another_model_has_other_leaves(leaves: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    with pytest.raises(Damaged, match="another model"):
        WHOLE.check(leaves, "layers")


def test_layers_that_lie_otherwise_are_another_model() -> None:
    with pytest.raises(Damaged, match="another model"):
        WHOLE.check(LEAVES, None)


@pytest.mark.parametrize("hosts", [1, 2, 3, 9])
def test_hosts_together_check_every_file_once_and_about_as_much_each(hosts: int) -> None:
    shares = [share(FILES, index, hosts) for index in range(hosts)]
    assert sorted(name for some in shares for name in some) == sorted(FILES)
    loads = [sum(FILES[name][0] for name in some) for some in shares]
    assert max(loads) - min(loads) <= max(size for size, _ in FILES.values())


def test_names_that_are_none() -> None:
    assert not is_whole("whole.json") and not is_whole("x" + WHOLE.encoded()[0])
    assert is_sequence("3000001000006720") and not is_sequence(".look-a")


def test_what_hosts_tell_arrives_and_names_them() -> None:
    told = Told("", FILES)
    assert Told.decoded(np.frombuffer(told.encoded(), np.uint8)) == told
    names = {0: "process 0", 1: "host 1 (a)", 2: "host 2 (b)"}
    assert faults_of({0: told, 1: told}, names) == ""
    full = Told("no space left on device")
    assert faults_of({0: told, 1: full}, names) == "host 1 (a): no space left on device"
    said = faults_of({0: Told("it hangs"), 1: full, 2: full}, names)
    assert said == "process 0: it hangs; host 1 (a), host 2 (b): no space left on device"


def test_of_what_is_wrapped_the_innermost_reason_is_told() -> None:
    try:
        try:
            raise ValueError("OUT_OF_RANGE: a chunk\nand much more")
        except ValueError as error:
            raise RuntimeError("while reading") from error
    except RuntimeError as error:
        assert fault_of(error) == "OUT_OF_RANGE: a chunk"
    assert fault_of(TimeoutError()) == "TimeoutError"
    path = f"/{'very/long/' * 30}moments"
    long = ValueError(
        f'RESOURCE_EXHAUSTED: Error writing "mu" at "{path}": Failed to write 8 bytes to file 4: '
        "No space left on device [os_error_code='28'] [tensorstore_spec='{}']"
    )
    text = fault_of(long)
    assert len(text) == TEXT_MAX and text.startswith("RESOURCE_EXHAUSTED: Error writing")
    assert text.endswith("No space left on device"), "the reason is not cut off"
    assert fault_of(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
