"""The decode service over random loads: a plain model of what it may do runs beside it and checks every step."""

from __future__ import annotations

import math
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_decode.cache import PagePool, pages_needed
from dcp_decode.geometry import Geometry
from dcp_decode.service import NEVER_WRITTEN, Service, ServiceSettings, accepted_drafts
from dcp_decode.trace import TraceRequest, synthetic_requests


def requests_of(*rows: tuple[int, int, int]) -> list[TraceRequest]:
    return [TraceRequest(index, *row) for index, row in enumerate(rows)]


def served(plan) -> list[int]:
    return list(dict.fromkeys(row.request for row in plan.rows))


class Checker:
    """Runs a service beside a plain model of what it may do; every difference is an AssertionError."""

    def __init__(self, service: Service, requests: list[TraceRequest]) -> None:
        self.service = service
        self.requests = requests
        self.running: dict[int, int] = {}  # request -> context
        self.caches: dict[int, dict[int, int]] = {}  # request -> position -> salt
        self.turns: Counter[tuple[int, int]] = Counter()  # (a, b): turns of b since the last one of a

    def run(self) -> list[str]:
        fingerprints = [self.service.fingerprint()]
        while (plan := self.service.next_step()) is not None:
            self.check_plan(plan)
            self.check_pages()
            self.service.complete(plan)
            self.check_progress(plan)
            self.check_pages()
            fingerprints.append(self.service.fingerprint())
        return fingerprints

    def check_plan(self, plan) -> None:
        service, drafts = self.service, self.service.settings.draft_tokens
        assert plan.index == service.steps
        assert list(plan.prefills) == sorted(plan.prefills), "first come, first served"
        for index in plan.prefills:
            assert index not in self.caches, "prefilled once"
            assert self.requests[index].arrival_milliseconds <= service.clock_milliseconds
            self.running[index] = self.requests[index].input_length
            self.caches[index] = dict.fromkeys(range(self.requests[index].input_length), 0)
        assert 0 < len(plan.rows) <= service.geometry.capacity
        assert len(plan.rows) % (drafts + 1) == 0
        for first in range(0, len(plan.rows), drafts + 1):
            rows = plan.rows[first : first + drafts + 1]
            index = rows[0].request
            context = self.running[index]
            assert [row.position for row in rows] == list(range(context, context + drafts + 1))
            assert {row.request for row in rows} == {index}
            for row in rows:
                assert self.caches[index].get(row.position) != row.salt, "a rewritten slot has another salt"
                self.caches[index][row.position] = row.salt
        self.check_turns(plan)
        self.check_admission()
        for index in self.running:
            state = service.request(index)
            written = [self.caches[index].get(position, NEVER_WRITTEN) for position in range(len(state.salts))]
            assert state.salts.tolist() == written
            assert pages_needed(len(state.salts), service.geometry) == len(state.pages)

    def check_turns(self, plan) -> None:
        turns = served(plan)
        assert len(turns) * (self.service.settings.draft_tokens + 1) == len(plan.rows), "one turn a step"
        assert len(turns) == min(len(self.running), self.service.turns_a_step), "no room is left unused"
        for waiting in self.running.keys() - set(turns):
            for index in turns:
                self.turns[waiting, index] += 1
                assert self.turns[waiting, index] <= 1, "nobody has two turns while another has none"
        for index in turns:
            for pair in [pair for pair in self.turns if pair[0] == index]:
                del self.turns[pair]

    def check_admission(self) -> None:
        """The head of the queue waits only for a reason."""
        service = self.service
        waiting = [request for request in self.requests if request.index not in self.caches | service.refusals]
        if not waiting or waiting[0].arrival_milliseconds > service.clock_milliseconds:
            return
        tokens = waiting[0].input_length + waiting[0].output_length + service.settings.draft_tokens
        limit = service.settings.max_running or math.inf
        assert pages_needed(tokens, service.geometry) > service.pool.free or len(self.running) >= limit

    def check_progress(self, plan) -> None:
        for index in served(plan):
            state, before = self.service.request(index), self.running[index]
            chosen, end = self.service.settings, state.input_length + state.output_length
            stood = accepted_drafts(chosen.seed, index, state.verify_steps - 1, chosen.draft_tokens, chosen.acceptance)
            assert state.context == min(before + 1 + stood, end) > before
            self.running[index] = state.context
            if state.context == end:
                del self.running[index]
        counts = self.service.counts()
        assert counts["in"] == len(self.requests)
        assert counts["running"] == len(self.running)
        assert counts["finished"] == len(self.caches) - len(self.running)
        assert counts["refused"] == len(self.service.refusals)
        kept = sum(self.service.request(index).context - self.requests[index].input_length for index in self.caches)
        assert self.service.tokens == kept
        assert sum((drafts + 1) * turns for drafts, turns in enumerate(self.service.acceptance)) == self.service.tokens

    def check_pages(self) -> None:
        pool = self.service.pool
        taken = [page for index in range(len(self.requests)) for page in self.service.request(index).pages]
        assert len(taken) == len(set(taken)), "a page belongs to one request"
        assert set(taken) <= set(range(pool.capacity))
        assert len(taken) + pool.free == pool.capacity, "no page is lost"

    def check_drained(self) -> None:
        assert self.service.counts()["finished"] + len(self.service.refusals) == len(self.requests)
        assert self.service.pool.free == self.service.pool.capacity
        wanted = sum(r.output_length for r in self.requests if r.index not in self.service.refusals)
        assert self.service.tokens == wanted


