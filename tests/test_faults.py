"""Faults in real rank processes over shared memory: the undisturbed digest or a named failure, never a hang."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_group import Answer, FaultGroups
from launch_stub import report

from dcp_decode import numerics
from dcp_decode import soak as rounds
from dcp_decode.config import load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import VERIFIED, WAIT_EXPIRED, WRONG_RESULT
from dcp_decode.faults import SENTINELS, Corruption, FaultPlan, Place, Sentinel
from dcp_decode.forensics import archive
from dcp_decode.forensics.diagnosis import diagnose
from dcp_decode.rank_process import Body
from dcp_decode.records import RankReport, make_plan

pytestmark = pytest.mark.xdist_group("faults")

RANKS = 4
STEPS = 6
LAYERS = 2
# topk above every context: all positions are selected, so every word that is corrupted counts.
SMALL = {
    "model.heads": 16,
    "model.layers": LAYERS,
    "model.topk": 128,
    "parallel.dcp": RANKS,
    "mailbox.capacity": 2,
    "mailbox.deadline_seconds": 1.5,
    "mailbox.control_deadline_seconds": 30.0,
    "cache.pages": 8,
    "service.draft_tokens": 1,
    "service.max_steps": STEPS,
    "workload.synthetic": {"requests": 1, "input_length": 40, "output_length": 60},
}
STOPPED, VICTIM, STEP, LAYER = 2, 1, 3, 1


def bits_of(value: float) -> int:
    """The signed 32-bit integer with the bits of an FP32 value."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@pytest.fixture(scope="module")
def groups() -> Iterator[FaultGroups]:
    groups = FaultGroups()
    yield groups
    groups.close()


@pytest.fixture(scope="module")
def undisturbed(groups: FaultGroups) -> dict[str, Answer]:
    """By route: the run that all others are compared with."""
    answers = {route: groups.run(SMALL | {"parallel.route": route}) for route in ("push", "local")}
    for answer in answers.values():
        assert (answer.exit_code, answer.error, answer.verified, answer.cause) == (VERIFIED, None, True, None)
        assert len(answer.merged) == RANKS * STEPS * LAYERS
    return answers


def named(answer: Answer) -> tuple[str, int | None]:
    """Kind and rank of the first cause."""
    assert answer.cause is not None
    return answer.cause.kind, answer.cause.rank


@pytest.mark.parametrize("route", ["push", "local"])
def test_delays_and_stops_change_no_bit(groups: FaultGroups, undisturbed: dict[str, Answer], route: str) -> None:
    faults = FaultPlan(seed=5, delay_share=0.1, longest_delay_seconds=0.2, stop_share=0.03, stop_seconds=0.2)
    answer = groups.run(SMALL | {"parallel.route": route, "mailbox.deadline_seconds": 20.0}, faults)
    assert (answer.exit_code, answer.error) == (VERIFIED, None)
    assert answer.digest == undisturbed[route].digest
    assert answer.counts["delays"] >= 10
    assert answer.counts["stops"] >= 3


def test_eight_ranks_under_delays_and_stops(groups: FaultGroups) -> None:
    eight = SMALL | {"parallel.dcp": 8, "model.topk": 16, "mailbox.deadline_seconds": 20.0}
    faults = FaultPlan(seed=6, delay_share=0.05, stop_share=0.01, stop_seconds=0.2)
    answer = groups.run(eight, faults)
    assert (answer.exit_code, answer.error, answer.verified) == (VERIFIED, None, True)
    assert answer.digest == groups.run(eight).digest
    assert answer.counts["delays"] >= 10
    assert answer.counts["stops"] >= 1


@pytest.mark.parametrize("stage", ["append", "query_push", "merge"])
def test_a_stop_shorter_than_the_deadline_is_survived(
    groups: FaultGroups, undisturbed: dict[str, Answer], stage: str
) -> None:
    faults = FaultPlan(stop_at=Place(STOPPED, STEP, LAYER, stage), stop_seconds=0.4)
    answer = groups.run(SMALL, faults)
    assert (answer.exit_code, answer.error) == (VERIFIED, None)
    assert answer.digest == undisturbed["push"].digest
    assert answer.counts["stops"] == 1


