"""Metrics and liveness of a run: what is served, to whom, and that liveness follows the steps."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dcp_decode.cli import run_command
from dcp_decode.commands.options import metrics_options
from dcp_decode.config import load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.errors import BAD_INPUT, WAIT_EXPIRED, ConfigError, UnsupportedEnvironment
from dcp_decode.metrics import MetricsSettings, RunMetrics, serve_metrics
from dcp_decode.run import Progress
from dcp_decode.verification import WorstRow
from dcp_decode.waits import WaitTotal

pytestmark = pytest.mark.xdist_group("launch")

CONFIG = load_config(None, {"parallel.dcp": 2, "model.heads": 16, "cache.pages": 100})
# Two ranks that stay in verify steps for minutes; their mailbox waits outlast every stop here.
ENDLESS = """
[model]
heads = 16
layers = 1
topk = 16
[parallel]
dcp = 2
[mailbox]
capacity = 5
deadline_seconds = 60.0
[service]
max_steps = 100000
[workload.synthetic]
requests = 1
input_length = 64
output_length = 20000
[verify]
mode = "off"
"""


def progress(steps: int) -> Progress:
    return Progress(
        requests={"in": 7, "finished": 1, "running": 2, "waiting": 4, "refused": 0},
        steps=steps,
        tokens=3 * steps,
        worst=WorstRow(0.25, 1.0),
        free_pages=60,
        step_seconds=0.004,
        stage_seconds=[(1, (1e-6, 3e-6, 2e-6, 6e-6)), (1, (1e-6, 4e-6, 2e-6, 7e-6))],
        waits=[WaitTotal(1, "MERGE", 5, 0.5)],
    )


def get(port: int, path: str, address: str = "127.0.0.1", timeout: float = 5.0) -> tuple[int, str]:
    """Status and text; a refused or unanswered connection raises OSError."""
    try:
        with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(text: str) -> dict[str, float]:
    """Every sample but those of histogram buckets, by its name and labels."""
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def free_ports() -> int:
    """The first of two neighbouring ports that nobody listens on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def test_what_is_served_and_to_whom() -> None:
    port = free_ports()
    with serve_metrics(MetricsSettings(port, "127.0.0.1", 60.0), CONFIG, SoloControlPlane()) as observe:
        assert "dcp_decode_steps_total" not in samples(get(port, "/metrics")[1])
        observe(progress(1))
        observe(progress(2))
        status, text = get(port, "/metrics")
        assert status == 200
        served = samples(text)
        expected = {
            "dcp_decode_steps_total": 2,
            "dcp_decode_tokens_total": 6,
            "dcp_decode_requests state=waiting": 4,
            "dcp_decode_cache_pages state=free": 60,
            "dcp_decode_cache_pages state=used": 40,
            "dcp_decode_worst_error_share": 0.25,
            "dcp_decode_mailbox_waits_total rank=1 stage=MERGE": 5,
            "dcp_decode_mailbox_wait_seconds_total rank=1 stage=MERGE": 0.5,
            "dcp_decode_step_seconds_count": 2,
            "dcp_decode_stage_seconds_count rank=1 stage=sparse_decode": 4,
            "dcp_decode_stage_seconds_sum rank=1 stage=sparse_decode": 14e-6,
        }
        assert {name: served.get(name) for name in expected} == pytest.approx(expected)
        assert 'stage_seconds_bucket{le="5e-06",rank="1",stage="chain"} 0.0' in text
        assert 'stage_seconds_bucket{le="1e-05",rank="1",stage="chain"} 4.0' in text
        assert "process_resident_memory_bytes" in served
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/")[0] == 404
        with pytest.raises(OSError, match="refused"):
            get(port, "/metrics", address="127.0.0.2")  # only where it was told to
    with pytest.raises(OSError, match="refused"):
        get(port, "/metrics")


def test_liveness_follows_the_steps() -> None:
    metrics = RunMetrics(CONFIG, SoloControlPlane(), stalled_seconds=0.2)
    assert metrics.health()[0]  # not started yet: as long as a step may take
    time.sleep(0.3)
    assert not metrics.health()[0]
    metrics.observe(progress(1))
    assert metrics.health()[0]
    time.sleep(0.3)
    moving, line = metrics.health()
    assert not moving
    assert line.startswith("stalled: 1 steps, 0.3 s since the last; ")


def test_ports_that_cannot_be_used_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--metrics-port = 65535: must be at most 65534"):
        serve_metrics(MetricsSettings(65535, "127.0.0.1", 1.0), CONFIG, SoloControlPlane()).__enter__()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnsupportedEnvironment, match=f"rank 0: no metrics on 127.0.0.1:{port} "):
            serve_metrics(MetricsSettings(port, "127.0.0.1", 1.0), CONFIG, SoloControlPlane()).__enter__()
    given = ["--metrics-port", "9000"]
    addresses = ([*given, "--metrics-address", address] for address in ("", "a\udcff"))
    for arguments in (["--metrics-port", "0"], [*given, "--stalled-after", "0"], *addresses):
        assert run_command(["run", *arguments]) == BAD_INPUT
        assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def endless_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A run of two ranks and its first port."""
    config, port = tmp_path / "endless.toml", free_ports()
    config.write_text(ENDLESS)
    options = ["--metrics-port", str(port), "--stalled-after", "1", "--output", str(tmp_path / "run.json")]
    command = [sys.executable, "-m", "dcp_decode", "run", str(config), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process, port
    process.kill()
    process.wait()


def wait_for(condition, seconds: float = 30.0):  # type: ignore[no-untyped-def]
    """The condition's first true value."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if value := condition():
                return value
        assert time.monotonic() < until, "no such state in time"
        time.sleep(0.05)


def steps(port: int) -> float:
    return samples(get(port, "/metrics")[1]).get("dcp_decode_steps_total", 0.0)


def test_a_stopped_rank_turns_every_liveness_false(endless_run: tuple[subprocess.Popen[str], int]) -> None:
    process, port = endless_run
    wait_for(lambda: steps(port) > 1 and steps(port + 1) > 1)
    assert get(port, "/healthz")[0] == get(port + 1, "/healthz")[0] == 200
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    stopped = int(children[1])
    os.kill(stopped, signal.SIGSTOP)
    try:
        line = wait_for(lambda: (answer := get(port, "/healthz"))[0] == 503 and answer[1])
        assert line.startswith("stalled: ")
        assert "layer 0" in line
        # It still answers, and the metrics show the standstill; the stopped rank does not answer at all.
        before = steps(port)
        time.sleep(0.3)
        assert steps(port) == before
        with pytest.raises(OSError, match="timed out"):
            get(port + 1, "/healthz", timeout=0.5)
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: get(port, "/healthz")[0] == 200 and steps(port) > before + 1)
    process.terminate()
    assert process.wait(20) == WAIT_EXPIRED


def test_metrics_are_for_this_host_only_unless_asked_otherwise() -> None:
    command = metrics_options(click.command()(lambda **_: None))
    given = command.make_context("run", []).params
    assert (given["metrics_address"], given["metrics_port"]) == ("127.0.0.1", None)


@pytest.mark.parametrize("command", ["run", "soak"])
@pytest.mark.parametrize(("option", "value"), [("--metrics-address", "127.0.0.1"), ("--stalled-after", "120")])
def test_options_of_metrics_that_are_not_served_are_refused(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that ask for the default: whoever gives one believes that something is served."""
    assert run_command([command, option, value, "--layers", "1"]) == BAD_INPUT
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith(f"error: {option} = ")
    assert captured.err.endswith(": needs --metrics-port, without which nothing is served\n")
