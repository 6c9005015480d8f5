"""A rank of a run on GPUs is killed or stopped between two graph replays: who must say so, and when."""

from __future__ import annotations

from pathlib import Path

import torch
from rank_launch import run_ranks

from dcp_decode.config import load_config
from dcp_decode.errors import WAIT_EXPIRED
from dcp_decode.forensics.archive import read

FAULT_RANK = Path(__file__).parent / "fault_rank.py"
STEP = 4
SECONDS = 120.0
# Beyond the deadline: to raise, tell the peers and write the record, on a machine that runs a process a rank.
GRACE_SECONDS = 1.0

CONFIG = """
[model]
layers = 1
[parallel]
dcp = {dcp}
device = "cuda"
fabric = "{fabric}"
[mailbox]
capacity = 5
[service]
max_steps = 12
[verify]
mode = "off"
[workload.synthetic]
requests = 1
input_length = 3000
output_length = 200
"""


def check_fault(fault: str, fabric: str, dcp: int, folder: Path) -> None:
    """fault: "kill" or "stop". All other ranks name the victim within the mailbox deadline, and the run ends with 3."""
    victim = dcp - 1
    path, note = folder / "config.toml", folder / "fault-time"
    path.write_text(CONFIG.format(dcp=dcp, fabric=fabric))
    config = load_config(path)
    arguments = [str(FAULT_RANK), str(path), fault, str(victim), str(STEP), str(note)]
    conclusion = run_ranks("torchrun", config, arguments, folder / "records", SECONDS)
    assert conclusion.exit_code == WAIT_EXPIRED, conclusion.error
    assert f"rank {victim}" in conclusion.error
    happened = float(note.read_text())
    for record in conclusion.document["records"]:
        if record["rank"] == victim:
            continue
        assert f"rank {victim}" in (record["error"] or "") or str(victim) in record["dead_peers"], record
        assert record["ended"] - happened < config.mailbox.deadline_seconds + GRACE_SECONDS, record
    cause = conclusion.document["first_cause"]
    assert (cause["kind"], cause["rank"]) == ("dead rank" if fault == "kill" else "stopped rank", victim)
    evidence = read(Path(conclusion.document["forensics"])).evidence
    survivors = set(range(dcp)) - {victim}
    # Read from the GPU while the kernels of the group may still spin. On a GPU that all share, the end of a process has
    # once failed the kernels of another one, which then can say no more than that.
    read_ranks = {rank for rank in survivors if [mailbox.rank for mailbox in evidence[rank].mailboxes] == [rank]}
    problems = {rank: evidence[rank].problem for rank in survivors - read_ranks}
    assert all(problem is not None and "CUDA error" in problem for problem in problems.values()), problems
    shared = torch.cuda.device_count() < dcp
    assert not problems or (shared and len(problems) < len(read_ranks)), problems
    if fault == "stop":
        first_waits = [wait for wait in conclusion.document["expired_waits"] if wait["stage"] == "TOPK"]
        assert first_waits, "nobody's kernels gave up"
        assert {wait["source_rank"] for wait in first_waits} == {victim}
