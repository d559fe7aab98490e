"""What every process of a cluster is told by its environment (prefix DILOCO_)."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from diloco_shared.bus.nats.access import Address, TlsFiles
from diloco_shared.process.crash_points import CrashAt
from diloco_shared.protocol.subjects import Id
from diloco_shared.reach.places import roots_of

# Of a file with a secret: longer than any token, and far too short to be a mistaken model.
SECRET_BYTES_MAX = 4096


def secret_in(path: Path) -> str:
    """The one line of a file that holds a secret; ValueError says what is wrong with the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): see that it is there, and that the user "
            "of this process may read it"
        ) from None
    text = raw.decode("utf-8", errors="replace").strip()
    if len(raw) > SECRET_BYTES_MAX or not text.isprintable() or not text:
        raise ValueError(
            f"{path} holds no secret: it must be one line of text of at most "
            f"{SECRET_BYTES_MAX} bytes"
        )
    return text


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


class HubSettings(BaseSettings):
    """Where the bus is, and how it lets a process in; every field may be set as DILOCO_<FIELD>."""

    # What is wrong is told without what was given, since that may be a secret.
    model_config = SettingsConfigDict(env_prefix="DILOCO_", frozen=True, hide_input_in_errors=True)

    nats_url: str = Field("nats://127.0.0.1:4222", description="Where the bus is.")
    nats_token: str = Field("", description="Token for the bus, if it wants one.")
    nats_token_file: Path | None = Field(
        None,
        description="File that holds that token, as supervisors hand secrets to a process; give "
        "this or the token itself.",
    )
    nats_credentials: str = Field(
        "",
        description="File of this process's identity, as the hub gave it to its site; beats the "
        "token. Read anew for every connection.",
    )
    nats_ca: str = Field(
        "",
        description="PEM file of the authority that signed the bus's certificate, if it is the "
        "hub's own. Only that one is trusted then; else those of the system, or of SSL_CERT_FILE.",
    )
    nats_client_cert: str = Field(
        "", description="PEM file of this site's certificate, where the bus demands one."
    )
    nats_client_key: str = Field(
        "",
        description="PEM file of its key, without a password; not needed where the key lies in the "
        "file of the certificate.",
    )

    @model_validator(mode="before")
    @classmethod
    def _token_of_file(cls, given: Any) -> Any:
        """The token is read once, here; whoever needs it finds it in `nats_token`."""
        if not isinstance(given, dict) or not (file := given.get("nats_token_file")):
            return given
        token = secret_in(Path(file))
        if given.get("nats_token", "") not in ("", token):
            raise ValueError(
                f"DILOCO_NATS_TOKEN and {file} differ: unset the one that is not to be used"
            )
        return {**given, "nats_token": token}

    @property
    def nats_tls(self) -> TlsFiles | None:
        """None: as the URL and the bus say, with the authorities of the system."""
        return TlsFiles.named(self.nats_ca, self.nats_client_cert, self.nats_client_key)

    @property
    def hub(self) -> Address:
        """All of it, as every kind of connection takes it."""
        credentials = Path(self.nats_credentials) if self.nats_credentials else None
        token = self.nats_token or None
        return Address(self.nats_url, token, tls=self.nats_tls, credentials=credentials)


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
