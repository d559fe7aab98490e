"""Every setting of a run with its default and the reason for it."""

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from diloco_shared.config import PRESETS, RunSpec


def explain() -> list[str]:
    """One line per setting, by path."""
    return [*_lines("", RunSpec), "", *_presets()]


def _lines(prefix: str, model: type[BaseModel]) -> list[str]:
    lines: list[str] = []
    for name, field in model.model_fields.items():
        path, kind = f"{prefix}{name}", field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += _lines(path + ".", kind)
            continue
        default = "required" if field.default is PydanticUndefined else repr(field.default)
        if field.default_factory is not None:
            default = "empty"
        if prefix == "algorithm." and name in PRESETS["long"]:
            default = "by preset"
        lines.append(f"{path} = {default}: {field.description or ''}")
    return lines


def _presets() -> list[str]:
    return [
        f"preset {name}: " + ", ".join(f"{k} = {v}" for k, v in settings.items())
        for name, settings in PRESETS.items()
    ]
