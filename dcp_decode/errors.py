"""Every refusal and failure the user can meet, each with the exit code that the results contract gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

VERIFIED = 0
WRONG_RESULT = 1
BAD_INPUT = 2
WAIT_EXPIRED = 3


LONGEST_VALUE = 300  # characters of a value in a message


def shown(value: object, text: Callable[[object], str] = repr) -> str:
    """A value as a message shows it: on one line, the middle left out if it is long."""
    try:
        whole = text(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a table thousands deep
        return f"<{type(value).__name__} too large to show>"
    whole = whole if whole.isprintable() else ascii(whole)
    half = LONGEST_VALUE // 2
    return whole if len(whole) <= LONGEST_VALUE else f"{whole[:half]} ... {whole[-half:]}"


class DcpDecodeError(Exception):
    """A failure with a one-line message for the user; `exit_code` is what the process ends with."""

    exit_code = BAD_INPUT


class ConfigError(DcpDecodeError):
    """A config, trace line, geometry or command-line value that is not allowed; names the key and what is."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{shown(key, str)} = {shown(value)}: {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed


class UnsupportedEnvironment(DcpDecodeError):
    """The machine, launcher or a package can't do what was asked; says what is missing."""


class WrongResult(DcpDecodeError):
    """A merged row left its derived error bound, or the needle test miscounted.

    error, bound, place: of the worst (row, head), where it is one of these that tells.
    """

    exit_code = WRONG_RESULT

    def __init__(
        self, message: str, error: float | None = None, bound: float | None = None, place: str | None = None
    ) -> None:
        super().__init__(message)
        self.error = error
        self.bound = bound
        self.place = place


class WaitFailed(DcpDecodeError):
    """A wait for peers can't end well. `expired_waits` says who waited for whom, one JSON-able dict a source rank."""

    exit_code = WAIT_EXPIRED

    def __init__(self, message: str, expired_waits: Sequence[Mapping[str, object]] = ()) -> None:
        super().__init__(message)
        self.expired_waits = [dict(wait) for wait in expired_waits]


class Interrupted(DcpDecodeError):
    """The command was told to stop before it was done."""

    exit_code = WAIT_EXPIRED


class RankDied(WaitFailed):
    """A peer process ended while this rank still needed it; names the rank."""


class ControlTimeout(WaitFailed):
    """A control-plane wait passed its deadline; names the label and the ranks that never came."""
