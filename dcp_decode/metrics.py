"""Watching a long run from outside: Prometheus metrics and liveness, over HTTP, while it runs.

    rank r  --every step-->  /metrics   on port + r: what Prometheus scrapes, one target a rank
                             /healthz   200 while steps end, 503 with a sentence once none has for too long

* **Per rank, not gathered.** Counts of the service (steps, tokens, requests, pages) are the same on every rank; times
  and waits are a rank's own, and those are what one looks for: the rank that makes the others wait is the one that
  waits least. Gathering would need an exchange in every step, which would also stop with the run.
* **Liveness is movement.** A server thread answers as long as its process runs, so an answer says nothing. A stopped
  process does not answer at all; the others' steps stop then, and their answer turns to 503.
* Bound to loopback unless told otherwise: nothing here authenticates.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Histogram, Info, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.forensics.black_box import black_box
from dcp_decode.step import TIMED

if TYPE_CHECKING:
    from dcp_decode.config import RunConfig
    from dcp_decode.run import Progress

LARGEST_PORT = 65_535
# 1, 2, 5 a decade: a kernel takes microseconds, a stage on shared CPU cores a second.
BUCKETS = tuple(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2, 5))


@dataclass(frozen=True)
class MetricsSettings:
    """port: rank r listens on port + r. address: to bind to. stalled_seconds: longest time from step to step."""

    port: int
    address: str
    stalled_seconds: float


class RunMetrics(Collector):
    """What one process says of its run; `observe` after every step."""

    def __init__(self, config: RunConfig, control: ControlPlane, stalled_seconds: float) -> None:
        self.control = control
        self.pages = config.cache.pages
        self.stalled_seconds = stalled_seconds
        self.registry = CollectorRegistry()
        self._latest: Progress | None = None
        self._moved = time.monotonic()
        self._step = Histogram(
            "dcp_decode_step_seconds",
            "Wall time of all layers of a verify step, verification not included",
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._stages = Histogram(
            "dcp_decode_stage_seconds",
            "Wall time of a stage of a layer, waits for other ranks included; of steps that run stage by stage",
            ("rank", "stage"),
            buckets=BUCKETS,
            registry=self.registry,
        )
        parallel = {key: str(value) for key, value in config.parallel.model_dump(mode="json").items()}
        Info("dcp_decode_run", "What runs", registry=self.registry).info(
            parallel | {"model": config.model.name, "launcher": control.name, "rank": str(control.rank)}
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def observe(self, progress: Progress) -> None:
        """A step has ended."""
        self._latest = progress
        self._moved = time.monotonic()
        self._step.observe(progress.step_seconds)
        for rank, seconds in progress.stage_seconds:
            for stage, value in zip(TIMED, seconds, strict=True):
                self._stages.labels(rank, stage).observe(value)

    def collect(self) -> Iterable[Metric]:
        """Totals and states as of the latest step."""
        progress = self._latest
        if progress is None:
            return
        yield CounterMetricFamily("dcp_decode_steps", "Verify steps", progress.steps)
        yield CounterMetricFamily("dcp_decode_tokens", "Tokens kept", progress.tokens)
        requests = GaugeMetricFamily("dcp_decode_requests", "Requests by state", labels=["state"])
        for state in ("finished", "running", "waiting", "refused"):
            requests.add_metric([state], progress.requests[state])
        yield requests
        pages = GaugeMetricFamily("dcp_decode_cache_pages", "Pages of every rank's cache", labels=["state"])
        pages.add_metric(["free"], progress.free_pages)
        pages.add_metric(["used"], self.pages - progress.free_pages)
        yield pages
        yield GaugeMetricFamily(
            "dcp_decode_worst_error_share", "Error over bound of the worst row and head so far", progress.worst.share
        )
        labels = ["rank", "stage"]
        waits = CounterMetricFamily("dcp_decode_mailbox_waits", "Waits that found words missing", labels=labels)
        seconds = CounterMetricFamily("dcp_decode_mailbox_wait_seconds", "Time spent in those waits", labels=labels)
        for wait in progress.waits:
            waits.add_metric([str(wait.rank), wait.stage], wait.count)
            seconds.add_metric([str(wait.rank), wait.stage], wait.seconds)
        yield from (waits, seconds)

    def health(self) -> tuple[bool, str]:
        """Whether steps still move, and a line that says where the run stands."""
        still = time.monotonic() - self._moved
        moving = still <= self.stalled_seconds
        steps = 0 if self._latest is None else self._latest.steps
        line = f"{'ok' if moving else 'stalled'}: {steps} steps, {still:.1f} s since the last; {black_box.position()}"
        missing = sorted({f"rank {wait['source_rank']} at '{wait['label']}'" for wait in self.control.waits()})
        return moving, line + (f"; waits for {', '.join(missing)}" if missing else "")

    def application(self, environment: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        """The WSGI application."""
        path = environment.get("PATH_INFO")
        if path == "/metrics":
            return make_wsgi_app(self.registry)(environment, respond)
        status, text = "404 Not Found", "/metrics or /healthz"
        if path == "/healthz":
            moving, text = self.health()
            status = "200 OK" if moving else "503 Service Unavailable"
        body = f"{text}\n".encode()
        respond(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [body]


@contextlib.contextmanager
def serve_metrics(
    settings: MetricsSettings, config: RunConfig, control: ControlPlane
) -> Iterator[Callable[[Progress], None]]:
    """Serve this rank's metrics; yields what to call after every step. Raises UnsupportedEnvironment or ConfigError."""
    largest = LARGEST_PORT - config.parallel.dcp + 1
    if settings.port > largest:
        raise ConfigError("--metrics-port", settings.port, f"must be at most {largest}: rank r listens on port + r")
    metrics = RunMetrics(config, control, settings.stalled_seconds)
    port = settings.port + control.rank
    try:
        server = make_server(settings.address, port, metrics.application, _Server, _Handler)
    except OSError as error:
        raise UnsupportedEnvironment(
            f"rank {control.rank}: no metrics on {settings.address}:{port} ({error.strerror})"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield metrics.observe
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a client that keeps its connection open must not keep the process


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: standard error belongs to the run."""
