"""Why a kernel can't run a configuration: a typed reason, and the error that carries it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from dcp_decode.errors import DcpDecodeError


@dataclass(frozen=True)
class Refusal:
    """A typed refusal: the reason, whose value is the sentence that a user reads, and the values that caused it."""

    kernel: ClassVar[str]

    reason: enum.Enum
    detail: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason.value} ({self.detail})"


class Refused(DcpDecodeError):
    """A kernel was asked for a configuration that it refuses; `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
