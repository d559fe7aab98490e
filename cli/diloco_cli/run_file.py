"""A run as a TOML file: read, with what only folders here tell of it; and written, every setting
or those that a plan chose."""

import os
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from diloco_cli.commands.options import first_of
from diloco_cli.words import INVALID, CliError, counted, why
from diloco_shared.reach.checkpoint_roots import roots_of
from diloco_shared.reach.local import at_home
from diloco_shared.spec.faults import SpecFault
from diloco_shared.spec.run import OF_CHECKPOINT, OF_RUN, Data, Model, RunSpec

# Columns of a comment.
COMMENT = 80


def read_run(file: Path) -> dict[str, Any]:
    """The tables of a run.toml, of which nothing is checked yet. Raises CliError."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CliError(f"{file} cannot be read: {why(error)}", INVALID) from None


def known_run(file: Path, data_root: str, checkpoints: str) -> tuple[RunSpec, str]:
    """A run.toml's run as `submit` would send it, and what nobody here knows of its weights.

    That is "" for most runs. Else the table [model] is as the file has it, and the shape of the
    model is unknown. Raises CliError for every fault. `data_root`: folders that a run may read.
    `checkpoints`: where run-wide checkpoints are.
    """
    body = read_run(file)
    try:
        places = roots_of(checkpoints, os.environ.get("DILOCO_CHECKPOINT_ROOTS", ""))
    except ValueError as error:
        raise CliError(str(error), INVALID) from None
    found = fill_in(body, first_of(data_root), checkpoints, places)
    unknown = _unknown(body, found)
    faults = [fault for fault in found if not (unknown and fault.path == "model.weights")]
    if not unknown and not any(fault.path == "model.weights" for fault in faults):
        return spec_of(body, file, faults), ""
    try:
        Model.model_validate(body["model"])
    except ValidationError:
        spec_of(body, file, faults)  # tells of it
    spec_of({**body, "model": _beside_weights(body["model"])}, file, faults)
    return RunSpec.model_validate(body), unknown


def _beside_weights(model: dict[str, Any]) -> dict[str, Any]:
    """The table with weights of which all is known: so the rest of the file can be looked at."""
    of_checkpoint = str(model["weights"]).startswith(OF_CHECKPOINT)
    weights = f"{OF_CHECKPOINT}a.b/000001" if of_checkpoint else "folder"
    given = {k: v for k, v in model.items() if k not in ("preset", "overrides")}
    return {**given, "weights": weights, "weights_digest": "0" * 32}


def spec_of(body: dict[str, Any], file: Path, known: Sequence[SpecFault] = ()) -> RunSpec:
    """What the tables of a file describe. Raises CliError with every fault, the `known` first."""
    from diloco_shared.checking import Invalid, check

    faults = [*known]
    try:
        spec = check(body)
    except Invalid as error:
        faults += error.faults
    if not faults:
        return spec
    lines = [f"  {fault.path}: {fault.message}" for fault in faults]
    raise CliError("\n".join([f"{file} has {counted(len(lines), 'fault')}", *lines]), INVALID)


def _unknown(body: dict[str, Any], found: Sequence[SpecFault]) -> str:
    """What is not known of the weights that a run begins from, after `fill_in` has found that."""
    model = body.get("model")
    named = model.get("weights") if isinstance(model, dict) else None
    if not isinstance(named, str) or body["model"].get("weights_digest"):
        return ""
    if named.startswith(OF_RUN):
        return (
            f"model.weights is {named}: what that run publishes, and which shape its model has, is "
            "known to its cluster alone, and to 'diloco submit'"
        )
    if named.startswith(OF_CHECKPOINT):
        why_not = next((f.message for f in found if f.path == "model.weights"), "it is not here")
        return (
            f"model.weights is {named}, which cannot be read here ({why_not}): which shape its "
            "model has is known to a coordinator that reaches it"
        )
    return ""


def fill_in(
    spec: dict[str, Any], root: Path, checkpoints: str = "", further: Sequence[str] = ()
) -> list[SpecFault]:
    """The weights to begin from, and which corpus every site needs; changes `spec`.

    Relative paths begin at `root`. What is not here is left as it is: it may be where learners are.
    `checkpoints`: where run-wide checkpoints are; none: a run that begins from one is left to the
    coordinator. `further`: where else they may be. Returns what is here and not sound.
    """
    faults = [*_fill_corpora(spec, root), *_fill_weights(spec, root, checkpoints, further)]
    return faults or _check_tokenizer(spec, root)


def _fill_corpora(spec: dict[str, Any], root: Path) -> list[SpecFault]:
    data, faults = spec.get("data"), []
    if not isinstance(data, dict):
        return []
    mixture = data.get("mixture")
    # A mixture takes the place of the source, whose digest would be one too many.
    parts = mixture if isinstance(mixture, list) and mixture else [data]
    for part in (p for p in parts if isinstance(p, dict)):
        try:
            digest = _corpus_digest(part, root)
        except ValueError as error:
            faults.append(SpecFault("data.source", str(error)))
            continue
        if digest is not None:
            part["digest"] = digest
    return faults


def _corpus_digest(part: dict[str, Any], root: Path) -> str | None:
    """Of a corpus that was prepared and lies here; none where it says one, or is made elsewhere."""
    source = part.get("source")
    if part.get("digest") or not isinstance(source, str) or not source or "\0" in source:
        return None
    from diloco_shared.corpora.prepared import digest_of, is_prepared, open_corpus

    folder = root / at_home(source)
    try:
        here = is_prepared(folder)
    except OSError:  # whoever submits may not look there, and learners may
        return None
    return digest_of(open_corpus(folder)) if here else None


def _fill_weights(
    spec: dict[str, Any], root: Path, checkpoints: str, further: Sequence[str]
) -> list[SpecFault]:
    model = spec.get("model")
    if not isinstance(model, dict) or not model.get("weights") or model.get("weights_digest"):
        return []
    from diloco_shared.checkpoints.checkpoints_io import CheckpointError, begun_from
    from diloco_shared.checkpoints.vault_io import VaultError
    from diloco_shared.hf.resolving import resolved
    from diloco_shared.hf.weights import WrongCheckpoint

    named = str(model["weights"])
    try:
        if not named.startswith((OF_CHECKPOINT, OF_RUN)):
            spec["model"] = resolved(model, root)
        elif named.startswith(OF_CHECKPOINT) and checkpoints:
            spec["model"] = begun_from(model, checkpoints, further)
    except (WrongCheckpoint, CheckpointError, VaultError) as error:
        return [SpecFault("model.weights", str(error))]
    return []


def _check_tokenizer(spec: dict[str, Any], root: Path) -> list[SpecFault]:
    """Tokens that are others than those of the weights, where both lie here. What is wrong with the
    tables themselves is told elsewhere."""
    from diloco_shared.corpora.prepared import is_prepared, open_corpus
    from diloco_shared.corpora.pretokenised import is_tokens
    from diloco_shared.corpora.sources import STDLIB
    from diloco_shared.corpora.tokenizers import load
    from diloco_shared.hf.belonging import Made, check_belongs, weights_folder

    try:
        model = Model.model_validate(spec.get("model", {}))
        data = Data.model_validate(spec.get("data", {}))
    except ValidationError:
        return []
    if (folder := weights_folder(model, root)) is None:
        return []
    for part in data.sources:
        path, of_python = root / at_home(part.source), part.source == STDLIB
        try:
            if not of_python and is_prepared(path):
                made = Made.of_corpus(open_corpus(path), part.source)
            elif of_python or (path.exists() and not is_tokens(path)):
                made = Made.by(load(data.tokenizer, root), part.source)
            else:
                continue
        except (ValueError, OSError):  # learners may have it, and say what is wrong there
            continue
        try:
            if made is not None:
                check_belongs(folder, made)
        except ValueError as error:
            return [SpecFault("data.tokenizer", str(error))]
    return []


# --------------------------------------------------------------------------------------------------
# Written.


def whole(spec: RunSpec) -> str:
    """Every setting of a run. TOML has no null: what is not set stands in a comment at the top."""
    unset: list[str] = []
    body = _set(spec.model_dump(mode="json", exclude={"id"}), "", unset)
    head = _comment(f"Not set: {', '.join(unset)}.") if unset else ""
    return head + tomli_w.dumps(body)


def _comment(text: str) -> str:
    """In lines that fit every terminal."""
    mark = "# "
    return textwrap.fill(text, COMMENT, initial_indent=mark, subsequent_indent=mark) + "\n"


def of_plan(found: dict[str, Any], parameters: float) -> str:
    """A run with the settings of a plan (`planner.plan`); model and data are to be named."""
    chosen = dict(found["settings"])
    learners, shards = chosen.pop("learners"), chosen.pop("syncer_shards")
    snapshots = chosen.pop("snapshot_every_rounds")
    body = {
        "name": "planned",
        "algorithm": {"preset": "long", "shards": shards, **chosen},
        "model": {"factory": "yourmodule:factory", "parameters": round(parameters)},
        "data": {"source": "/path/to/your/text"},
        "membership": {"learners_min": learners},
        "keeping": {"snapshot_every_rounds": snapshots},
        "budget": {"steps": round(found["predicted"]["steps"])},
    }
    return (
        "# From 'diloco plan'. Put in your own model (a preset, or module:factory), your data and\n"
        "# [inner] learning_rate; 'diloco config' checks the file, 'diloco submit' begins it.\n"
        + tomli_w.dumps(body)
    )


def _set(body: dict[str, Any], prefix: str, unset: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            unset.append(f"{prefix}{name}")
        else:
            found[name] = (
                _set(value, f"{prefix}{name}.", unset) if isinstance(value, dict) else value
            )
    return found
