"""Soak: rounds of the same run under injected faults, each of which must end with the undisturbed run's digest.

    round 0: undisturbed -> reference digest;  rounds 1, 2, ...: other faults each -> equal digest, or a named failure

Delays and stops are shorter than the deadline of a mailbox wait, so nothing may fail. A round is one run of the config
(service.max_steps steps); the time limit is looked at between rounds.

Measured (2-core x86-64 CPU machine, busy with other work; 8 ranks, configs/soak.toml, 10,000 steps in one round): 527 s
undisturbed, 665 s with 5,441 delays of 274 s in all, one digest (results/soak-cpu-10000.json).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dcp_decode.config import RunConfig
from dcp_decode.errors import VERIFIED, WAIT_EXPIRED, WRONG_RESULT, ConfigError
from dcp_decode.faults import FaultCounts, FaultPlan
from dcp_decode.forensics.conclusion import keep
from dcp_decode.rank_process import Body
from dcp_decode.records import Plan, read_records, write_plan
from dcp_decode.results import Conclusion, conclude
from dcp_decode.scratch import scratch_folder
from dcp_decode.supervisor import supervise

KINDS = ("delays", "stops")
DELAY_SHARE = 0.01
LONGEST_DELAY_SECONDS = 0.2
STOP_SHARE = 0.001
STOP_SECONDS = 0.3
ROUND_SEEDS = 1_000_003  # rounds of neighbouring workload seeds share no fault seed

# Makes the body of a round's ranks from its faults and the folder for `write_counts`.
MakeBody = Callable[[FaultPlan, Path], Body]


@dataclass(frozen=True)
class Round:
    """One finished round, for whoever shows progress. number 0 is the undisturbed one."""

    number: int
    seconds: float
    digest: str | None
    faults: FaultCounts


def parse_kinds(text: str) -> tuple[str, ...]:
    """The kinds of faults of a comma-separated list. Raises ConfigError."""
    kinds = tuple(kind.strip() for kind in text.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError("--faults", text, f"must be a comma-separated list of {', '.join(KINDS)}")
    return kinds


def soak(
    plan: Plan,
    config: RunConfig,
    kinds: tuple[str, ...],
    seconds: float,
    make_body: MakeBody,
    on_round: Callable[[Round], None],
) -> Conclusion:
    """Run rounds until `seconds` have passed (one with faults at least), or one fails or ends with another digest.

    The conclusion is the last round's, with the key `soak` in its document.
    """
    shortest = 3 * max(LONGEST_DELAY_SECONDS, STOP_SECONDS)
    if config.mailbox.deadline_seconds < shortest:
        raise ConfigError(
            "mailbox.deadline_seconds", config.mailbox.deadline_seconds, f"must be at least {shortest:g} in a soak"
        )
    started = time.monotonic()
    conclusion, first = _run_round(plan, config, FaultPlan(), make_body, 0, None)
    on_round(first)
    total = FaultCounts()
    number = 0
    round_seconds = []
    while conclusion.exit_code == VERIFIED and (number == 0 or time.monotonic() - started < seconds):
        number += 1
        faults = fault_plan(kinds, config.workload.seed, number)
        conclusion, latest = _run_round(plan, config, faults, make_body, number, first.digest)
        _add(total, latest.faults)
        round_seconds.append(latest.seconds)
        on_round(latest)
    summary: dict[str, Any] = {
        "faults": list(kinds),
        "rounds": number,
        "steps": number * (conclusion.document["steps"] or 0),
        "seconds": time.monotonic() - started,
        "undisturbed_seconds": first.seconds,
        "round_seconds": round_seconds,
        "undisturbed_digest": first.digest,
        "digests_equal": conclusion.exit_code == VERIFIED,
        "injected": asdict(total),
    }
    document = conclusion.document | {"soak": summary}
    return Conclusion(conclusion.exit_code, conclusion.error, conclusion.dead_ranks, document)


def fault_plan(kinds: tuple[str, ...], seed: int, number: int) -> FaultPlan:
    """The faults of a round."""
    return FaultPlan(
        seed=seed * ROUND_SEEDS + number,
        delay_share=DELAY_SHARE if "delays" in kinds else 0.0,
        longest_delay_seconds=LONGEST_DELAY_SECONDS,
        stop_share=STOP_SHARE if "stops" in kinds else 0.0,
        stop_seconds=STOP_SECONDS,
    )


def write_counts(folder: Path, rank: int, counts: FaultCounts) -> None:
    """Leave what a rank's process has injected beside its record."""
    (folder / f"faults-{rank}.json").write_text(json.dumps(asdict(counts)))


def read_counts(folder: Path) -> FaultCounts:
    """The sum over the processes that left their counts."""
    total = FaultCounts()
    for path in folder.glob("faults-*.json"):
        _add(total, FaultCounts(**json.loads(path.read_text())))
    return total


def _run_round(
    plan: Plan, config: RunConfig, faults: FaultPlan, make_body: MakeBody, number: int, undisturbed: str | None
) -> tuple[Conclusion, Round]:
    """undisturbed: the digest of round 0, unless this is that one."""
    started = time.monotonic()
    with scratch_folder() as folder:
        write_plan(folder, plan)
        told_to_stop = supervise(
            make_body(faults, folder),
            plan.processes,
            folder,
            wait_deadline_seconds=config.mailbox.deadline_seconds,
            control_deadline_seconds=config.mailbox.control_deadline_seconds,
        )
        conclusion = conclude(plan, read_records(folder))
        digest = conclusion.document["digest"]
        if conclusion.exit_code == VERIFIED and number > 0 and digest != undisturbed:
            error = f"wrong result: digest {digest} of round {number}, undisturbed it is {undisturbed}"
            verdict = {"verified": False, "exit_code": WRONG_RESULT, "error": error}
            conclusion = Conclusion(WRONG_RESULT, error, (), conclusion.document | verdict)
        elif conclusion.exit_code == VERIFIED and told_to_stop:  # its ranks had ended before they heard of it
            verdict = {"exit_code": WAIT_EXPIRED, "error": "told to stop"}
            conclusion = Conclusion(WAIT_EXPIRED, "told to stop", (), conclusion.document | verdict)
        conclusion = keep(conclusion, plan, folder)  # while the folder is there
        counts = read_counts(folder)
    return conclusion, Round(number, time.monotonic() - started, digest, counts)


def _add(total: FaultCounts, more: FaultCounts) -> None:
    for one in fields(FaultCounts):
        setattr(total, one.name, getattr(total, one.name) + getattr(more, one.name))
