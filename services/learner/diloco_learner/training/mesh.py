"""Where a learner's state lies on the devices of its island.

One device has no mesh: its programs are compiled as if there were no others. On several, every leaf
of parameters, gradients and moments is cut as `models.sharding` says, and programs are compiled for
that, with XLA's own partitioning of what they compute.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from diloco_learner.models import ModelDef, from_named, to_named
from diloco_learner.models.sharding import BATCH, divided, names_of
from diloco_shared.spec.mesh import AXES, MeshSizes, WrongMesh

# Devices that wait for each other must be handed programs in one order: while a step is handed to
# one device after the other, an evaluation in another thread must not come between. It is held for
# as long as that takes, and not while a program is compiled or computed.
_TURN = threading.Lock()
# Of all values, those that every device of an fsdp axis holds whole: above it that is told.
WHOLE_SHARE_TOLD = 0.05


def mesh_over(sizes: MeshSizes, devices: Sequence[Any]) -> Mesh | None:
    """The first of these devices of jax, arranged; None where one is enough."""
    if sizes.devices == 1:
        return None
    shape = [getattr(sizes, axis) for axis in AXES]
    return Mesh(np.array(devices[: sizes.devices]).reshape(shape), AXES)


def shape_of(sizes: MeshSizes) -> AbstractMesh | None:
    """The same without devices, of which most may be on other hosts: what is cut over it, and
    traced, is as on the devices. Nothing can be compiled for it."""
    if sizes.devices == 1:
        return None
    return AbstractMesh(tuple(getattr(sizes, axis) for axis in AXES), AXES)


def of_all(sizes: MeshSizes, devices: int, sequences: int) -> MeshSizes:
    """A mesh that every process has a part of. Raises WrongMesh for one that is smaller."""
    if sizes.devices == devices:
        return sizes
    raise WrongMesh(
        f"the mesh {sizes} takes {sizes.devices} of the {devices} devices of this island's hosts, "
        f"and each must have its part: let inner.batch_sequences (it is {sequences}) be a multiple "
        "of all devices, or set DILOCO_MESH to a mesh of all of them"
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """How each leaf of the parameters lies on a mesh, by its name."""

    mesh: Mesh | AbstractMesh
    parameters: Mapping[str, PartitionSpec]
    shapes: Mapping[str, tuple[int, ...]]
    stacked: str | None

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, model: ModelDef, shapes: Any) -> "Placement":
        """`shapes`: the tree of the parameters' shapes.

        Raises ValueError for a `sharding` of the model that makes no sense, WrongMesh where an axis
        cuts no tensor at all.
        """
        named = {name: tuple(leaf.shape) for name, leaf in to_named(shapes).items()}
        sizes = {axis: int(n) for axis, n in mesh.shape.items()}
        specs: dict[str, PartitionSpec] = {}
        experts: list[bool] = []  # of what wishes that axis for itself: whether it is cut so
        for name, shape in named.items():
            wish = None if model.sharding is None else model.sharding(name, shape)
            specs[name] = divided(name, shape, wish, sizes, _first(name, model.stacked))
            if "expert" in (wish or ()):
                experts.append("expert" in specs[name])
        for axis in ("fsdp", "expert", "tensor"):
            cuts = any(axis in _axes(spec) for spec in specs.values())
            if sizes[axis] > 1 and not (any(experts) if axis == "expert" else cuts):
                raise WrongMesh(_useless(axis, sizes[axis], model, experts=bool(experts)))
        return cls(mesh, specs, named, model.stacked)

    @property
    def devices(self) -> int:
        return int(self.mesh.size)

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def flat(self) -> NamedSharding:
        """Of an array of one dimension: an equal part on each device, in their order."""
        return NamedSharding(self.mesh, PartitionSpec(AXES))

    def scope(self) -> AbstractContextManager[Any]:
        """In which a model's `spread` knows the mesh: while its programs are traced."""
        if isinstance(self.mesh, AbstractMesh):
            return jax.sharding.use_abstract_mesh(self.mesh)
        return jax.set_mesh(self.mesh)

    def turn(self) -> AbstractContextManager[Any]:
        """In which a program is handed to the devices, by one thread after the other."""
        return _TURN

    @property
    def batch_parts(self) -> int:
        """Among so many the sequences of a step are divided."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH)

    def batch(self, sequences: int) -> NamedSharding:
        """Of so many sequences (S, L + 1): spread evenly, or else on every device."""
        even = sequences % self.batch_parts == 0
        return NamedSharding(self.mesh, PartitionSpec(BATCH if even else None))

    def lying(self, tree: Any) -> dict[str, NamedSharding]:
        """Of every leaf, by name, of the parameters, or of what has the same tree within it.

        Leaves that are like no parameter, as counts are, are cut as those of a model that says
        nothing of it.
        """
        return {
            name: NamedSharding(self.mesh, self._of(name, tuple(leaf.shape)))
            for name, leaf in to_named(tree).items()
        }

    def tree(self, tree: Any) -> Any:
        """`lying`, as a tree like the given one."""
        return from_named(tree, self.lying(tree))

    def _of(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        path = name.split("/")
        for start in range(len(path)):
            own = "/".join(path[start:])
            if self.shapes.get(own) == shape:
                return self.parameters[own]
        return divided(name, shape, None, self.mesh.shape, _first(name, self.stacked))

    @property
    def whole_share(self) -> float:
        """Share of all values that each device of the axes that cut the state holds whole."""
        values = {name: math.prod(shape) for name, shape in self.shapes.items()}
        whole = sum(n for name, n in values.items() if not _axes(self.parameters[name]))
        return whole / max(sum(values.values()), 1)

    @property
    def warning(self) -> str:
        """That much of the model is not cut, in words, or ""."""
        if self.whole_share <= WHOLE_SHARE_TOLD:
            return ""
        largest = max(
            (name for name in self.shapes if not _axes(self.parameters[name])),
            key=lambda name: math.prod(self.shapes[name]),
        )
        return (
            f"{self.whole_share:.0%} of the model's values lie whole on each of {self.devices} "
            f"devices, the most in {largest} of shape {self.shapes[largest]}: none of its "
            "dimensions can be divided evenly. Take a number of devices that divides one, or "
            "widths that they divide"
        )


def _first(name: str, stacked: str | None) -> int:
    """The first dimension that may be cut: layers follow each other, on the same devices."""
    return int(stacked is not None and stacked in name.split("/"))


def _axes(spec: PartitionSpec) -> set[str]:
    return {a for axes in spec for a in names_of(axes)}


def _useless(axis: str, devices: int, model: ModelDef, *, experts: bool) -> str:
    if axis == "expert" and not experts:
        return (
            f"expert={devices} is for models with a mixture of experts, and this one says of no "
            "dimension that it lies on that axis: put these devices on the axis fsdp"
        )
    if axis == "expert":
        return (
            f"expert={devices} does not divide the experts of this model evenly: take a number of "
            "devices that does, and put the others on the axis fsdp"
        )
    if axis == "tensor" and model.sharding is None:
        return (
            f"tensor={devices} needs a model that says which dimensions that axis cuts: give it "
            "sharding(name, shape), or put these devices on the axis fsdp"
        )
    return (
        f"{axis}={devices} cuts no tensor of this model: no dimension that could lie on it is a "
        f"multiple of {devices}. Take another number of devices"
    )
