"""compute-sanitizer over `sanitize_case`: what is run, and what its reports may say.

Every tool must have nothing to report, but for one order that racecheck doesn't know. Where the head groups of a
cluster copy a later chunk of keys for each other (case "multicast"),

    all warps of CTA A read the old keys -> named barrier -> a thread arrives at CTA B's mbarrier (release, cluster)
    -> all warps of B wait for it (acquire, cluster) -> they start the copies into A and B

and racecheck takes the copy for a write after a read that nothing orders: of some of the keys, other ones in each run.
So there exactly this is let through: every hazard is one of writing after reading, between different CTAs of the
cluster that attend to the same keys, by the one instruction that copies. Whatever else it finds there, within a CTA or
with other peers, fails; and all that is not this order is clean with the same code (case "all": without groups over
several chunks, with groups over one chunk).

That the order is what it doesn't know is tested beside it: two CTAs that do nothing but hand rows over like this are
reported too, and with a cluster barrier in the mbarrier's place they are not (`racecheck_control`). The day the first
one is clean, the exception must go.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
TOOLS = ("memcheck", "racecheck", "synccheck")
SPLIT = 2  # of the case "multicast": CTAs of a cluster with other keys; those whose ranks differ by them share keys
MOST_HAZARDS = 1_000_000  # that a report lists
CLEAN = "clean"
HAZARD = re.compile(
    r"Potential (?P<kind>\w+) hazard detected at __shared__ .*\n"
    r"=+ +(?P<first>Read|Write) Thread \S+ \(block rank (?P<first_rank>\d+)\) at \S+\n"
    r"=+ +(?P<second>Read|Write) Thread \S+ \(block rank (?P<second_rank>\d+)\) at (?P<place>\S+)\n"
)
HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


def is_clean(verdict: str) -> bool:
    return verdict.startswith(CLEAN)


def judge_clean(report: str) -> str:
    """CLEAN, or the end of a report that ends otherwise."""
    found = HAZARDS.search(report)
    clean = "ERROR SUMMARY: 0 errors" in report if found is None else found.groups() == ("0", "0", "0")
    return CLEAN if clean else report[-1500:]


def judge_multicast(report: str) -> str:
    """CLEAN, and how many hazards there are, if all are the copies of a head group's peer, each of them listed."""
    summary = HAZARDS.search(report)
    hazards = [hazard.groupdict() for hazard in HAZARD.finditer(report)]
    if summary is None or not hazards:
        return judge_clean(report)
    displayed, errors, warnings = map(int, summary.groups())
    copies = len({hazard["place"] for hazard in hazards}) == 1 and all(map(_is_copy_of_peer, hazards))
    whole = len(hazards) == displayed == errors and warnings == 0
    orders = f"{CLEAN} but for {displayed} bytes copied after reads, an order between CTAs"
    return orders if copies and whole else report[-1500:]


def judge_unknown_order(report: str) -> str:
    """CLEAN, as a control, where racecheck reports an order between CTAs."""
    summary = HAZARDS.search(report)
    if summary is None:
        return report[-1500:]
    learnt = "racecheck knows this order now: judge the case multicast as the others"
    return f"{CLEAN} as a control: this order is reported" if int(summary.group(2)) else learnt


def _is_copy_of_peer(hazard: dict[str, str]) -> bool:
    reader, writer = int(hazard["first_rank"]), int(hazard["second_rank"])
    order = (hazard["kind"], hazard["first"], hazard["second"])
    return order == ("WAR", "Read", "Write") and reader != writer and reader % SPLIT == writer % SPLIT


@dataclass(frozen=True)
class Check:
    """A tool over a case of a script."""

    tool: str
    case: str
    judge: Callable[[str], str] = judge_clean
    script: str = "sanitize_case.py"

    @property
    def name(self) -> str:
        return f"{self.tool}, {self.case}"

    def command(self, sanitizer: str) -> list[str]:
        # Bindings that look for functions which the driver lacks are no fault of a kernel.
        command = [sanitizer, "--tool", self.tool, "--report-api-errors", "no"]
        if self.judge is judge_multicast:
            command += ["--racecheck-report", "hazard", "--show-backtrace", "no", "--print-limit", str(MOST_HAZARDS)]
        return [*command, sys.executable, str(FOLDER / self.script), self.case]

    def run(self, sanitizer: str, seconds: int) -> str:
        """CLEAN, the end of the report, or why there is none."""
        try:
            done = subprocess.run(self.command(sanitizer), capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"not run: no end within {seconds} s"
        report = done.stdout + done.stderr
        for folder in (sys.prefix, FOLDER.parent.parent):  # results name no places of a machine
            report = report.replace(f"{folder}/", "")
        verdict = self.judge(report) if done.returncode == 0 else report[-1500:]
        print(f"{self.name}: {verdict[-300:]}", flush=True)
        return verdict


CHECKS = (
    *(Check(tool, "all") for tool in TOOLS),
    Check("memcheck", "multicast"),
    Check("synccheck", "multicast"),
    Check("racecheck", "multicast", judge_multicast),
    Check("racecheck", "mbarrier", judge_unknown_order, "racecheck_control.py"),
    Check("racecheck", "cluster", judge_clean, "racecheck_control.py"),
)


def sanitize(seconds: int) -> dict[str, str]:
    """Verdict by check. All run side by side."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        return {check.name: "not run: compute-sanitizer is not installed" for check in CHECKS}
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        verdicts = pool.map(lambda check: check.run(sanitizer, seconds), CHECKS)
        return {check.name: verdict for check, verdict in zip(CHECKS, verdicts, strict=True)}