@pytest.mark.parametrize("stage", ["append", "merge"])
def test_a_stop_longer_than_the_deadline_is_named(groups: FaultGroups, stage: str) -> None:
    faults = FaultPlan(stop_at=Place(STOPPED, STEP, 0, stage), stop_seconds=30.0)
    answer = groups.run(SMALL, faults)
    assert answer.exit_code == WAIT_EXPIRED
    assert f"waited for rank {STOPPED} in " in answer.error
    waits = [wait for wait in answer.expired_waits if wait["stage"] != "control"]
    assert waits
    assert {wait["source_rank"] for wait in waits} == {STOPPED}
    assert named(answer) == ("stopped rank", STOPPED)


@pytest.mark.parametrize("stage", ["append", "query_push", "sparse_decode_push", "merge"])
def test_a_killed_rank_is_named(groups: FaultGroups, stage: str) -> None:
    answer = groups.run(SMALL, FaultPlan(kill_at=Place(STOPPED, STEP, LAYER, stage)))
    assert answer.exit_code == WAIT_EXPIRED
    assert answer.dead_ranks == (STOPPED,)
    assert f"rank {STOPPED} died" in answer.error
    assert named(answer) == ("dead rank", STOPPED)


def test_a_late_rank_is_named_with_its_place(groups: FaultGroups) -> None:
    # Later than the others' deadline and the launcher's grace: it is still asleep when it is told to stop.
    faults = FaultPlan(late_at=Place(STOPPED, STEP, LAYER, "query_push"), late_seconds=30.0)
    answer = groups.run(SMALL | {"mailbox.deadline_seconds": 0.5}, faults)
    assert answer.exit_code == WAIT_EXPIRED
    assert named(answer) == ("late rank", STOPPED)
    details = "\n".join(answer.cause.details)
    assert f"step {STEP}, layer {LAYER}, query_push (for " in details
    assert 'faults.py", line ' in details  # where it slept


def test_a_crashed_rank_is_named_with_its_exception(groups: FaultGroups) -> None:
    answer = groups.run(SMALL, FaultPlan(raise_at=Place(STOPPED, STEP, LAYER, "select")))
    assert answer.exit_code == WAIT_EXPIRED
    assert named(answer) == ("crashed rank", STOPPED)
    assert "RuntimeError: injected before select" in answer.cause.details


@pytest.mark.parametrize("route", ["push", "local"])
@pytest.mark.parametrize(
    ("mailbox", "writer", "value"),
    [
        ("payload", 3, 0x42C842C8),  # two columns of 100.0
        ("lse_log2", 3, bits_of(20.0)),
        ("query", 3, 0x7E7E7E7E),  # four columns of 448
        ("topk", VICTIM, None),  # another position, in the rank's own list
    ],
)
def test_a_corrupted_word_is_a_wrong_result(
    groups: FaultGroups, route: str, mailbox: str, writer: int, value: int | None
) -> None:
    corruption = Corruption(writer, VICTIM, STEP, LAYER, mailbox, value)
    answer = groups.run(SMALL | {"parallel.route": route}, FaultPlan(corruption=corruption))
    assert answer.counts["corruptions"] == 1
    assert answer.exit_code == WRONG_RESULT
    assert f"step {STEP}, layer {LAYER}, rank " in answer.error
    assert answer.cause.kind == "wrong data"


@pytest.mark.parametrize("mailbox", ["topk", "query", "payload", "lse_log2"])
def test_a_lost_word_is_a_named_wait(groups: FaultGroups, mailbox: str) -> None:
    corruption = Corruption(3, VICTIM, STEP, LAYER, mailbox, numerics.ARMED_WORD)
    answer = groups.run(SMALL, FaultPlan(corruption=corruption))
    assert answer.exit_code == WAIT_EXPIRED
    # Everybody soon waits for somebody, and whose deadline is recorded first is a close race: the table has them all.
    assert "mailbox wait expired after 1.5 s" in answer.error
    assert (VICTIM, 3) in {(wait["waiting_rank"], wait["source_rank"]) for wait in answer.expired_waits}
    assert named(answer) == ("lost words", 3)
    assert f"of row 0 in mailbox {mailbox} " in answer.cause.sentence


