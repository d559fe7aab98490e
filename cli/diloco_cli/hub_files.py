"""What commands on a hub's folder say of its files."""

from pathlib import Path

from diloco_cli.lines import say
from diloco_cli.words import INVALID, CliError, why
from diloco_shared.bus.nats.hub_config import ACCOUNTS
from diloco_shared.process import hub_folder

HERE = Path("hub")


def certified(folder: Path, name: str) -> None:
    path = hub_folder.certificate_of(folder.resolve(), name)
    if path.exists():
        say(f"{path}: give it to {name} alone, as DILOCO_NATS_CLIENT_CERT, and remove it here")


def reload(folder: Path, changed: str = ACCOUNTS) -> None:
    rest = hub_folder.reload(folder, changed=changed)
    say(rest or "the message server knows it")


def amiss(path: Path, error: ValueError | OSError) -> CliError:
    if isinstance(error, OSError):
        return CliError(f"{path} cannot be written: {why(error)}")
    return CliError(str(error), INVALID)
