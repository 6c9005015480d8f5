"""Every refusal and failure the user can meet, each with the exit code that the results contract gives it."""

from __future__ import annotations

VERIFIED = 0
WRONG_RESULT = 1
BAD_INPUT = 2
WAIT_EXPIRED = 3


class DcpDecodeError(Exception):
    """A failure with a one-line message for the user; `exit_code` is what the process ends with."""

    exit_code = BAD_INPUT


class ConfigError(DcpDecodeError):
    """A config, trace line, geometry or command-line value that is not allowed; names the key and what is."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key} = {value!r}: {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed


class UnsupportedEnvironment(DcpDecodeError):
    """The machine, launcher or a package can't do what was asked; says what is missing."""


class WrongResult(DcpDecodeError):
    """A merged row left its derived error bound, or the needle test miscounted."""

    exit_code = WRONG_RESULT


class RankDied(DcpDecodeError):
    """A peer process ended while this rank still needed it; names the rank."""

    exit_code = WAIT_EXPIRED
