"""A run that begins from the weights of another one: exported, downloaded, named as a folder.

Learners speak to the message server alone, and never to the coordinator. So what they begin from
lies in a folder that they reach, and whoever submits the run puts it there.
"""

import os
import re
from pathlib import Path
from typing import Any

from diloco_cli.commands.export import fetched
from diloco_cli.downloading import Taken, Target
from diloco_cli.words import FAILED, INVALID, CliError
from diloco_client import Client
from diloco_shared.protocol.subjects import ID_PATTERN
from diloco_shared.spec.run import OF_RUN

# Below the data root, so that learners of this machine find it by a relative path.
FOLDER = "from-runs"
# A name of a run, and perhaps the version of every fragment.
_NAMED = re.compile(rf"(?P<run>{ID_PATTERN[1:-1]})(?:@(?P<version>\d{{1,9}}))?")
# Folders of one run below `FOLDER`: each holds a whole model, and nobody keeps so many by intent.
FOLDERS_MAX = 1000


def names_a_run(spec: dict[str, Any]) -> bool:
    """Whether `model.weights` of what is to be submitted reads run:NAME."""
    model = spec.get("model")
    named = model.get("weights") if isinstance(model, dict) else None
    return isinstance(named, str) and named.startswith(OF_RUN)


def put_weights(client: Client, spec: dict[str, Any], root: Path, *, quiet: bool) -> None:
    """Replace run:NAME in `model.weights` by a folder below `root` with what NAME has published.

    A digest beside it says what they must be; else whoever reads the folder fills it in. Shows
    progress. Raises CliError, and what the client raises.
    """
    model = spec["model"]
    named, wanted = str(model["weights"]).removeprefix(OF_RUN), model.pop("weights_digest", "")
    found = _NAMED.fullmatch(named)
    if found is None:
        text = f"model.weights {OF_RUN}{named[:80]}: give run:NAME or run:NAME@VERSION"
        raise CliError(text, INVALID)
    run, version = found["run"], found["version"]
    wish = {"version": version and int(version), "checkpoint": None, "dtype": "fp32"}
    folder, target = _next(root, run)
    fetched(client, run, wish, target, quiet=quiet, goes_on=True)
    if not (root / folder / "config.json").exists():
        raise CliError(
            f"run {run!r} trains a model of its own kind: begin from a checkpoint of it instead "
            f"(diloco checkpoint create {run}; model.weights = 'checkpoint:FOLDER/NUMBER')",
            INVALID,
        )
    _check(root / folder, wanted)
    model["weights"] = str(folder)


def _check(folder: Path, wanted: str) -> None:
    """CliError for other weights than the file says."""
    from diloco_shared.hf.weights import WrongCheckpoint, digest_of, open_weights

    try:
        found = digest_of(open_weights(folder)) if wanted else ""
    except WrongCheckpoint as error:
        raise CliError(str(error), FAILED) from None
    if found != wanted:
        raise CliError(
            f"the run publishes other weights than the file says: their digest is {found}, and "
            f"model.weights_digest is {wanted}. Name the version that was meant (run:NAME@VERSION)",
            INVALID,
        )


def _next(root: Path, run: str) -> tuple[Path, Target]:
    """The first folder of the run that is not there, and that no other command downloads into;
    what was cut off before goes on in it."""
    for n in range(1, FOLDERS_MAX + 1):
        folder = Path(FOLDER) / f"{run}-{n}"
        if os.path.exists(root / folder):  # False where nobody may look: Target says so
            continue
        try:
            return folder, Target(root / folder)
        except Taken:
            continue
    text = f"{root / FOLDER} has {FOLDERS_MAX} folders of run {run!r}: remove what no run needs"
    raise CliError(text, FAILED)
