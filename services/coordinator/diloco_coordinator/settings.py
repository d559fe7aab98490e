"""Settings of a coordinator process, from the environment (prefix DILOCO_)."""

from pathlib import Path

from pydantic import Field

from diloco_shared.process.settings import ProcessSettings
from diloco_shared.protocol.subjects import Id


class Settings(ProcessSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    id: Id = Field("coordinator", description="This process's member id.")
    host: str = Field("127.0.0.1", description="Address of the API; loopback unless told so.")
    port: int = Field(8400, ge=0, le=65535, description="Port of the API; 0 takes a free one.")
    tls_cert: Path | None = Field(None, description="PEM certificate: the API speaks https.")
    tls_key: Path | None = Field(None, description="PEM key of tls_cert.")
