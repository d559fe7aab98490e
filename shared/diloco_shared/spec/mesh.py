"""How the devices of one island share a learner's work: the site's word, and no part of a run.

    "auto"              over the devices that there are, on the axis fsdp
    "fsdp=8"            eight devices: each holds an eighth of the state, and steps with an
                        eighth of each batch
    "data=2,fsdp=4"     two groups of four: each group holds the whole state
    "fsdp=4,tensor=2"   four pairs: the two of a pair share the matrices of each layer
    "fsdp=2,expert=4"   two groups of four: each of the four has a quarter of the experts

What goes over the wire, and what is kept on disks, is the same whatever the mesh.
"""

from dataclasses import dataclass

# In the order in which devices are counted: neighbours share a layer's matrices, which costs most.
AXES = ("data", "fsdp", "expert", "tensor")
AUTO = "auto"
# Of one process: more digits than this are no number of devices, but a slip.
DEVICES_MAX = 4096


class WrongMesh(ValueError):
    """The devices cannot be arranged so; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Devices along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.batch_parts * self.tensor

    @property
    def batch_parts(self) -> int:
        """Into how many parts the sequences of a step are cut."""
        return self.data * self.fsdp * self.expert

    @property
    def state_parts(self) -> int:
        """Into how many parts parameters, moments and gradients are cut."""
        return self.fsdp * self.expert * self.tensor

    def __str__(self) -> str:
        shown = [f"{axis}={size}" for axis in AXES if (size := getattr(self, axis)) > 1]
        return ",".join(shown) or "fsdp=1"


def mesh_of(text: str) -> MeshSizes | None:
    """What a setting says; None for "auto". Raises WrongMesh."""
    if text.strip() == AUTO:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, number = (piece.strip() for piece in part.partition("="))
        if axis not in AXES or not equals:
            raise WrongMesh(
                f"a mesh reads 'auto', or as 'data=2,fsdp=4' with axes of {', '.join(AXES)}; "
                f"{part.strip()!r} is neither"
            )
        if axis in sizes:
            raise WrongMesh(f"a mesh names each axis once, and {text!r} names {axis} twice")
        if not (number.isascii() and number.isdigit() and 1 <= int(number) <= DEVICES_MAX):
            raise WrongMesh(
                f"along an axis of a mesh lie 1 to {DEVICES_MAX} devices; {part.strip()!r} says "
                "something else"
            )
        sizes[axis] = int(number)
    return MeshSizes(**sizes)


def fitted(wanted: MeshSizes | None, devices: int, sequences: int) -> MeshSizes:
    """The mesh of a learner with so many devices, whose steps take `sequences` at a time.

    "Auto" takes as many devices as the sequences can be spread over evenly: others would idle, or
    do again what their neighbours do. Raises WrongMesh where a mesh that was asked for cannot be.
    """
    if wanted is None:
        return MeshSizes(fsdp=max(n for n in range(1, devices + 1) if sequences % n == 0))
    if wanted.devices > devices:
        raise WrongMesh(
            f"the mesh {wanted} takes {wanted.devices} devices, and this process has {devices}: "
            "set DILOCO_MESH to fewer, or give it more"
        )
    if sequences % wanted.batch_parts:
        raise WrongMesh(
            f"inner.batch_sequences = {sequences} cannot be spread evenly over "
            f"{wanted.batch_parts} devices (data x fsdp x expert of the mesh {wanted}): set it to "
            "a multiple of that, or DILOCO_MESH to a mesh whose data x fsdp x expert divides it"
        )
    return wanted


def idle(sizes: MeshSizes, devices: int, sequences: int) -> str:
    """That some of the devices of a process have nothing to do, in words, or ""."""
    if sizes.devices == devices:
        return ""
    return (
        f"{devices - sizes.devices} of {devices} devices idle, since the mesh is {sizes}: let "
        f"inner.batch_sequences (it is {sequences}) be a multiple of {devices}, with DILOCO_MESH "
        "'auto' or of that many, or give this process fewer devices"
    )
