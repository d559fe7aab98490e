"""What a site says of its devices is read, or refused with what to do."""

import pytest

from diloco_shared.spec.mesh import MeshSizes, WrongMesh, fitted, idle, mesh_of


@pytest.mark.parametrize(
    ("text", "sizes", "shown"),
    [
        ("fsdp=8", MeshSizes(fsdp=8), "fsdp=8"),
        (" data=2 , fsdp=4", MeshSizes(data=2, fsdp=4), "data=2,fsdp=4"),
        ("tensor=2,fsdp=4", MeshSizes(fsdp=4, tensor=2), "fsdp=4,tensor=2"),
        ("expert=4,fsdp=2", MeshSizes(fsdp=2, expert=4), "fsdp=2,expert=4"),
        ("fsdp=1", MeshSizes(), "fsdp=1"),
    ],
)
def test_a_mesh_is_read_and_shown(text: str, sizes: MeshSizes, shown: str) -> None:
    assert mesh_of(text) == sizes
    assert str(sizes) == shown and mesh_of(shown) == sizes


def test_auto_is_left_to_the_devices() -> None:
    assert mesh_of("auto") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'auto', or as 'data=2,fsdp=4'"),
        ("8", "'8' is neither"),
        ("rows=8", "'rows=8' is neither"),
        ("fsdp", "'fsdp' is neither"),
        ("fsdp=0", "1 to 4096 devices"),
        ("fsdp=-2", "1 to 4096 devices"),
        ("fsdp=²", "1 to 4096 devices"),
        ("fsdp=99999", "1 to 4096 devices"),
        ("fsdp=2,fsdp=4", "names fsdp twice"),
        ("experts=4", "'experts=4' is neither"),
    ],
)
def test_what_is_no_mesh_is_refused(text: str, words: str) -> None:
    with pytest.raises(WrongMesh, match=words):
        mesh_of(text)


@pytest.mark.parametrize(
    ("devices", "sequences", "used"), [(1, 8, 1), (8, 8, 8), (8, 12, 6), (8, 7, 7), (8, 1, 1)]
)
def test_auto_takes_the_devices_that_sequences_can_be_spread_over(
    devices: int, sequences: int, used: int
) -> None:
    sizes = fitted(None, devices, sequences)
    assert sizes == MeshSizes(fsdp=used)
    text = idle(sizes, devices, sequences)
    assert (
        text.startswith(f"{devices - used} of {devices} devices idle")
        if text
        else (used == devices)
    )


def test_a_mesh_that_cannot_be_is_refused_with_what_to_do() -> None:
    asked = MeshSizes(data=2, fsdp=4)
    assert fitted(asked, 8, 16) == fitted(asked, 9, 8) == asked
    with pytest.raises(WrongMesh, match="takes 8 devices, and this process has 4"):
        fitted(asked, 4, 16)
    with pytest.raises(WrongMesh, match="cannot be spread evenly over 8 devices"):
        fitted(asked, 8, 12)
    # The two of a pair step with the same sequences.
    assert fitted(MeshSizes(fsdp=4, tensor=2), 8, 12).batch_parts == 4
    # Those that share the experts do not.
    assert fitted(MeshSizes(fsdp=2, expert=4), 8, 16).batch_parts == 8
    with pytest.raises(WrongMesh, match="cannot be spread evenly over 8 devices"):
        fitted(MeshSizes(fsdp=2, expert=4), 8, 12)
