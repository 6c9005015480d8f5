"""From a failed run's archive to its first cause: a pure function of what the ranks and the launcher wrote.

In the order of `results.conclude`: a wrong result; a rank that died; the least advanced wait that expired; any other
failure, which blames no rank (the control store was lost or silent, or ranks were out of step). The wait's source is
looked at through the eyes of the rank that waited, because it may have been unable to say anything itself, and because
its own account is of a later moment:

    stopped rank   its process was seen stopped
    dead rank      its process was seen gone
    lost words     it had pushed the use (its counters have moved past it), or a part of the row is there
    late rank      none of these: as far as was seen it lived, and had not pushed

A rank without a record was killed, but only after the fact if a peer saw it alive or stopped when its wait expired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dcp_decode.errors import WRONG_RESULT
from dcp_decode.forensics.archive import Case
from dcp_decode.forensics.evidence import ControlWords, ExpiredWait, PeerProcess, TornRow
from dcp_decode.results import wait_advance

Kind = Literal[
    "wrong data",
    "dead rank",
    "crashed rank",
    "stopped rank",
    "late rank",
    "lost words",
    "other failure",
    "told to stop",
]

# Stage that waits -> stage that writes what it waits for, by route; and the mailboxes that it reads.
WRITERS = {
    "push": {"TOPK": "TOPK", "SPARSE": "QUERY", "MERGE": "SPARSE"},
    "local": {"TOPK": "TOPK", "SPARSE": "QUERY", "MERGE": "PUSH"},
}
MAILBOXES = {"TOPK": ("topk",), "SPARSE": ("query",), "MERGE": ("lse_log2", "payload")}
STACK_FRAMES = 6


@dataclass(frozen=True)
class Diagnosis:
    """kind, rank: the first cause. sentence: says it in words. details: what supports it, a line each."""

    kind: Kind
    rank: int | None
    sentence: str
    details: tuple[str, ...] = ()


def diagnose(case: Case) -> Diagnosis:
    """The first cause of a failed run."""
    records = sorted(case.records.values(), key=lambda record: record.ended)
    wrong = next((record for record in records if record.exit_code == WRONG_RESULT), None)
    if wrong is not None:
        return Diagnosis("wrong data", wrong.rank, f"rank {wrong.rank}: {wrong.error}")
    if case.document.exit_code == WRONG_RESULT:  # of the run as a whole, such as a digest: every rank ended well
        return Diagnosis("wrong data", None, str(case.document.error))
    states = states_seen(case)
    # First who left no record, as in `results.conclude`: a GPU fails over the memory of a rank that was killed.
    for rank in range(case.processes):
        if rank not in case.records and states.get(rank, "gone") == "gone":
            return _death(case, rank, False, f"its process{_process(case, rank)} ended without a record")
    for record in records:
        if record.outcome in ("crashed", "killed"):
            return _death(case, record.rank, record.outcome == "crashed", str(record.error))
    found = waits(case)
    # Of waits at one place, one that has an explanation of its own is the cause of those that have none.
    first = [wait for wait in found if _advance(wait) == _advance(found[0])]
    candidates = [_of_wait(case, wait, states.get(wait.source_rank)) for wait in first]
    if candidates:
        return next((one for one in candidates if one.kind != "late rank"), candidates[0])
    for record in records:
        if record.outcome == "failed" and not record.consequence:
            return Diagnosis("other failure", None, f"rank {record.rank}: {record.error}")
    return Diagnosis("told to stop", None, "the ranks were told to stop (SIGTERM), and none waited for another")


def waits(case: Case) -> list[ExpiredWait]:
    """Who waited for whom, the least advanced first: waits that expired, and control-plane waits under way."""
    found = [wait for expired in case.expired.values() for wait in expired]
    for evidence in case.evidence.values():
        reports = [mailbox.control.report for mailbox in evidence.mailboxes]
        reports += [words.report for words in evidence.peers.values()]  # of ranks that could not say it themselves
        found += [*evidence.waits, *(report for report in reports if report is not None)]
    unique = {(wait.waiting_rank, wait.source_rank, str(wait)): wait for wait in found}
    return sorted(unique.values(), key=lambda wait: (_advance(wait), wait.waiting_rank, wait.source_rank))


def states_seen(case: Case) -> dict[int, str]:
    """The state of each rank's process at the earliest look of a peer; not of one that had left a record and ended."""
    seen: dict[int, str] = {}
    for evidence in sorted(case.evidence.values(), key=lambda evidence: evidence.collected):
        for rank, process in evidence.processes.items():
            if process.state is not None and not (process.state == "gone" and rank in case.records):
                seen.setdefault(rank, process.state)
    return seen


def processes(case: Case) -> dict[int, PeerProcess]:
    """The process of each rank, as far as anybody knew it."""
    known = {rank: process for evidence in case.evidence.values() for rank, process in evidence.processes.items()}
    for rank, record in case.records.items():
        known[rank] = PeerProcess(hostname=record.hostname, process_id=record.process_id, state=None)
    return known


