"""The decode service: requests of a trace in, verify steps out. A pure state machine, replicated on every rank.

    trace --arrival--> waiting --pages--> running --rows--> StepPlan --complete--> tokens kept --> finished
             |                              ^  |                                                     |
             +-- can never fit: refused     +--+ rotation: the longest unserved first     pages back to the pool

Nothing here depends on a rank, a tensor's value, wall time or I/O, so every rank builds the same plan by itself and no
schedule travels; `fingerprint()` is what ranks compare to prove that.

* **Clock.** Virtual: a step takes `step_milliseconds`, and when nothing runs it jumps to the next arrival.
* **Admission** is first come, first served, and reserves the pages of input + output + drafts at once, so a running
  request can always take its next step: there is no preemption. Out of pages, or `max_running` requests running: the
  head of the queue waits and nobody overtakes it (a small request that may pass a big one can starve it). One that
  would not fit an empty pool is refused when the service starts, by name and reason.
* **Batch.** Each request brings draft_tokens + 1 rows: its last token and the drafts after it, at positions c, c + 1,
  ... of a context of c tokens; row j selects from positions 0 .. c + j. If more requests run than the batch has room
  for, they rotate: those served go to the back, so in the steps between two turns of a request no other one has two.
* **Acceptance.** A hash of (seed, request, step, draft) decides whether each draft stands, up to the first that does
  not. The row's own token always stands, so a step keeps 1 .. draft_tokens + 1 tokens, never more than are left to
  `output_length`. The slots behind the kept tokens are written again by the next step, with another salt.

Conservation is checked whenever counts are asked for: in = finished + running + waiting + refused, where a request that
has not arrived yet is waiting.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from dcp_decode.cache import PagePool, pages_needed
from dcp_decode.errors import ConfigError
from dcp_decode.geometry import MAX_CONTEXT, Geometry
from dcp_decode.trace import TraceRequest
from dcp_decode.workload import Purpose, hashed_word

NEVER_WRITTEN = -1  # salt of a reserved slot that no token has been written to


@dataclass(frozen=True)
class VerifyRow:
    """One row of a verify step: the token `salt` of `request` at `position`, which selects from 0 .. position."""

    request: int
    position: int
    salt: int


@dataclass(frozen=True)
class StepPlan:
    """What one verify step does, the same on every rank.

    index: number of the step, from 0. prefills: requests admitted now, whose prompt (positions 0 .. input_length - 1,
    salt 0) must be in the caches before the rows. rows: at most geometry.capacity, those of a request consecutive.
    """

    index: int
    prefills: tuple[int, ...]
    rows: tuple[VerifyRow, ...]


@dataclass(frozen=True)
class ServiceSettings:
    """draft_tokens: drafts verified a step and request. acceptance: probability that a draft stands, 0 .. 1.

    step_milliseconds: virtual duration of a verify step. max_steps: stop after so many steps (None: drain).
    max_running: requests that may run at once (None: as many as have pages; more than fit a batch take turns).
    """

    draft_tokens: int = 4
    acceptance: float = 0.7
    step_milliseconds: float = 50.0
    seed: int = 0
    max_steps: int | None = None
    max_running: int | None = None

    def __post_init__(self) -> None:
        if self.draft_tokens < 0:
            raise ConfigError("service.draft_tokens", self.draft_tokens, "must be at least 0")
        if not 0 <= self.acceptance <= 1:
            raise ConfigError("service.acceptance", self.acceptance, "must be in 0 .. 1")
        if not (math.isfinite(self.step_milliseconds) and self.step_milliseconds > 0):
            raise ConfigError("service.step_milliseconds", self.step_milliseconds, "must be finite and greater than 0")
        for key, value in (("service.max_steps", self.max_steps), ("service.max_running", self.max_running)):
            if value is not None and value < 1:
                raise ConfigError(key, value, "must be at least 1")


@dataclass
class RequestState:
    """One request of the trace as it stands. Times in milliseconds, lengths in tokens.

    pages: page numbers on every rank, in table order; empty unless running. context: tokens in the caches.
    salts: int64 [reserved tokens], identity of the token that the caches hold at each position (rejected drafts
    included, until they are overwritten), NEVER_WRITTEN elsewhere; empty unless running.
    """

    index: int
    name: str
    arrival_milliseconds: int
    input_length: int
    output_length: int
    pages: tuple[int, ...] = ()
    context: int = 0
    verify_steps: int = 0
    salts: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def remaining(self) -> int:
        """Output tokens still to keep."""
        return self.input_length + self.output_length - self.context


def accepted_drafts(seed: int, request: int, step: int, draft_tokens: int, acceptance: float) -> int:
    """How many drafts of a request's `step` stand: independent trials, stopping at the first rejection."""
    threshold = acceptance * 2.0**53  # compared as an exact integer against an exact double
    for draft in range(draft_tokens):
        if hashed_word(seed, Purpose.ACCEPTANCE, request, step, draft) >> 11 >= threshold:
            return draft
    return draft_tokens


