"""Fragments back into tensors, whatever they were cut into; and files that others can read."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from learner.exporting.publishing import spec
from safetensors import safe_open
from safetensors.numpy import load_file

from diloco_learner.exporting.assembling import NotAsPublished, applied, places
from diloco_learner.exporting.files import index_of, output_of, planned
from diloco_learner.exporting.writing_io import Spool, write_weights
from diloco_shared.hf.names import HfTensor, itself
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array, flatten
from diloco_shared.protocol.messages import Blob, PublicationManifest, Stamp, TensorSpec
from diloco_shared.spec.fragmentation import Layout

sizes = st.lists(st.integers(1, 12), max_size=3).map(tuple)
models = st.lists(sizes, min_size=1, max_size=10).map(
    lambda all_sizes: tuple(
        TensorSpec(name=f"t{n}", shape=size, embedding=n == 0) for n, size in enumerate(all_sizes)
    )
)


def drawn(tensors: tuple[TensorSpec, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {t.name: rng.normal(size=t.shape).astype(np.float32) for t in tensors}


def put(folder: Path, layout: Layout, made: dict[str, Any], order: list[int]) -> Spool:
    spool = Spool(folder, layout)
    for p in order:
        spool.put(p, flatten(layout, p, made))
    return spool


@examples(60)
@given(models, st.integers(1, 8), st.randoms(use_true_random=False))
def test_tensors_come_back_from_any_fragments_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: tuple[TensorSpec, ...],
    fragments: int,
    chance: Any,
) -> None:
    try:
        layout = Layout.build(tensors, fragments)
    except ValueError:
        assert len(tensors) < fragments, "one tensor for each would do"
        return
    made, order = drawn(tensors), list(range(fragments))
    chance.shuffle(order)
    found = put(tmp_path_factory.mktemp("s"), layout, made, order).tensors()
    assert list(found) == [t.name for t in tensors]
    for name, array in made.items():
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_a_tensor_that_is_cut_by_rows_lies_in_one_piece(tmp_path: Path) -> None:
    tensors = (
        TensorSpec(name="large", shape=(40, 3), embedding=True),
        TensorSpec(name="small", shape=(5,), embedding=False),
    )
    layout = Layout.build(tensors, 4)
    assert sum(piece.name == "large" for f in layout.fragments for piece in f) > 1
    assert [p.offset for p in places(layout).values()] == [0, 4 * 120]
    made = drawn(tensors)
    found = put(tmp_path, layout, made, [3, 1, 0, 2]).tensors()
    np.testing.assert_array_equal(found["large"], made["large"])


def test_more_tensors_than_files_may_be_open(tmp_path: Path) -> None:
    tensors = tuple(TensorSpec(name=f"t{n}", shape=(2,), embedding=False) for n in range(500))
    spool = put(tmp_path, Layout.build(tensors, 3), drawn(tensors), [0, 1, 2])
    before = len(os.listdir("/proc/self/fd"))
    found = spool.tensors()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    with pytest.raises(ValueError, match="read-only"):
        found["t7"][0] = 1.0


def test_what_was_never_put_is_missed(tmp_path: Path) -> None:
    tensors = (TensorSpec(name="a", shape=(4,), embedding=False),) * 1
    with pytest.raises(AssertionError, match="never put"):
        Spool(tmp_path, Layout.build(tensors, 1)).tensors()


# --- anchors -------------------------------------------------------------------------------------


def manifest(values_F: Any, name: str, prev: int, digest: str = "") -> PublicationManifest:
    return PublicationManifest(
        run="r",
        epoch=0,
        term=1,
        round=0,
        fragment=0,
        version=prev + 1 if prev >= 0 else 7,
        prev_version=prev,
        codec=name,
        values=len(values_F),
        anchor_digest=digest or digest_array(values_F),
        config_hash="0" * 32,
        participants=(),
        last_merged={},
        stamp=Stamp(round=0, steps=0, fraction=0.0, fraction_per_step=0.0),
        blob=Blob(subject="dn.r.0.0.7.1", bytes=1, chunk_bytes=1, chunks=1, digest="0" * 32),
    )


@pytest.mark.parametrize("name", codec.NAMES)
@pytest.mark.parametrize("size", [1, 255, 4097])
def test_a_delta_in_parts_gives_the_bits_of_the_whole(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_learner.exporting.assembling.PART_VALUES", 512)
    rng = np.random.default_rng(size)
    first_F, step_F = (rng.normal(size=size).astype(np.float32) for _ in range(2))
    key, delta = codec.encode("fp32", first_F), codec.encode(name, step_F)
    whole_F = first_F + codec.decode(name, delta, size)
    anchor_F = applied(None, manifest(first_F, "fp32", -1), key)
    assert applied(anchor_F, manifest(whole_F, name, 7), delta).tobytes() == whole_F.tobytes()


def test_an_anchor_of_another_digest_is_refused() -> None:
    values_F = np.ones(8, np.float32)
    payload = codec.encode("fp32", values_F)
    with pytest.raises(NotAsPublished, match="fragment 0 at version 7 has digest"):
        applied(None, manifest(values_F, "fp32", -1, digest="1" * 32), payload)
    with pytest.raises(NotAsPublished, match=r"dn\.r\.0\.0\.7\.1: .*bf16"):
        applied(None, manifest(values_F, "bf16", -1), payload)


# --- files ---------------------------------------------------------------------------------------


def test_files_are_cut_at_a_size_and_others_can_read_them(tmp_path: Path) -> None:
    layout = Layout.build(drawn_layout(), 3)
    made = drawn(layout.tensors)
    spool = put(tmp_path, layout, made, [0, 1, 2])
    tensors = output_of(spec(), layout)
    files = planned(tensors, "bf16", file_bytes_max=4000)
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    written = [write_weights(tmp_path, f, spool.tensors(), "bf16", lambda n: None) for f in files]
    found: dict[str, Any] = {}
    for file, described in zip(files, written, strict=True):
        assert (tmp_path / file.name).stat().st_size == described.bytes == file.bytes
        found |= load_file(tmp_path / file.name)
        with safe_open(tmp_path / file.name, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == made.keys()
    for name, array in made.items():
        assert found[name].tobytes() == array.astype(ml_dtypes.bfloat16).tobytes()
    index = index_of(files, "bf16")
    assert index is not None
    assert index["metadata"]["total_size"] == sum(2 * a.size for a in made.values())
    assert {n: load_file(tmp_path / f)[n].shape for n, f in index["weight_map"].items()} == {
        n: a.shape for n, a in made.items()
    }


def drawn_layout() -> tuple[TensorSpec, ...]:
    from diloco_shared.spec.shapes import shape_of, tensors

    return tensors(shape_of(spec().model))


def test_a_single_file_needs_no_index() -> None:
    files = planned([itself("a", (2, 3)), itself("b", ())], "fp32")
    assert [f.name for f in files] == ["model.safetensors"]
    assert index_of(files, "fp32") is None
    assert json.loads(files[0].head[8:])["b"] == {
        "dtype": "F32",
        "shape": [],
        "data_offsets": [24, 28],
    }
    assert len(files[0].head) % 8 == 0


def test_a_tensor_larger_than_a_file_has_one_of_its_own() -> None:
    files = planned([itself("a", (1,)), itself("b", (100,)), itself("c", (1,))], "fp32", 40)
    assert [[t.name for t in f.tensors] for f in files] == [["a"], ["b"], ["c"]]


def test_tensors_may_be_turned_joined_and_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_learner.exporting.writing_io.PART_BYTES", 64)
    tensors = tuple(
        TensorSpec(name=n, shape=s, embedding=False)
        for n, s in (("a", (5, 7)), ("b", (5, 7)), ("c", ()))
    )
    layout = Layout.build(tensors, 2)
    made = drawn(tensors)
    spool = put(tmp_path, layout, made, [0, 1])
    out = [
        HfTensor("turned", (7, 5), ("a",), lambda s: s["a"].T),
        HfTensor("both", (10, 7), ("a", "b"), lambda s: np.concatenate([s["a"], s["b"]])),
        itself("c", ()),
    ]
    moved: list[int] = []
    (file,) = planned(out, "fp32")
    write_weights(tmp_path, file, spool.tensors(), "fp32", moved.append)
    found = load_file(tmp_path / file.name)
    np.testing.assert_array_equal(found["turned"], made["a"].T)
    np.testing.assert_array_equal(found["both"], np.concatenate([made["a"], made["b"]]))
    np.testing.assert_array_equal(found["c"], made["c"])
    assert sum(moved) == file.bytes - len(file.head)
    assert len(moved) > 3, "in parts"


def test_a_tensor_of_a_shape_that_was_not_planned_is_refused(tmp_path: Path) -> None:
    tensors = (TensorSpec(name="a", shape=(2, 3), embedding=False),)
    spool = put(tmp_path, Layout.build(tensors, 1), drawn(tensors), [0])
    (file,) = planned([HfTensor("x", (2, 3), ("a",), lambda s: s["a"].T)], "fp32")
    with pytest.raises(ValueError, match=r"x was made with shape \(3, 2\), not \(2, 3\)"):
        write_weights(tmp_path, file, spool.tensors(), "fp32", lambda n: None)


def test_a_mapping_that_loses_or_invents_a_tensor_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, layout = spec(), Layout.build(drawn_layout(), 3)
    whole = output_of(of, layout)
    faults = {
        "would leave out the tensor": whole[1:],
        "have one name": (*whole, whole[0]),
        "has no tensor 'nobody'": (*whole, HfTensor("x", (1,), ("nobody",), lambda s: s["nobody"])),
    }
    for text, made in faults.items():
        monkeypatch.setattr(
            "diloco_learner.exporting.files.hf_tensors", lambda shape, made=made: iter(made)
        )
        with pytest.raises(ValueError, match=text):
            output_of(of, layout)


def test_a_model_of_ones_own_keeps_its_names() -> None:
    of = spec(model={"factory": "mine:model"})
    tensors = tuple(TensorSpec(name=n, shape=(3, 2), embedding=False) for n in ("w", "v"))
    assert [t.name for t in output_of(of, Layout.build(tensors, 2))] == ["w", "v"]
    assert list(itertools.chain(*(t.sources for t in output_of(of, Layout.build(tensors, 2))))) == [
        "w",
        "v",
    ]
