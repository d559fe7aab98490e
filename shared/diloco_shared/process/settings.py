"""What every process of a cluster is told by its environment (prefix DILOCO_)."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import NoDecode

from diloco_shared.process.connecting import HubSettings
from diloco_shared.process.crash_points import CrashAt
from diloco_shared.protocol.subjects import Id
from diloco_shared.reach.checkpoint_roots import roots_of


def said_of(error: ValueError) -> str:
    """What is wrong with the settings, in one line that names each variable of the environment."""
    if not isinstance(error, ValidationError):
        return str(error)
    # Without what was given: that may be a secret.
    found = error.errors(include_url=False, include_input=False, include_context=False)
    said = [(e["loc"], e["msg"].removeprefix("Value error, ")) for e in found]
    return "; ".join(
        f"DILOCO_{'_'.join(map(str, where)).upper()}: {what}" if where else what
        for where, what in said
    )


class ProcessSettings(HubSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    data: Path = Field(Path("diloco-data"), description="What a member keeps is in <data>/<id>/.")
    checkpoints: str = Field(
        "",
        description="Where run-wide checkpoints are unless the run says; <data>/checkpoints if "
        "empty. The same place for every process of a run.",
    )
    checkpoint_roots: str = Field(
        "",
        description="Further places, separated by commas, that requests and runs may name for "
        "run-wide checkpoints: folders, or file://, gs://, s3://, each with all below it.",
    )
    chaos: bool = Field(False, description="Whether faults may be requested of this process.")
    log: str = Field("info", description="Log level: debug, info, warning or error.")
    log_format: Literal["text", "json"] = Field(
        "text", description="json: each line of the log is one JSON object, for machines."
    )
    health_host: str = Field(
        "127.0.0.1",
        description="Address of /healthz, /readyz and /metrics, which ask for no token; loopback "
        "unless told so.",
    )
    health_port: int = Field(0, ge=0, le=65535, description="Their port; 0 takes any free one.")
    crash_at: CrashAt = Field("", description="For tests: where to die; see crash_points.py.")

    @property
    def checkpoint_root(self) -> str:
        """Where run-wide checkpoints are unless the run says."""
        return self.checkpoints or str(self.data / "checkpoints")

    @property
    def checkpoint_places(self) -> tuple[str, ...]:
        """All places that a request or a run may name for them; the first is `checkpoint_root`."""
        return roots_of(self.checkpoint_root, self.checkpoint_roots)


class WorkerSettings(ProcessSettings):
    """Of a process that works for runs, and carries their data."""

    id: Id | Literal[""] = Field(
        "",
        description="This process's member id, for good. Empty: a name kept in the data folder; "
        "one that no other process uses, or a new one.",
    )
    ids: Annotated[tuple[Id, ...], NoDecode] = Field(
        (),
        description="Names, separated by commas, of which this process takes one that no other "
        "process on its data folder has: those that the hub lets its site use. For containers that "
        "are alike. Not beside DILOCO_ID.",
    )
    connections: int = Field(
        1,
        ge=1,
        le=16,
        description="TCP connections that carry one payload together. 1 is best on a LAN; over a "
        "long link, where one is bounded by its buffers and by loss, 4 gave twice the rate.",
    )
    uplink_bytes_per_s: float = Field(
        0.0, ge=0, description="Most payload bytes sent per second, on average; 0: no limit."
    )
    downlink_bytes_per_s: float = Field(
        0.0, ge=0, description="Most payload bytes fetched per second, on average; 0: no limit."
    )

    @field_validator("ids", mode="before")
    @classmethod
    def _separated(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        return tuple(name for part in given.split(",") if (name := part.strip()))

    @model_validator(mode="after")
    def _one_way_to_a_name(self) -> Self:
        if self.id and self.ids:
            raise ValueError("DILOCO_ID and DILOCO_IDS are both given: unset one of them")
        return self