class Service:
    """Admits, batches, accepts and finishes the requests; `next_step` and `complete` alternate.

    requests: in order of arrival (ConfigError otherwise). pool: an entirely free PagePool, used by this service only.
    Readable: tokens (kept so far), steps (completed), acceptance (histogram: entry a counts the turns that kept a
    drafts), clock_milliseconds, refusals (request index -> one-line reason).
    """

    def __init__(
        self, requests: Iterable[TraceRequest], settings: ServiceSettings, geometry: Geometry, pool: PagePool
    ) -> None:
        rows_a_request = settings.draft_tokens + 1
        if rows_a_request > geometry.capacity:
            raise ConfigError(
                "service.draft_tokens",
                settings.draft_tokens,
                f"a request's draft_tokens + 1 rows must fit mailbox.capacity = {geometry.capacity}",
            )
        if pool.free != pool.capacity:
            raise ValueError(f"the page pool must be free at start, but {pool.capacity - pool.free} pages are taken")
        self.settings = settings
        self.geometry = geometry
        self.pool = pool
        self.turns_a_step = geometry.capacity // rows_a_request
        self.tokens = 0
        self.steps = 0
        self.acceptance = [0] * rows_a_request
        self.clock_milliseconds = 0.0
        self.refusals: dict[int, str] = {}
        self._requests: list[RequestState] = []
        self._waiting: deque[RequestState] = deque()
        self._running: deque[RequestState] = deque()
        self._finished = 0
        self._pending: StepPlan | None = None
        self._history = hashlib.sha256(repr((settings, geometry, pool.capacity)).encode())
        self._enter(requests)

    def next_step(self) -> StepPlan | None:
        """The next verify step, its salts already entered; None once drained or after `max_steps` steps."""
        if self._pending is not None:
            raise RuntimeError(f"step {self._pending.index} is not complete yet")
        if self.settings.max_steps is not None and self.steps >= self.settings.max_steps:
            return None
        if not self._running:
            if not self._waiting:
                return None
            self.clock_milliseconds = max(self.clock_milliseconds, float(self._waiting[0].arrival_milliseconds))
        prefills = tuple(self._admit())
        if not self._running:
            # Refused requests are out of the queue, so an empty service can always admit: without pages it would spin.
            raise RuntimeError(f"nothing runs, yet only {self.pool.free} of {self.pool.capacity} pages are free")
        rows = []
        for state in list(self._running)[: self.turns_a_step]:
            state.verify_steps += 1
            for position in range(state.context, state.context + self.settings.draft_tokens + 1):
                state.salts[position] = state.verify_steps
                rows.append(VerifyRow(state.index, position, state.verify_steps))
        self._pending = StepPlan(self.steps, prefills, tuple(rows))
        return self._pending

    def complete(self, plan: StepPlan) -> None:
        """Account for the step that `next_step` returned last: keep accepted tokens, finish requests, free pages."""
        if plan != self._pending:
            raise RuntimeError(f"step {plan.index} is not the one in progress")
        self._pending = None
        self._history.update(repr(plan).encode())
        for index in dict.fromkeys(row.request for row in plan.rows):
            state = self._running.popleft()
            if state.index != index:
                raise RuntimeError(f"{state.name} is next in turn, but the plan holds request {index}")
            self._keep(state)
            if state.remaining:
                self._running.append(state)
            else:
                self._finish(state)
        self.steps += 1
        self.clock_milliseconds += self.settings.step_milliseconds

    def counts(self) -> dict[str, int]:
        """Requests by state; raises RuntimeError if one was lost or counted twice."""
        counts = {
            "in": len(self._requests),
            "finished": self._finished,
            "running": len(self._running),
            "waiting": len(self._waiting),
            "refused": len(self.refusals),
        }
        if 2 * counts["in"] != sum(counts.values()):
            raise RuntimeError(f"requests were lost or counted twice: {counts}")
        return counts

    def request(self, index: int) -> RequestState:
        """The state of the request at `index` of the trace (live: it changes with the steps)."""
        return self._requests[index]

    def fingerprint(self) -> str:
        """SHA-256 of the settings, the requests, and every plan and acceptance so far: equal only on agreeing ranks."""
        now = repr((self.counts(), self.pool.free, self.clock_milliseconds, self.tokens, self.acceptance))
        digest = self._history.copy()
        digest.update(now.encode())
        return digest.hexdigest()

    def _enter(self, requests: Iterable[TraceRequest]) -> None:
        """Queue the requests of the trace, or refuse those that can never run."""
        latest = 0
        for index, request in enumerate(requests):
            if request.index != index:
                raise ConfigError("request.index", request.index, f"must be {index}, its place in the trace")
            if request.arrival_milliseconds < latest:
                raise ConfigError(
                    f"{request.name}: arrival", request.arrival_milliseconds, f"must not be before {latest} ms"
                )
            latest = request.arrival_milliseconds
            for key, length in (("input_length", request.input_length), ("output_length", request.output_length)):
                if length < 1:
                    raise ConfigError(f"{request.name}: {key}", length, "must be at least 1 token")
            state = RequestState(index, request.name, latest, request.input_length, request.output_length)
            self._requests.append(state)
            self._history.update(repr(request).encode())
            reason = self._never_fits(state)
            if reason is None:
                self._waiting.append(state)
            else:
                self.refusals[index] = f"{state.name} refused: {reason}"

    def _never_fits(self, state: RequestState) -> str | None:
        tokens = self._reserved_tokens(state)
        parts = f"{state.input_length} input + {state.output_length} output + {self.settings.draft_tokens} draft tokens"
        if tokens > MAX_CONTEXT:
            return f"{parts} exceed the largest context, {MAX_CONTEXT} tokens"
        needed = pages_needed(tokens, self.geometry)
        if needed > self.pool.capacity:
            return f"{parts} need {needed} pages on every rank, and the cache has {self.pool.capacity}"
        return None

    def _reserved_tokens(self, state: RequestState) -> int:
        return state.input_length + state.output_length + self.settings.draft_tokens

    def _admit(self) -> list[int]:
        """Move arrived requests from the head of the queue to the running ones, as far as pages and room go."""
        admitted = []
        limit = self.settings.max_running
        while self._waiting and self._waiting[0].arrival_milliseconds <= self.clock_milliseconds:
            if limit is not None and len(self._running) >= limit:
                break
            state = self._waiting[0]
            tokens = self._reserved_tokens(state)
            pages = self.pool.allocate(pages_needed(tokens, self.geometry))
            if pages is None:
                break
            self._waiting.popleft()
            state.pages = pages
            state.context = state.input_length
            state.salts = torch.full((tokens,), NEVER_WRITTEN, dtype=torch.int64)
            state.salts[: state.input_length] = 0
            self._running.append(state)
            admitted.append(state.index)
        return admitted

    def _keep(self, state: RequestState) -> None:
        """Append the tokens that stand after the request's latest step."""
        settings = self.settings
        # verify_steps was counted up by the plan: the step that is being completed is the one before.
        step = state.verify_steps - 1
        drafts = accepted_drafts(settings.seed, state.index, step, settings.draft_tokens, settings.acceptance)
        kept = min(1 + drafts, state.remaining)
        state.context += kept
        self.tokens += kept
        self.acceptance[kept - 1] += 1
        self._history.update(repr((state.index, state.context, state.pages)).encode())

    def _finish(self, state: RequestState) -> None:
        self.pool.release(state.pages)
        state.pages = ()
        state.salts = torch.empty(0, dtype=torch.int64)
        self._finished += 1