def control_words(case: Case, rank: int) -> ControlWords | None:
    """A rank's control words by its own account, or else by the latest one of a peer."""
    accounts = sorted(case.evidence.values(), key=lambda evidence: evidence.collected, reverse=True)
    found = [mailbox.control for evidence in accounts for mailbox in evidence.mailboxes if mailbox.rank == rank]
    found += [evidence.peers[rank] for evidence in accounts if rank in evidence.peers]
    return found[0] if found else None


def torn_rows(case: Case, rank: int) -> list[tuple[str, int, int, TornRow]]:
    """(mailbox, generation, source, row) of every torn row in a rank's own mailboxes."""
    mailboxes = [one for evidence in case.evidence.values() for one in evidence.mailboxes if one.rank == rank]
    return [
        (slot.mailbox, slot.generation, slot.source, torn)
        for mailbox in mailboxes
        for slot in mailbox.slots
        for torn in slot.torn
    ]


def _advance(wait: ExpiredWait) -> tuple[float, float]:
    return wait_advance(wait.model_dump())


def _death(case: Case, rank: int, crashed: bool, error: str) -> Diagnosis:
    details = [*_stack(case, rank), *_whereabouts(case, rank)]
    return Diagnosis("crashed rank" if crashed else "dead rank", rank, f"rank {rank} died: {error}", tuple(details))


def _of_wait(case: Case, wait: ExpiredWait, state: str | None) -> Diagnosis:
    """state: of the source's process, None if nobody saw it (on another host)."""
    source = wait.source_rank
    mailbox, torn = _torn_row(case, wait)
    kind: Kind
    if state is not None and state.startswith(("T", "t")):
        kind, found = "stopped rank", f"rank {source} was stopped, its process in state {state}"
    elif state == "gone":
        kind, found = "dead rank", f"rank {source} died, its process was gone"
    elif torn is not None:
        kind = "lost words"
        first = f"word {torn.word}" + (f" of head {torn.head}" if torn.head >= 0 else "")
        found = (
            f"words of rank {source} were lost or overwritten: of the {torn.words} words of row {torn.row} in mailbox "
            f"{mailbox} {torn.arrived} arrived, the first missing one is {first}"
        )
    elif _has_pushed(case, wait):
        kind, found = "lost words", f"words of rank {source} were lost: it had pushed, yet none of the row arrived"
    else:
        lived = "nobody saw its process" if state is None else "its process lived"
        kind, found = "late rank", f"rank {source} was late: {lived}, and it had not pushed"
    sentence = f"{found}; rank {wait.waiting_rank} waited for it ({wait})"
    return Diagnosis(kind, source, sentence, (*_whereabouts(case, source), *_stack(case, source)))


def _process(case: Case, rank: int) -> str:
    process = processes(case).get(rank)
    return "" if process is None else f" {process.process_id} on {process.hostname}"


def _has_pushed(case: Case, wait: ExpiredWait) -> bool:
    """Whether the rank that waited saw the source's counter behind the push that it waited for."""
    writer = WRITERS[case.document.route].get(wait.stage)
    seen = _seen_by(case, wait.waiting_rank).get(wait.source_rank)
    return writer is not None and seen is not None and seen.uses.get(writer, 0) > wait.use


def _seen_by(case: Case, rank: int) -> dict[int, ControlWords]:
    """Control words as a rank's process saw them: of other processes, and of all the ranks that it runs itself."""
    for evidence in case.evidence.values():
        local = {mailbox.rank: mailbox.control for mailbox in evidence.mailboxes}
        if rank in local or rank == evidence.rank:
            return evidence.peers | local
    return {}


def _torn_row(case: Case, wait: ExpiredWait) -> tuple[str, TornRow | None]:
    """The row that the wait was for and its mailbox, if it had arrived in part."""
    if wait.stage not in MAILBOXES:
        return "", None
    wanted = (wait.use % case.generations, wait.source_rank, wait.row)
    for mailbox, generation, source, torn in torn_rows(case, wait.waiting_rank):
        if mailbox in MAILBOXES[wait.stage] and (generation, source, torn.row) == wanted:
            return mailbox, torn
    return "", None


def _whereabouts(case: Case, rank: int) -> list[str]:
    lines = []
    evidence, words = case.evidence.get(rank), control_words(case, rank)
    if evidence is not None:
        lines.append(f"rank {rank} by its own account, when it was asked: {evidence.position}")
    if words is not None:
        lines.append(f"use counters of rank {rank}: {', '.join(f'{name} {use}' for name, use in words.uses.items())}")
    return lines


def _stack(case: Case, rank: int) -> list[str]:
    """The innermost frames of a rank: of the exception that ended it, or of its main thread at a signal."""
    record = case.records.get(rank)
    if record is not None and record.traceback:
        return record.traceback.strip().splitlines()[-STACK_FRAMES:]
    text = case.stacks.get(rank, "")
    fatal = [line for line in text.splitlines() if line.startswith("Fatal Python error")]
    # A block a thread, the main thread's the last one.
    blocks = [block for block in text.split("\n\n") if "most recent call first" in block]
    frames = blocks[-1].splitlines()[1 : 1 + STACK_FRAMES] if blocks else []
    return [*fatal, *([f"stack of rank {rank}, innermost first:"] if frames else []), *frames]
