"""Settings of a coordinator process, from the environment (prefix DILOCO_)."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from diloco_shared.edges.crash_points import CrashAt
from diloco_shared.ids import Id


class Settings(BaseSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    model_config = SettingsConfigDict(env_prefix="DILOCO_", frozen=True)

    id: Id = Field("coordinator", description="This process's member id.")
    nats_url: str = Field("nats://127.0.0.1:4222", description="Where the bus is.")
    nats_token: str = Field("", description="Token for the bus, if it wants one.")
    data: Path = Field(Path("diloco-data"), description="Holds the admin token.")
    checkpoints: str = Field(
        "",
        description="Where run-wide checkpoints are unless the run says; <data>/checkpoints if "
        "empty. The same place for every process of a run.",
    )
    host: str = Field("127.0.0.1", description="Address of the API; loopback unless told so.")
    port: int = Field(8400, ge=0, le=65535, description="Port of the API; 0 takes a free one.")
    tls_cert: Path | None = Field(None, description="PEM certificate: the API speaks https.")
    tls_key: Path | None = Field(None, description="PEM key of tls_cert.")
    chaos: bool = Field(False, description="Whether faults may be requested at all.")
    log: str = Field("info", description="Log level.")
    crash_at: CrashAt = Field("", description="For tests: where to die; see crash_points.py.")