@st.composite
def scenarios(draw):
    count = draw(st.integers(0, 12))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 49, 50, 51, 700]), min_size=count, max_size=count))
    rows, arrival = [], 0
    for gap in gaps:
        arrival += gap
        rows.append((arrival, draw(st.integers(1, 400)), draw(st.integers(1, 20))))
    drafts = draw(st.integers(0, 5))
    geometry = Geometry(
        heads=48,
        dcp=draw(st.sampled_from([1, 2, 8])),
        interleave=draw(st.sampled_from([1, 64])),
        capacity=draw(st.integers(drafts + 1, 5 * (drafts + 1))),
    )
    chosen = ServiceSettings(
        draft_tokens=drafts,
        acceptance=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        step_milliseconds=draw(st.sampled_from([0.1, 50.0])),
        seed=draw(st.integers(0, 3)),
        max_running=draw(st.none() | st.integers(1, 4)),
    )
    return requests_of(*rows), chosen, geometry, draw(st.integers(1, 12))


@settings(max_examples=150, deadline=None)
@given(scenarios())
def test_nothing_is_lost_shared_or_starved(scenario):
    requests, chosen, geometry, pages = scenario
    checker = Checker(Service(requests, chosen, geometry, PagePool(pages)), requests)
    fingerprints = checker.run()
    checker.check_drained()
    assert len(set(fingerprints)) == len(fingerprints)
    again = Checker(Service(requests, chosen, geometry, PagePool(pages)), requests)
    assert again.run() == fingerprints, "every rank plans the same"


@settings(max_examples=50, deadline=None)
@given(scenarios(), st.integers(1, 10))
def test_stopped_early_nothing_is_lost(scenario, max_steps):
    requests, chosen, geometry, pages = scenario
    limited = ServiceSettings(**{**vars(chosen), "max_steps": max_steps})
    checker = Checker(Service(requests, limited, geometry, PagePool(pages)), requests)
    checker.run()
    assert checker.service.steps <= max_steps
    unlimited = Service(requests, chosen, geometry, PagePool(pages))
    limited_again = Service(requests, limited, geometry, PagePool(pages))
    while (plan := limited_again.next_step()) is not None:
        assert plan == unlimited.next_step(), "a limit changes no step before it"
        limited_again.complete(plan)
        unlimited.complete(plan)


# ---- negative controls: the checker does fire


class SharingPool(PagePool):
    """Hands out the same pages to everybody."""

    def allocate(self, count):
        return tuple(range(count))


class LeakingPool(PagePool):
    """Loses pages that are given back."""

    def release(self, pages):
        pass


@pytest.mark.parametrize(("pool", "message"), [(SharingPool, "belongs to one"), (LeakingPool, "no page is lost")])
def test_checker_sees_a_wrong_pool(pool, message):
    requests = synthetic_requests(3, 100, 5, 0)
    with pytest.raises(AssertionError, match=message):
        Checker(Service(requests, ServiceSettings(), Geometry(), pool(10)), requests).run()


class FrontLoaded(deque):
    """Puts the request just served first again."""

    def append(self, state):
        if state.verify_steps:
            self.appendleft(state)
        else:
            super().append(state)


def test_checker_sees_an_unfair_batch():
    requests = synthetic_requests(3, 5, 9, 0)
    service = Service(requests, ServiceSettings(acceptance=0.0), Geometry(capacity=5), PagePool(10))
    service._running = FrontLoaded()
    with pytest.raises(AssertionError, match="nobody has two turns"):
        Checker(service, requests).run()
