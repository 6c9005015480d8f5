"""The command `dcp-decode`: parses, calls one command, and turns every failure into one line and an exit code.

A command is a module of `commands/`; it returns its exit code or raises a DcpDecodeError.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import click

from dcp_decode import __version__
from dcp_decode.commands.build import build
from dcp_decode.commands.checkpoint import checkpoint
from dcp_decode.commands.ci_job import ci_job
from dcp_decode.commands.compare import compare
from dcp_decode.commands.conclude import conclude
from dcp_decode.commands.doctor import doctor
from dcp_decode.commands.explain import explain
from dcp_decode.commands.run import run
from dcp_decode.commands.soak import soak
from dcp_decode.errors import BAD_INPUT, WAIT_EXPIRED, DcpDecodeError, Interrupted, UnsupportedEnvironment, shown
from dcp_decode.records import RECORDS_VARIABLE, RankRecord, write_record

REFUSAL_SECONDS = 10.0
TRACEBACK_VARIABLE = "DCP_DECODE_TRACEBACK"


class Defect(DcpDecodeError):
    """An exception that nobody expected, which is this package's own fault."""

    exit_code = WAIT_EXPIRED

    def __init__(self, error: Exception) -> None:
        text = shown(error, lambda value: " ".join(str(value).split()))
        super().__init__(
            f"{type(error).__name__}: {text} (a defect of dcp-decode; {TRACEBACK_VARIABLE}=1 shows its traceback)"
        )


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dcp-decode")
def commands() -> None:
    """Decode context parallelism (DCP) of sparse MLA models: verify and measure."""


for command in (run, soak, build, checkpoint, compare, doctor, ci_job, explain, conclude):
    commands.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run one command line (None: this process's), all output flushed; never returns."""
    for name in ("stdin", "stdout", "stderr"):  # those that were closed: no later file may take their descriptors
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    exit_code = run_command(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        exit_code = exit_code or BAD_INPUT
        with contextlib.suppress(OSError):
            print(f"error: standard output: {error.strerror}", file=sys.stderr, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
    sys.exit(exit_code)


def run_command(arguments: list[str] | None = None) -> int:
    """Run one command line (None: this process's); the exit code."""
    try:
        result = commands.main(args=arguments, prog_name="dcp-decode", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return BAD_INPUT
    except click.ClickException as error:
        return _refuse(DcpDecodeError(shown(" ".join(error.format_message().split()), str)), os.environ)
    except click.Abort:
        return _refuse(Interrupted("told to stop (SIGINT)"), os.environ)
    except DcpDecodeError as error:
        return _refuse(error, os.environ)
    except OSError as error:  # a full disk, a folder that can't be written: never the program's fault
        where = error.filename or "standard output or a file"
        return _refuse(UnsupportedEnvironment(f"{where}: {error.strerror or error}"), os.environ)
    except SystemExit:  # click's answer to a closed pipe
        return _refuse(UnsupportedEnvironment("standard output: Broken pipe"), os.environ)
    except Exception as error:  # uncaught it would end with 1, which means a wrong result
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        return _refuse(Defect(error), os.environ)
    return result if isinstance(result, int) else 0


def _refuse(error: DcpDecodeError, environment: Mapping[str, str]) -> int:
    """Report an error met before the ranks started: once for the group, also under a launcher; the exit code."""
    given = next(
        (environment[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in environment), ""
    )
    rank = int(given) if given.isascii() and given.isdecimal() else 0
    folder = environment.get(RECORDS_VARIABLE)
    if folder:
        now = time.time()
        with contextlib.suppress(OSError):  # the error itself must be told
            write_record(
                Path(folder),
                RankRecord(rank, os.getpid(), socket.gethostname(), "failed", error.exit_code, now, str(error)),
            )
    if rank == 0:
        with contextlib.suppress(OSError):  # the exit code still says it
            print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        # The first rank to leave makes torchrun and mpirun end the others: that must be rank 0, after its line.
        time.sleep(REFUSAL_SECONDS)
    return error.exit_code
