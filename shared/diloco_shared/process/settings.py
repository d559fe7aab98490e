"""What every process of a cluster is told by its environment (prefix DILOCO_)."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from diloco_shared.process.crash_points import CrashAt
from diloco_shared.protocol.subjects import Id


class ProcessSettings(BaseSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    model_config = SettingsConfigDict(env_prefix="DILOCO_", frozen=True)

    nats_url: str = Field("nats://127.0.0.1:4222", description="Where the bus is.")
    nats_token: str = Field("", description="Token for the bus, if it wants one.")
    nats_credentials: str = Field(
        "",
        description="File of this process's identity, as the hub gave it to its site; beats the "
        "token. Read anew for every connection.",
    )
    data: Path = Field(Path("diloco-data"), description="What a member keeps is in <data>/<id>/.")
    checkpoints: str = Field(
        "",
        description="Where run-wide checkpoints are unless the run says; <data>/checkpoints if "
        "empty. The same place for every process of a run.",
    )
    chaos: bool = Field(False, description="Whether faults may be requested of this process.")
    log: str = Field("info", description="Log level.")
    crash_at: CrashAt = Field("", description="For tests: where to die; see crash_points.py.")

    @property
    def checkpoint_root(self) -> str:
        """Where run-wide checkpoints are unless the run says."""
        return self.checkpoints or str(self.data / "checkpoints")


class WorkerSettings(ProcessSettings):
    """Of a process that works for runs, and carries their data."""

    id: Id | Literal[""] = Field(
        "",
        description="This process's member id, for good. Empty: a name kept in the data folder; "
        "one that no other process uses, or a new one.",
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
    health_host: str = Field("127.0.0.1", description="Address of /healthz and /metrics.")
    health_port: int = Field(0, ge=0, le=65535, description="0 takes any free port.")
