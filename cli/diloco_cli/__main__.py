"""The `diloco` command."""

import sys

from diloco_cli.commands import app_for
from diloco_cli.words import INTERRUPTED, CliError, plain


def main() -> None:
    """Run the command; one sentence and a status for whatever goes wrong."""
    app = app_for(sys.argv[1] if len(sys.argv) > 1 else "")
    try:
        app()
    except CliError as error:
        _fail(error)
    except ExceptionGroup as group:
        foreseen, others = group.split(CliError)
        if foreseen is None or others is not None:
            raise
        _fail(_first(foreseen))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does.
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if (said := _of_the_api(error)) is None:
            raise
        _fail(said)


def _of_the_api(error: Exception) -> CliError | None:
    """Only a verb that imports the client can meet its errors: no other waits for the import."""
    if "diloco_client" not in sys.modules:
        return None
    from diloco_cli.api import explained
    from diloco_client import ApiError, Unreachable

    return explained(error) if isinstance(error, ApiError | Unreachable) else None


def _first(group: ExceptionGroup[CliError]) -> CliError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


def _fail(error: CliError) -> None:
    sys.stderr.write(plain(f"diloco: {error}\n"))
    sys.exit(error.status)


if __name__ == "__main__":
    main()
