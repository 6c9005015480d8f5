"""The first cause of a failed run, out of the ranks' records."""

from __future__ import annotations

from dcp_decode.config import load_config
from dcp_decode.mailbox import Stage
from dcp_decode.records import RankRecord, make_plan
from dcp_decode.results import STAGE_ORDER, conclude


def expired(rank: int, source: int, stage: str, use: int, ended: float) -> RankRecord:
    wait = {"stage": stage, "waiting_rank": rank, "source_rank": source, "use": use}
    error = f"rank {rank} waited for rank {source}"
    return RankRecord(rank, 100 + rank, "host", "failed", 3, ended, error, expired_waits=[wait])


def test_stage_order_is_that_of_the_mailbox_stages() -> None:
    assert tuple(stage.name for stage in Stage) == STAGE_ORDER


def test_the_least_advanced_wait_is_the_cause_whoever_reports_first() -> None:
    plan = make_plan("run", load_config(None, {"parallel.dcp": 4}), "builtin", None)
    records = [
        expired(0, 1, "MERGE", 4, ended=1.0),
        expired(1, 3, "SPARSE", 4, ended=2.0),
        expired(2, 0, "TOPK", 5, ended=0.5),
        expired(3, 1, "MERGE", 4, ended=3.0),
    ]
    conclusion = conclude(plan, dict(enumerate(records)))
    assert conclusion.error == "rank 1 waited for rank 3"
    assert conclusion.exit_code == 3
    # Negative control: with the waits unknown, the earliest record is blamed.
    blind = [RankRecord(r.rank, r.process_id, r.hostname, "failed", 3, r.ended, r.error) for r in records]
    assert conclude(plan, dict(enumerate(blind))).error == "rank 2 waited for rank 0"


def test_a_killed_rank_comes_before_those_that_waited_for_it() -> None:
    plan = make_plan("run", load_config(None, {"parallel.dcp": 2}), "builtin", None)
    conclusion = conclude(plan, {0: expired(0, 1, "SPARSE", 0, ended=1.0)})
    assert conclusion.dead_ranks == (1,)
    assert conclusion.error is not None
    assert conclusion.error.startswith("rank 1 died")
