"""The command `dcp-decode`: parses, calls one command, and turns every failure into one line and an exit code.

A command is a module of `commands/`; it returns its exit code or raises a DcpDecodeError.
"""

from __future__ import annotations

import os
import sys

import click

from dcp_decode import __version__
from dcp_decode.commands.conclude import conclude
from dcp_decode.commands.run import run
from dcp_decode.errors import BAD_INPUT, DcpDecodeError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dcp-decode")
def commands() -> None:
    """Decode context parallelism (DCP) of sparse MLA models: verify and measure."""


for command in (run, conclude):
    commands.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script and of `python -m dcp_decode`."""
    sys.exit(run_command(arguments))


def run_command(arguments: list[str] | None = None) -> int:
    """Run one command line (None: this process's); the exit code."""
    try:
        result = commands.main(args=arguments, prog_name="dcp-decode", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return BAD_INPUT
    except click.ClickException as error:
        return _refuse(DcpDecodeError(" ".join(error.format_message().split())))
    except DcpDecodeError as error:
        return _refuse(error)
    return result if isinstance(result, int) else 0


def _refuse(error: DcpDecodeError) -> int:
    from dcp_decode.launcher import refuse  # imports torch: not for --help and usage errors of a quick look

    return refuse(error, os.environ)


if __name__ == "__main__":
    main()
