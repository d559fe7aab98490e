"""What each field of a message means, in the words that stand beside it in the source.

A field has a comment on its line, or above it. What comes again and again with one meaning, such as
`epoch`, has none: RECURRING says it once for all. A docstring may explain one too, as `name`: so.
"""

import ast
import inspect
import io
import re
import tokenize
from types import ModuleType

# Fields that mean the same wherever they stand.
RECURRING = {
    "anchor_digests": "digest of each fragment's anchor",
    "at": "wall clock, in seconds since 1970",
    "accepted": "whether it was taken",
    "base": "version of the fragment that the contribution is measured against",
    "blob": "the payload: where its chunks are, how many, and their digest",
    "boot": "which start of the process",
    "codec": "how the values are encoded",
    "config_hash": "digest of the configuration, which must be the same for all",
    "cursor": "a place in the corpus",
    "digest": "digest of the payload",
    "donor": "learner that gives its inner state",
    "donor_incarnation": "which life of the donor",
    "epoch": "which history of the run",
    "fragment": "number of the fragment",
    "incarnation": "which life of the learner",
    "kind": "tells this record from the tape's others",
    "layout": "tensors of the model, in their order",
    "leader": "name of the syncer that leads",
    "learner": "name of the learner",
    "newcomer": "learner that gets the inner state",
    "newcomer_incarnation": "which life of the newcomer",
    "nonce": "made up for one request, so that its answer is known",
    "quorum": "learners that a merge needs",
    "reason": "why, in words for people",
    "restored": "the newest restore of the run; None: there was none",
    "round": "number of the round",
    "run": "name of the run",
    "run_id": "tells the run from a deleted one of the same name",
    "stamp": "how far the run is",
    "standby": "name of the syncer that stands by",
    "step_from": "inner step of the learner at which the contribution begins",
    "step_to": "inner step of the learner at which the contribution ends",
    "term": "which leadership of the syncer",
    "tokens_from": "tokens of the learner's life at which the contribution begins",
    "tokens_to": "tokens of the learner's life at which the contribution ends",
    "values": "how many numbers the payload holds",
    "versions": "committed version of each fragment",
}


def meanings(module: ModuleType) -> dict[str, dict[str, str]]:
    """Of every class in a module: what each field means; empty where nothing says it."""
    source = inspect.getsource(module)
    beside, above = _comments(source)
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            told = ast.get_docstring(node) or ""
            found[node.name] = {
                field.target.id: _meaning(field, field.target.id, beside, above, told)
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            }
    return found


def _meaning(
    field: ast.AnnAssign, name: str, beside: dict[int, str], above: dict[int, str], told: str
) -> str:
    lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
    own = [beside[line] for line in lines if line in beside]
    first = field.lineno
    while first - 1 in above:
        first -= 1
    before = " ".join(above[line] for line in range(first, field.lineno))
    if own or before:
        return " ".join([*([before] if before else []), *own])
    if said := re.search(rf"`{name}`: ([^;.]+)", told):
        return " ".join(said[1].split())
    return RECURRING.get(name, "")


def _comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """By their lines: those that follow code, and those that have a line of their own."""
    beside, above = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.lstrip().startswith("#")
            (above if alone else beside)[token.start[0]] = token.string.lstrip("# ")
    return beside, above
