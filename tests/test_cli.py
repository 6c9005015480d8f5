"""The last resort of the command line: an exception that nobody expected."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_decode import cli
from dcp_decode.errors import WAIT_EXPIRED


def broken(**_: Any) -> None:
    raise ZeroDivisionError("a defect\nof two lines")


LINE = (
    "error: ZeroDivisionError: a defect of two lines "
    "(a defect of dcp-decode; DCP_DECODE_TRACEBACK=1 shows its traceback)"
)


def test_a_defect_is_one_line_and_no_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.commands, "main", broken)
    assert cli.run_command([]) == WAIT_EXPIRED  # not 1, which means a wrong result
    assert capsys.readouterr().err == LINE + "\n"


def test_its_traceback_is_shown_on_demand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.commands, "main", broken)
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    assert cli.run_command([]) == WAIT_EXPIRED
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback (most recent call last):\n")
    assert "in broken" in errors
    assert errors.endswith(LINE + "\n")
