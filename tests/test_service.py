"""The decode service: exact small scenarios, acceptance statistics, and the guards seen to fire."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from dcp_decode.cache import PagePool, pages_needed
from dcp_decode.errors import ConfigError
from dcp_decode.geometry import Geometry
from dcp_decode.service import NEVER_WRITTEN, Service, ServiceSettings, VerifyRow, accepted_drafts
from dcp_decode.trace import TraceRequest, read_trace

SAMPLE = Path(__file__).parent.parent / "configs" / "sample_trace.jsonl"
PAGE = 64 * 8  # tokens that one page on each of 8 ranks holds


def requests_of(*rows: tuple[int, int, int]) -> list[TraceRequest]:
    return [TraceRequest(index, *row) for index, row in enumerate(rows)]


def make(rows, pages=100, capacity=40, **changes) -> Service:
    return Service(requests_of(*rows), ServiceSettings(**changes), Geometry(capacity=capacity), PagePool(pages))


def served(plan) -> list[int]:
    return list(dict.fromkeys(row.request for row in plan.rows))


def run(service: Service) -> list:
    """All (plan, clock at its start) until the service stops."""
    steps = []
    while (plan := service.next_step()) is not None:
        steps.append((plan, service.clock_milliseconds))
        service.complete(plan)
    return steps


# ---- exact scenarios


def test_every_draft_accepted():
    service = make([(0, 10, 8)], draft_tokens=4, acceptance=1.0)
    first = service.next_step()
    assert (first.index, first.prefills) == (0, (0,))
    assert first.rows == tuple(VerifyRow(0, position, 1) for position in range(10, 15))
    service.complete(first)
    assert service.request(0).context == 15
    second = service.next_step()
    assert (second.index, second.prefills) == (1, ())
    assert second.rows == tuple(VerifyRow(0, position, 2) for position in range(15, 20))
    service.complete(second)
    assert service.next_step() is None
    assert service.request(0).context == 18, "five tokens, then only the three that were left"
    assert (service.tokens, service.acceptance, service.steps) == (8, [0, 0, 1, 0, 1], 2)
    assert service.counts() == {"in": 1, "finished": 1, "running": 0, "waiting": 0, "refused": 0}


def test_rejected_slots_are_written_again_with_another_salt():
    service = make([(0, 3, 2)], draft_tokens=2, acceptance=0.0)
    first = service.next_step()
    salts = service.request(0).salts
    none = NEVER_WRITTEN
    assert salts.dtype == torch.int64
    assert salts.tolist() == [0, 0, 0, 1, 1, 1, none]
    service.complete(first)
    assert salts.tolist() == [0, 0, 0, 1, 1, 1, none], "the caches still hold the rejected drafts"
    second = service.next_step()
    assert second.rows == (VerifyRow(0, 4, 2), VerifyRow(0, 5, 2), VerifyRow(0, 6, 2))
    assert salts.tolist() == [0, 0, 0, 1, 2, 2, 2], "reserved: input + output + drafts, to the last slot"
    service.complete(second)
    assert service.next_step() is None
    assert service.tokens == 2


def test_no_drafts():
    service = make([(0, 5, 3)], draft_tokens=0, acceptance=1.0, capacity=1)
    assert [plan.rows for plan, _ in run(service)] == [(VerifyRow(0, 5 + step, step + 1),) for step in range(3)]


def test_more_running_than_fit_take_turns():
    service = make([(0, 5, 4)] * 5, draft_tokens=4, acceptance=0.0, capacity=14)  # room for two requests of five rows
    plans = [plan for plan, _ in run(service)]
    assert plans[0].prefills == (0, 1, 2, 3, 4)
    assert [served(plan) for plan in plans[:5]] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    assert len(plans) == 5 * 4 / 2


def test_arrivals_on_the_virtual_clock():
    service = make([(0, 5, 2), (60, 5, 1), (1000, 5, 1), (1001, 5, 1)], acceptance=0.0, step_milliseconds=50.0)
    assert [(clock, plan.prefills, served(plan)) for plan, clock in run(service)] == [
        (0.0, (0,), [0]),
        (50.0, (), [0]),
        (100.0, (1,), [1]),
        (1000.0, (2,), [2]),  # idle: the clock jumps to the next arrival
        (1050.0, (3,), [3]),
    ]


def test_out_of_pages_waits_and_nobody_overtakes():
    # Two pages: request 1 needs both and waits for request 0; request 2 would fit at once, but came later.
    service = make([(0, 10, 2), (0, PAGE, 1), (0, 10, 1)], pages=2, acceptance=0.0)
    assert [plan.prefills for plan, _ in run(service)] == [(0,), (), (1,), (2,)]
    assert service.counts()["finished"] == 3


def test_batch_room_can_be_limited():
    service = make([(0, 10, 1)] * 3, max_running=2, acceptance=0.0)
    assert [plan.prefills for plan, _ in run(service)] == [(0, 1), (2,)]


def test_what_never_fits_is_refused_by_name():
    rows = [(0, 10, 1), (0, 2 * PAGE - 5, 1), (0, 2 * PAGE - 4, 1), (9, 1_048_573, 1)]
    service = make(rows, pages=2)
    assert service.refusals == {
        2: "request 2 refused: 1020 input + 1 output + 4 draft tokens need 3 pages on every rank, and the cache has 2",
        3: "request 3 refused: 1048573 input + 1 output + 4 draft tokens exceed the largest context, 1048576 tokens",
    }
    assert [plan.prefills for plan, _ in run(service)] == [(0,), (1,)]
    assert service.counts() == {"in": 4, "finished": 2, "running": 0, "waiting": 0, "refused": 2}
    assert service.request(2).name == "request 2"


def test_stopping_early_counts_everybody():
    rows = [(0, 10, 1), (0, 10, 9), (0, 10, 9), (0, 3 * PAGE, 9), (99_999, 10, 1)]
    service = make(rows, pages=2, max_steps=3, acceptance=0.0)
    assert len(run(service)) == 3
    assert service.counts() == {"in": 5, "finished": 1, "running": 2, "waiting": 1, "refused": 1}
    assert service.next_step() is None


def test_no_requests():
    service = make([])
    assert service.next_step() is None
    assert service.counts() == {"in": 0, "finished": 0, "running": 0, "waiting": 0, "refused": 0}


def test_a_finished_request_holds_nothing():
    service = make([(0, 10_000, 1)])
    plan = service.next_step()
    assert len(service.request(0).pages) == pages_needed(10_005, service.geometry) == 20
    service.complete(plan)
    assert service.request(0).pages == ()
    assert service.request(0).salts.numel() == 0
    assert service.pool.free == 100


def test_the_sample_trace_queues_rotates_and_drains():
    service = Service(read_trace(SAMPLE), ServiceSettings(seed=1), Geometry(capacity=20), PagePool(16))
    waited = crowded = jumped = 0
    clock = 0.0
    while (plan := service.next_step()) is not None:
        jumped += service.clock_milliseconds > clock
        arrived = [service.request(index).arrival_milliseconds <= clock for index in range(12)]
        waited += sum(arrived) > sum(service.counts()[state] for state in ("finished", "running"))
        crowded += len(served(plan)) >= 3
        service.complete(plan)
        clock = service.clock_milliseconds
    assert service.counts()["finished"] == 12
    assert waited > 0
    assert crowded > 0
    assert jumped > 0


# ---- guards, each seen to fire


def test_counts_notice_a_lost_request():
    service = make([(0, 5, 9), (500, 5, 9)])
    service.counts()
    service._waiting.pop()
    with pytest.raises(RuntimeError, match="lost or counted twice"):
        service.counts()


def test_lost_pages_stop_the_service_instead_of_spinning():
    service = make([(0, 5, 1), (0, PAGE, 1)], pages=2, acceptance=0.0)
    plan = service.next_step()
    service.pool.release = lambda pages: None
    service.complete(plan)
    with pytest.raises(RuntimeError, match="nothing runs, yet only 1 of 2 pages are free"):
        service.next_step()


def test_steps_are_completed_in_turn():
    service = make([(0, 5, 9)])
    other = make([(0, 6, 9)]).next_step()
    with pytest.raises(RuntimeError, match="not the one in progress"):
        service.complete(other)
    plan = service.next_step()
    with pytest.raises(RuntimeError, match="step 0 is not complete yet"):
        service.next_step()
    with pytest.raises(RuntimeError, match="not the one in progress"):
        service.complete(other)
    service.complete(plan)
    with pytest.raises(RuntimeError, match="not the one in progress"):
        service.complete(plan)


def test_a_pool_in_use_is_refused():
    pool = PagePool(4)
    pool.allocate(1)
    with pytest.raises(ValueError, match="1 pages are taken"):
        Service([], ServiceSettings(), Geometry(), pool)


@pytest.mark.parametrize("change", [{"seed": 1}, {"acceptance": 0.71}, {"step_milliseconds": 51.0}, {"max_steps": 9}])
def test_fingerprint_tells_settings_apart(change):
    rows = [(0, 5, 9)]
    assert make(rows).fingerprint() == make(rows).fingerprint()
    assert make(rows).fingerprint() != make(rows, **change).fingerprint()


@pytest.mark.parametrize("other", [(0, 6, 9), (0, 5, 8), (1, 5, 9)])
def test_fingerprint_tells_requests_apart_before_they_run(other):
    assert make([(0, 5, 9)]).fingerprint() != make([other]).fingerprint()


def test_fingerprint_tells_another_acceptance(monkeypatch):
    fingerprints = []
    for drafts in (1, 2):
        monkeypatch.setattr("dcp_decode.service.accepted_drafts", lambda *_, drafts=drafts: drafts)
        service = make([(0, 5, 9), (0, 5, 9)])
        service.complete(service.next_step())
        fingerprints.append(service.fingerprint())
    assert fingerprints[0] != fingerprints[1]


BAD_SETTINGS = [
    ({"draft_tokens": -1}, "service.draft_tokens = -1: must be at least 0"),
    ({"acceptance": 1.01}, "service.acceptance = 1.01: must be in 0 .. 1"),
    ({"acceptance": math.nan}, "service.acceptance = nan: must be in 0 .. 1"),
    ({"step_milliseconds": 0.0}, "service.step_milliseconds = 0.0: must be finite and greater than 0"),
    ({"step_milliseconds": math.inf}, "service.step_milliseconds = inf: must be finite and greater than 0"),
    ({"max_steps": 0}, "service.max_steps = 0: must be at least 1"),
    ({"max_running": 0}, "service.max_running = 0: must be at least 1"),
    (
        {"draft_tokens": 40},
        "service.draft_tokens = 40: a request's draft_tokens + 1 rows must fit mailbox.capacity = 40",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_SETTINGS)
def test_bad_settings(change, message):
    with pytest.raises(ConfigError) as refusal:
        make([], **change)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([TraceRequest(1, 0, 1, 1)], "request.index = 1: must be 0, its place in the trace"),
        (requests_of((5, 1, 1), (4, 1, 1)), "request 1: arrival = 4: must not be before 5 ms"),
        (requests_of((0, 0, 1)), "request 0: input_length = 0: must be at least 1 token"),
        (requests_of((0, 1, 0)), "request 0: output_length = 0: must be at least 1 token"),
    ],
)
def test_bad_requests(requests, message):
    with pytest.raises(ConfigError) as refusal:
        Service(requests, ServiceSettings(), Geometry(), PagePool(1))
    assert str(refusal.value) == message


# ---- acceptance


TRIALS = 20_000


def shares(acceptance: float, drafts: int = 4) -> list[float]:
    """Relative frequency of 0 .. drafts accepted drafts over 100 requests of 200 steps."""
    counts = Counter(
        accepted_drafts(7, request, step, drafts, acceptance) for request in range(100) for step in range(TRIALS // 100)
    )
    return [counts[accepted] / TRIALS for accepted in range(drafts + 1)]


def expected_shares(acceptance: float, drafts: int = 4) -> list[float]:
    return [acceptance**k * (1 - acceptance if k < drafts else 1) for k in range(drafts + 1)]


def farthest(measured: list[float], acceptance: float) -> float:
    """The largest deviation from the truncated geometric distribution, in its standard deviations."""
    return max(
        abs(share - p) / math.sqrt(p * (1 - p) / TRIALS)
        for share, p in zip(measured, expected_shares(acceptance), strict=True)
    )


@pytest.mark.parametrize("acceptance", [0.2, 0.7, 0.95])
def test_acceptance_is_a_run_of_independent_trials(acceptance):
    # 5 shares within 4.5 standard deviations: a right generator fails with probability 5 * 7e-6, and that once, when
    # its constants are chosen (the outcome is fixed by the seed).
    measured = shares(acceptance)
    assert farthest(measured, acceptance) < 4.5
    assert farthest(measured, acceptance - 0.03) > 4.5, "negative control: another probability is told apart"


def test_acceptance_extremes():
    assert shares(0.0) == [1, 0, 0, 0, 0]
    assert shares(1.0) == [0, 0, 0, 0, 1]


def test_acceptance_of_neighbouring_steps_and_requests_is_uncorrelated():
    outcome = torch.tensor([[accepted_drafts(3, r, s, 1, 0.5) for s in range(150)] for r in range(150)]) * 2.0 - 1
    steps = (outcome[:, 1:] * outcome[:, :-1]).mean()
    requests = (outcome[1:] * outcome[:-1]).mean()
    assert max(abs(steps), abs(requests)) < 4.5 / math.sqrt(150 * 149)
