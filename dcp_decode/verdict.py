"""The verdict on rows against their references: errors and bounds per (row, head), and which of them failed and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp_decode.errors import WrongResult
from dcp_decode.numerics import BF16_NAN


@dataclass(frozen=True)
class Worst:
    """The (row, head) whose error against the oracle comes nearest to its bound, or exceeds it most."""

    row: int
    head: int
    error: float
    bound: float


@dataclass(frozen=True)
class Verdict:
    """Relative errors and bounds [R, H] (FP64), `column_use` = max over columns of error / slack, `passed` [R, H]."""

    error_oracle: torch.Tensor
    bound_oracle: torch.Tensor
    error_twin: torch.Tensor
    bound_twin: torch.Tensor
    column_use: torch.Tensor
    passed: torch.Tensor
    problem: str

    @property
    def ok(self) -> bool:
        return bool(self.passed.all())

    @property
    def worst(self) -> Worst:
        """Largest error / bound against the oracle; a failed (row, head) comes before any that passed."""
        use = torch.where(self.bound_oracle > 0, self.error_oracle / self.bound_oracle, self.error_oracle)
        use = torch.where(self.passed, use.nan_to_num(nan=0.0), torch.inf)
        row, head = divmod(int(use.flatten().argmax()), use.shape[1])
        return Worst(row, head, float(self.error_oracle[row, head]), float(self.bound_oracle[row, head]))

    def require(self, label: str, place: str | None = None, first_row: int = 0) -> None:
        """Raise WrongResult, prefixed by `label`, unless every (row, head) passed.

        place, first_row: where these rows are, if not at `label`, and the number there of row 0.
        """
        if self.ok:
            return
        worst, message = self.worst, f"{label}: {self.problem}"
        if not worst.error > 0:  # NaN, or a row that must be NaN: no error says how wrong it is
            raise WrongResult(message)
        raise WrongResult(message, worst.error, worst.bound, f"{place or label}, row {first_row + worst.row}")


def judge(
    out: torch.Tensor,
    oracle: torch.Tensor,
    twin: torch.Tensor,
    slack: torch.Tensor,
    poisoned: torch.Tensor,
    empty: torch.Tensor,
) -> Verdict:
    """Compare BF16 rows [R, H, 512] with the references; comparisons are written so that a NaN never passes."""
    values = out.to(torch.float64)
    difference = (values - twin).abs()
    column_use = torch.where(difference == 0, 0.0, difference / slack).nan_to_num(nan=torch.inf).amax(-1)
    twin_norm, oracle_norm = _norm_or_one(twin), _norm_or_one(oracle)
    slack_norm = torch.linalg.vector_norm(slack, dim=-1)
    error_twin = torch.linalg.vector_norm(difference, dim=-1) / twin_norm
    error_oracle = torch.linalg.vector_norm(values - oracle, dim=-1) / oracle_norm
    bound_twin = slack_norm / twin_norm
    bound_oracle = (torch.linalg.vector_norm(twin - oracle, dim=-1) + slack_norm) / oracle_norm
    inside = (column_use <= 1) & (error_twin <= bound_twin) & (error_oracle <= bound_oracle)
    inside = torch.where(empty[:, None], (values == 0).all(-1), inside)
    canonical = (out.contiguous().view(torch.int16) == BF16_NAN).all(-1)
    passed = torch.where(poisoned, canonical, inside)
    problem = ""
    if not bool(passed.all()):
        row, head = (~passed).nonzero()[0].tolist()
        where = f"row {row} head {head} ({int((~passed).sum())} of {passed.numel()} (row, head) failed)"
        if poisoned[row, head]:
            problem = f"{where}: every column must be the canonical NaN 0x7FFF (a selected key or the query is NaN)"
        elif empty[row]:
            problem = f"{where}: a row without keys must be zero"
        else:
            use = torch.where(difference[row, head] == 0, 0.0, difference[row, head] / slack[row, head])
            column = int(use.nan_to_num(nan=torch.inf).argmax())
            problem = (
                f"{where}: error {error_oracle[row, head]:.3g} against the oracle "
                f"(bound {bound_oracle[row, head]:.3g}), {error_twin[row, head]:.3g} against the twin "
                f"(bound {bound_twin[row, head]:.3g}); worst column {column} is "
                f"{values[row, head, column]:.6g}, expected {twin[row, head, column]:.6g} "
                f"+- {slack[row, head, column]:.2g}"
            )
    quiet = torch.where(poisoned, 0.0, 1.0) > 0
    return Verdict(
        error_oracle.where(quiet, torch.zeros_like(error_oracle)),
        bound_oracle,
        error_twin.where(quiet, torch.zeros_like(error_twin)),
        bound_twin,
        column_use.where(quiet, torch.zeros_like(column_use)),
        passed,
        problem,
    )


def _norm_or_one(rows: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.vector_norm(rows, dim=-1)
    return torch.where(norm > 0, norm, 1.0)
