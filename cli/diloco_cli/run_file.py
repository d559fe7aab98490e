"""A run as the TOML file that one would write: every setting, or those that a plan chose."""

from typing import Any

import tomli_w

from diloco_shared.spec.run import RunSpec


def whole(spec: RunSpec) -> str:
    """Every setting of a run. TOML has no null: what is not set stands in a comment at the top."""
    unset: list[str] = []
    body = _set(spec.model_dump(mode="json", exclude={"id"}), "", unset)
    head = f"# Not set: {', '.join(unset)}.\n" if unset else ""
    return head + tomli_w.dumps(body)


def of_plan(found: dict[str, Any], parameters: float) -> str:
    """A run with the settings of a plan (`planner.plan`); model and data are to be named."""
    chosen = dict(found["settings"])
    learners, shards = chosen.pop("learners"), chosen.pop("syncer_shards")
    body = {
        "name": "planned",
        "algorithm": {"preset": "long", "shards": shards, **chosen},
        "model": {"factory": "yourmodule:factory", "parameters": round(parameters)},
        "data": {"source": "/path/to/your/text"},
        "membership": {"learners_min": learners},
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