def test_a_flipped_lowest_bit_is_seen_or_harmless(groups: FaultGroups, undisturbed: dict[str, Answer]) -> None:
    payload = groups.run(SMALL, FaultPlan(corruption=Corruption(3, VICTIM, STEP, LAYER, "payload", None)))
    assert payload.exit_code == WRONG_RESULT  # one BF16 unit of one column is outside the twin's bound
    assert f"step {STEP}, layer {LAYER}, rank {VICTIM}, " in payload.error
    # One FP32 unit of an LSE moves a merged row by 2**-21 of itself at most (BF16: 2**-9): rarely a bit, never more.
    lse = groups.run(SMALL, FaultPlan(corruption=Corruption(3, VICTIM, STEP, LAYER, "lse_log2", None)))
    assert (lse.exit_code, lse.counts["corruptions"]) == (VERIFIED, 1)
    assert differing(lse, undisturbed["push"]) <= {(VICTIM, STEP, LAYER, 0, 0)}


def differing(answer: Answer, reference: Answer) -> set[tuple[int, ...]]:
    """(rank, step, layer, row, head) of the merged rows whose bits differ."""
    places = set()
    for place, merged in answer.merged.items():
        different = (merged.view(torch.int16) != reference.merged[place].view(torch.int16)).any(dim=2)
        places |= {(*place, *index) for index in map(tuple, different.nonzero().tolist())}
    return places


def poison(answer: Answer, place: tuple[int, ...]) -> None:
    row = answer.merged[place[:3]][place[3], place[4]]
    assert (row.view(torch.int16) == numerics.BF16_NAN).all()


@pytest.mark.parametrize("pattern", sorted(SENTINELS))
def test_sentinel_queries_stay_in_their_row_and_head(
    groups: FaultGroups, undisturbed: dict[str, Answer], pattern: str
) -> None:
    sentinel = Sentinel(VICTIM, STEP, LAYER, "query", pattern)
    answer = groups.run(SMALL | {"verify.mode": "off"}, FaultPlan(sentinel=sentinel))
    assert (answer.exit_code, answer.error, answer.counts["sentinels"]) == (VERIFIED, None, 1)
    assert differing(answer, undisturbed["push"]) == {(VICTIM, STEP, LAYER, 0, 0)}
    if pattern in ("all_ones", "nan"):
        poison(answer, (VICTIM, STEP, LAYER, 0, 0))


@pytest.mark.parametrize("pattern", sorted(SENTINELS))
def test_sentinel_partials_stay_in_their_row_and_head(
    groups: FaultGroups, undisturbed: dict[str, Answer], pattern: str
) -> None:
    sentinel = Sentinel(VICTIM, STEP, LAYER, "partial", pattern)
    answer = groups.run(SMALL | {"verify.mode": "off", "parallel.route": "local"}, FaultPlan(sentinel=sentinel))
    assert (answer.exit_code, answer.error, answer.counts["sentinels"]) == (VERIFIED, None, 1)
    assert differing(answer, undisturbed["local"]) == {(0, STEP, LAYER, 0, 0)}  # rank 0 owns gathered head 0
    if pattern in ("all_ones", "nan"):
        poison(answer, (0, STEP, LAYER, 0, 0))


@pytest.mark.parametrize("pattern", sorted(SENTINELS))
def test_sentinel_keys_poison_the_rows_that_select_them(
    groups: FaultGroups, undisturbed: dict[str, Answer], pattern: str
) -> None:
    sentinel = Sentinel(VICTIM, STEP, LAYER, "keys", pattern)
    answer = groups.run(SMALL | {"verify.mode": "off"}, FaultPlan(sentinel=sentinel))
    assert (answer.exit_code, answer.error, answer.counts["sentinels"]) == (VERIFIED, None, 1)
    touched = differing(answer, undisturbed["push"])
    # The keys stay in the cache: that layer's rows from that step on, all ranks and heads, and nothing else.
    owner_heads = 16 // RANKS
    expected = {
        (rank, step, LAYER, row, head)
        for rank in range(RANKS)
        for step in range(STEP, STEPS)
        for row in range(2)
        for head in range(owner_heads)
        if row < len(answer.merged[rank, step, LAYER])
    }
    assert touched == expected
    if pattern in ("all_ones", "nan"):
        for place in touched:
            poison(answer, place)


