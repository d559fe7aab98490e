"""What a run may open on a learner's machine: files below the data roots, modules that are allowed.

    DataRoots.of("/corpora,/weights").path("books/prepared")     /corpora/books/prepared
    Factories.of("my_models,/home/ada/work").check("my_models.small:make")

A refusal is the same sentence whether there is a file or none, and names no folder of the site: a
run's reason is read by everybody who may look at the run.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Of a path in a specification: what Linux takes at most, with its final NUL.
PATH_CHARS_MAX = 4095
# Of a list in a setting: each path is compared with every entry, in each of a few dozen openings.
ENTRIES_MAX = 256
# An entry of the allowed factories for any module at all.
ANY = "*"


class OutOfReach(ValueError):
    """What is named is not for runs of this machine; the text says how to allow it."""


def entries(text: str, what: str) -> tuple[str, ...]:
    """A comma-separated setting. ValueError for more than anybody needs."""
    found = tuple(entry for part in text.split(",") if (entry := part.strip()))
    if len(found) > ENTRIES_MAX:
        raise ValueError(f"{what} has {len(found)} entries: at most {ENTRIES_MAX}")
    return found


def shown(text: str, most: int = 120) -> str:
    """In a message: quoted, escaped and cut."""
    return repr(text if len(text) <= most else f"{text[:most]}…")


# --------------------------------------------------------------------------------------------------
# Paths.


@dataclass(frozen=True, slots=True)
class DataRoots:
    """Folders that hold all that runs may read here; relative paths begin in the first one."""

    roots: tuple[Path, ...]

    @classmethod
    def of(cls, text: str) -> "DataRoots":
        """Comma-separated folders; the working directory where there is none."""
        found = tuple(Path(entry) for entry in entries(text, "DILOCO_DATA_ROOT"))
        return cls(found or (Path(),))

    def path(self, name: str) -> Path:
        """The file or folder that a specification means by `name`, links followed.

        Raises OutOfReach for all that is not below a root. What is there, it does not say.
        """
        path = Path(name)
        if "\0" in name or len(name) > PATH_CHARS_MAX:
            raise OutOfReach(
                f"the path {shown(name)} is none: it has a zero byte, or more than "
                f"{PATH_CHARS_MAX} characters"
            )
        if ".." in path.parts or name.startswith("~"):
            raise OutOfReach(
                f"the path {shown(name)} begins with '~' or has '..' in it, which a run may not "
                "use: write where it is below the data root, or its whole path"
            )
        found = _real(self.roots[0] / path)
        if found is None or not any(_is_in(found, root) for root in self.roots):
            raise OutOfReach(
                f"the path {shown(name)} is outside the folders that runs may read on this "
                "machine: put it below its data root, or let whoever runs the machine add the "
                "folder to DILOCO_DATA_ROOT (several are separated by commas)"
            )
        return found


# Where the paths of a specification are looked for: below the roots of a site, or, of the own
# commands of somebody who may read the files anyway, anywhere, relative ones from this folder.
Root = DataRoots | Path


def located(name: str, root: Root | None = None) -> Path:
    """What `name`, a path of a specification, means; every one that is opened comes from here.

    Raises OutOfReach where `root` bounds it.
    """
    if isinstance(root, DataRoots):
        return root.path(name)
    return (root or Path()) / at_home(name)


def at_home(name: str) -> Path:
    """A path that may begin with ~ or ~somebody; of a user that is not here it stays as it is."""
    return Path(os.path.expanduser(name))  # that of pathlib raises RuntimeError


def _real(path: Path) -> Path | None:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):  # links in a circle; a name that the system cannot spell
        return None


def _is_in(path: Path, root: Path) -> bool:
    real = _real(root)
    # A service whose supervisor starts it in / has said nothing: only "/" itself means all files.
    if real is None or (real == Path("/") and not root.is_absolute()):
        return False
    return path.is_relative_to(real)


# --------------------------------------------------------------------------------------------------
# Modules.


@dataclass(frozen=True, slots=True)
class Factories:
    """Whose modules a run's `model.factory` may name. Built-in models need none.

    `modules`: allowed with all below them. `folders`: a module or package that lies directly in one
    is allowed, so that software which is installed below a folder is not.
    """

    modules: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, text: str) -> "Factories":
        """Comma-separated: a module, a folder ('.' or with a slash in it), or '*' for any module.

        Raises ValueError for an entry that is none of these.
        """
        modules, folders = [], []
        for entry in entries(text, "DILOCO_FACTORIES"):
            if entry == "." or "/" in entry:
                folders.append(Path(entry))
            elif entry == ANY or all(part.isidentifier() for part in entry.split(".")):
                modules.append(entry)
            else:
                raise ValueError(
                    f"DILOCO_FACTORIES has the entry {shown(entry)}: give modules, folders ('.' or "
                    "with a slash), or '*', separated by commas"
                )
        return cls(tuple(modules), tuple(folders))

    def check(self, factory: str) -> None:
        """Raises OutOfReach for a module:factory that runs may not name here. Imports nothing."""
        module = factory.partition(":")[0]
        if ANY in self.modules or self._is_named(module) or self._lies_there(module):
            return
        raise OutOfReach(
            f"model.factory {shown(factory)} is not allowed on this machine: let whoever runs it "
            f"add the module {shown(module.partition('.')[0])}, or its folder, to DILOCO_FACTORIES "
            "and start the learner again; the built-in models need no permission"
        )

    def _is_named(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self.modules)

    def _lies_there(self, module: str) -> bool:
        top = module.partition(".")[0]
        if not self.folders or not top.isidentifier():
            return False
        places = _places(top)
        # What is not found may be there at the next attempt; its import says that it is missing.
        return places is None or (
            bool(places) and all(_is_one_of(place, self.folders) for place in places)
        )


def users_factories(environment: Mapping[str, str], here: Path) -> str:
    """DILOCO_FACTORIES for whoever runs learners on a machine of their own: as it is given, else
    what lies in this folder, or in one of PYTHONPATH.

    A folder whose name has a comma cannot be said so, and is left out.
    """
    if (given := environment.get("DILOCO_FACTORIES")) is not None:
        return given
    named = (Path(p) for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p)
    folders = dict.fromkeys(f"{path.absolute()}/" for path in (here, *named))
    return ",".join([folder for folder in folders if "," not in folder][:ENTRIES_MAX])


def _places(top: str) -> Sequence[Path] | None:
    """Folders that a module of the top level lies in: one, or those of a package without a file of
    its own; none of a built-in one. None where there is no such module. Executes nothing of it."""
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):  # one that was not imported from a file
        return ()
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return [Path(place).parent for place in spec.submodule_search_locations]
    return [Path(spec.origin).parent] if spec.has_location and spec.origin else ()


def _is_one_of(place: Path, folders: Sequence[Path]) -> bool:
    real = _real(place)
    return real is not None and any(real == _real(folder) for folder in folders)


# --------------------------------------------------------------------------------------------------
# Both, and the places of checkpoints.


@dataclass(frozen=True, slots=True)
class Reach:
    """All that runs may open on a machine. By default only what this software brings along.

    `checkpoints`: where run-wide checkpoints may be (`places`); the first is used where nobody says
    another one.
    """

    data: Root = DataRoots((Path(),))
    factories: Factories = Factories()
    checkpoints: tuple[str, ...] = ("",)

    @property
    def checkpoint_root(self) -> str:
        """Where a checkpoint is that is named without an address."""
        return self.checkpoints[0]
