"""The inner state as bytes: those of safetensors, written and read in place."""

import json
import subprocess
import sys
from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save

from diloco_learner.recovery import moments
from diloco_learner.recovery.moments import (
    DTYPES,
    Handed,
    finite,
    pack,
    pieces,
    size_of,
    views,
)
from diloco_shared.numerics.compiled import parallel_for

ARRAYS = {
    "1/mu/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "1/count": np.array(7, np.int32),
    "half": np.arange(3).astype(ml_dtypes.bfloat16),
    "odd": np.arange(3, dtype=np.uint8),
    "ä": np.zeros((0, 4), np.float64),
}


@examples(60)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.sampled_from([d for d in DTYPES.values() if d.kind in "fiu"]).flatmap(
            lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))
        ),
        max_size=6,
    )
)
def test_the_bytes_are_those_of_the_format(arrays: dict[str, np.ndarray]) -> None:
    contiguous = {k: np.array(v, order="C") for k, v in arrays.items()}
    data = pack(arrays)
    assert data == save(contiguous) and len(data) == size_of(arrays)
    for name, array in views(data).items():
        assert array.dtype == arrays[name].dtype and array.shape == arrays[name].shape
        assert array.tobytes() == contiguous[name].tobytes()


def test_device_arrays_and_pieces_give_the_same_bytes() -> None:
    device = {k: jnp.asarray(v) for k, v in ARRAYS.items() if v.dtype != np.float64}
    data = pack(device)
    assert data == b"".join(bytes(piece) for piece in pieces(device))
    assert views(data).keys() == device.keys()


def test_all_processors_copy_and_the_bytes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training stands still meanwhile: of a model of 12B parameters that was more than a minute."""
    spread: list[tuple[int, int]] = []

    def counted(work: Callable[[int, int], None], ranges: int, threads: int) -> None:
        spread.append((ranges, threads))
        parallel_for(work, ranges, threads)

    alone = bytes(pack(ARRAYS))
    monkeypatch.setattr(moments, "parallel_for", counted)
    monkeypatch.setattr(moments, "cores", lambda: 3)
    monkeypatch.setattr(moments, "_FILL_BYTES", 5)
    assert pack(ARRAYS) == alone
    assert {threads for _, threads in spread} == {3}
    assert max(ranges for ranges, _ in spread) > 3


# Sets up a learner process as its settings say, on a machine of three processors.
PROCESS = """
import os, sys
os.sched_getaffinity = lambda process: {0, 1, 2}
import diloco_learner.__main__ as learner
from diloco_learner.settings import Settings

learner._set_up_jax(Settings(threads=int(sys.argv[1]), cache=""))
from diloco_learner.recovery import moments

moments.parallel_for = lambda work, ranges, threads: print(threads)
moments.fill_together(memoryview(bytearray(4)), b"abcd")
"""


@pytest.mark.whole
@pytest.mark.parametrize(("threads", "used"), [(0, 3), (1, 1), (2, 2), (8, 3)])
def test_no_more_processors_copy_than_the_learner_may_use(threads: int, used: int) -> None:
    """Where learners share cores, each has one: the others take steps meanwhile."""
    command = [sys.executable, "-c", PROCESS, str(threads)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert ran.stdout.split() == [str(used)]


def broken(how: str) -> bytes:
    data = bytes(pack(ARRAYS))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    match how:
        case "overlap":
            header["1/count"]["data_offsets"] = [0, 4]
        case "size":
            header["1/mu/w"]["shape"] = [2, 4]
        case "type":
            header["odd"]["dtype"] = "U7"
        case "negative":
            header["odd"]["shape"] = [-3]
        case "list":
            header = list(header)
        case "long header":
            return (1 << 60).to_bytes(8, "little") + data[8:]
        case "short":
            return data[:-1]
        case "long":
            return data + b"x"
        case "nothing":
            return b""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.parametrize(
    "how",
    ["overlap", "size", "type", "negative", "list", "long header", "short", "long", "nothing"],
)
def test_what_does_not_fit_its_header_is_refused(how: str) -> None:
    """I11"""
    with pytest.raises(ValueError, match="not an inner state"):
        views(broken(how))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("at", [0, (1 << 20) - 1, 1 << 20, -1])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    bad: float, dtype: type, at: int
) -> None:
    array = np.zeros((3, 1 << 19), dtype)
    assert finite(array)
    array.reshape(-1)[at] = bad
    assert not finite(array)


def test_a_copy_is_gone_once_it_is_wherever_it_goes() -> None:
    handed = Handed(b"state")
    assert handed.share()
    handed.let_go()
    assert not handed.gone and handed.data == b"state"
    handed.let_go()
    assert handed.gone and not handed.share()


def test_shares_of_a_copy_are_let_go_once_it_has_arrived_everywhere() -> None:
    """Of an island, every host of which keeps its share until it is told."""

    class Shares:
        times = 0

        def let_go(self) -> None:
            self.times += 1

    shares = Shares()
    handed = Handed(shares)
    assert handed.share()
    handed.let_go()
    assert shares.times == 0 and not handed.gone
    handed.let_go()
    assert shares.times == 1 and handed.gone
    assert not handed.share()