def soak(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    output = folder / "soak.json"
    config = Path(__file__).resolve().parent.parent / "configs" / "soak.toml"
    command = [sys.executable, "-m", "dcp_decode", "soak", str(config), "--output", str(output), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    return ended.returncode, json.loads(output.read_text()) if output.exists() else {}, ended.stderr


def test_a_short_soak(tmp_path: Path) -> None:
    exit_code, document, errors = soak(tmp_path, "--minutes", "0", "--max-steps", "300")
    assert exit_code == VERIFIED, errors
    assert document["command"] == "soak"
    assert document["soak"]["digests_equal"]
    assert document["soak"]["rounds"] == 1
    assert document["steps"] == 300
    assert document["digest"] == document["soak"]["undisturbed_digest"]
    injected = document["soak"]["injected"]
    calls = injected["stage_calls"]
    assert calls == 300 * 8 * 7
    # 1 % and 0.1 % of the calls, within five standard deviations of a binomial draw.
    assert abs(injected["delays"] - 0.01 * calls) < 5 * (0.01 * calls) ** 0.5
    assert abs(injected["stops"] - 0.001 * calls) < 5 * (0.001 * calls) ** 0.5


@pytest.mark.parametrize("digest", ["undisturbed", "another"])
def test_a_soak_fails_on_another_digest(digest: str, tmp_path: Path) -> None:
    config = load_config(None, {"model.heads": 16, "parallel.dcp": 2})

    def make_body(faults: FaultPlan, _folder: Path) -> Body:
        of_round = digest if faults.seed % rounds.ROUND_SEEDS == 2 else "undisturbed"
        return lambda _: report(digest=of_round)

    seen: list[int] = []
    conclusion = rounds.soak(
        make_plan("soak", config, "builtin", str(tmp_path / "soak.json")),
        config,
        ("delays",),
        3.0,
        make_body,
        lambda one: seen.append(one.number),
    )
    equal = digest == "undisturbed"
    assert conclusion.document["soak"]["digests_equal"] is equal
    assert conclusion.exit_code == conclusion.document["exit_code"] == (VERIFIED if equal else WRONG_RESULT)
    if not equal:
        assert conclusion.error == "wrong result: digest another of round 2, undisturbed it is undisturbed"
        assert seen == [0, 1, 2]
        assert conclusion.document["first_cause"]["kind"] == "wrong data"
        archived = archive.read(Path(conclusion.document["forensics"]))
        assert diagnose(archived).sentence == archived.document.error == conclusion.error
        assert archived.records.keys() == {0, 1}


def test_a_soak_that_is_told_to_stop_as_a_round_ends_starts_no_other(tmp_path: Path) -> None:
    config = load_config(None, {"model.heads": 16, "parallel.dcp": 2})

    def body(_: ControlPlane) -> RankReport:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the rank ends in order all the same
        os.kill(os.getppid(), signal.SIGINT)
        return report(digest="any")

    seen: list[int] = []
    conclusion = rounds.soak(
        make_plan("soak", config, "builtin", str(tmp_path / "soak.json")),
        config,
        ("delays",),
        3.0,
        lambda *_: body,
        lambda one: seen.append(one.number),
    )
    assert (seen, conclusion.exit_code, conclusion.error) == ([0], WAIT_EXPIRED, "told to stop")
    assert conclusion.document["forensics"] == str(tmp_path / "soak.forensics.tar.gz")


def test_a_soak_refuses_what_it_cannot_survive(tmp_path: Path) -> None:
    exit_code, _, errors = soak(tmp_path, "--deadline", "0.5")
    assert exit_code == 2
    assert "mailbox.deadline_seconds = 0.5" in errors
    exit_code, _, errors = soak(tmp_path, "--faults", "delays,earthquakes")
    assert exit_code == 2
    assert "--faults = 'delays,earthquakes'" in errors
