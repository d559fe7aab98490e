"""The `diloco` command."""

import sys

from diloco_cli.cluster import explained
from diloco_cli.faults import CliError
from diloco_client import ApiError, Unreachable


def main() -> None:
    """Run the command; one sentence and a status for whatever goes wrong."""
    from diloco_cli.commands import app

    try:
        app()
    except CliError as error:
        sys.stderr.write(f"diloco: {error}\n")
        sys.exit(error.status)
    except (ApiError, Unreachable) as error:
        sys.stderr.write(f"diloco: {explained(error)}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
