"""`python -m dcp_decode` and the console script: the command line, told to stop also while it is still imported."""

from __future__ import annotations

import sys

from dcp_decode.errors import Interrupted


def main() -> None:
    """Run this process's command line; never returns."""
    try:
        from dcp_decode.cli import main as run_command_line
    except KeyboardInterrupt:
        error = Interrupted("told to stop (SIGINT)")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    run_command_line()


if __name__ == "__main__":
    main()
