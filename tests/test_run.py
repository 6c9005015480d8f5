"""The main job end to end: one digest from every launcher and fabric, its document, and what it refuses.

Runs with several processes are subprocesses of the command line; variations of a run that need no processes of their
own go through `run_rank` over loopback, whose digest the first test ties to the others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_stub import report

from dcp_decode import run
from dcp_decode.config import RunConfig, load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.errors import BAD_INPUT, VERIFIED, ConfigError, UnsupportedEnvironment
from dcp_decode.fabric import placement
from dcp_decode.kernels.fingerprint import source_hash
from dcp_decode.records import RankReport, make_plan, read_records
from dcp_decode.results import conclude
from dcp_decode.run import agree, run_rank
from dcp_decode.step import RankState
from dcp_decode.summary import RunSummary
from dcp_decode.supervisor import supervise
from dcp_decode.topk import check_row_range
from dcp_decode.verification import Verifier

pytestmark = pytest.mark.xdist_group("processes")

REPOSITORY = Path(__file__).resolve().parent.parent
SMALL = REPOSITORY / "tests" / "data" / "small.toml"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}

# Eight ranks, two requests of which one finishes, drafts rejected and overwritten, a third request refused by size.
CONFIG = """
[model]
heads = 16
layers = 1
topk = 64
[mailbox]
capacity = 10
deadline_seconds = 30.0           # a busy machine is not what these tests are about
[cache]
pages = 4
[service]
max_steps = 3
[workload]
trace = "trace.jsonl"
"""
TRACE = (
    '{"timestamp": 0, "input_length": 150, "output_length": 2}\n'
    '{"timestamp": 0, "input_length": 300, "output_length": 90}\n'
    '{"timestamp": 20, "input_length": 90, "output_length": 30}\n'
    '{"timestamp": 30, "input_length": 40000, "output_length": 5}\n'
)
REQUESTS = {"in": 4, "finished": 1, "running": 2, "waiting": 0, "refused": 1}
# 500 steps over loopback with two ranks; prints the lowest VmRSS (kB) of steps 81 .. 120 and of steps 461 .. 500.
GROWING = r"""
import re
from pathlib import Path
from dcp_decode.config import load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.run import run_rank

resident = []
status = Path("/proc/self/status")
synthetic = {"requests": 400, "input_length": 20, "output_length": 12}
config = load_config(None, {
    "model.heads": 16, "model.layers": 1, "model.topk": 16, "parallel.dcp": 2, "parallel.fabric": "loopback",
    "mailbox.capacity": 10, "mailbox.deadline_seconds": 30.0, "cache.pages": 8, "service.max_steps": 500,
    "verify.mode": "off", "workload.requests": 400, "workload.synthetic": synthetic,
})
summary = run_rank(
    config, SoloControlPlane(), lambda _: resident.append(int(re.search(r"VmRSS:\s+(\d+) kB", status.read_text())[1]))
)
print(min(resident[80:120]), min(resident[460:]), summary.requests["finished"], summary.steps)
"""
COMMANDS = {
    "builtin": [sys.executable, "-m", "dcp_decode"],
    "loopback": [sys.executable, "-m", "dcp_decode"],
    "torchrun": [str(REPOSITORY / "launch" / "torchrun.sh")],
    "mpi": [str(REPOSITORY / "launch" / "mpirun.sh")],
}


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "trace.jsonl").write_text(TRACE)
    path = folder / "small.toml"
    path.write_text(CONFIG)
    return path


def run_command(how: str, config: Path, *options: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """`run CONFIG OPTIONS` under a launcher; the document, found by the last line of standard output."""
    output = config.with_name(f"{how}{''.join(options)}.json")
    fabric = ("--fabric", "loopback") if how == "loopback" else ()
    command = [*COMMANDS[how], "run", str(config), "--output", str(output), *fabric, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, cwd=REPOSITORY, timeout=200, check=False
    )
    assert done.returncode == VERIFIED, done.stderr
    assert done.stdout.splitlines()[-1] == str(output)
    return json.loads(output.read_text()), done


def run_here(config: Path, **overrides: object) -> RunSummary:
    """The same run over loopback in this process, with overrides like `parallel__route="local"`; unchecked."""
    overrides = {"verify__mode": "off"} | overrides
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return run_rank(load_config(config, {"parallel.fabric": "loopback", **named}), SoloControlPlane())


@pytest.fixture(scope="module")
def plain(config_path: Path) -> RunSummary:
    return run_here(config_path)


@pytest.mark.parametrize("how", COMMANDS)
def test_every_launcher_and_fabric_gives_one_digest(how: str, config_path: Path, plain: RunSummary) -> None:
    document, done = run_command(how, config_path)
    assert document["digest"] == plain.digest
    assert document["verified"] is True
    assert document["checked_steps"] == document["steps"] == 3
    assert 0 < document["worst_error"] < document["error_bound"]
    assert document["requests"] == REQUESTS
    assert document["ranks"] == 8
    processes = 1 if how == "loopback" else 8
    assert len(set(document["process_ids"])) == len(document["process_ids"]) == processes
    assert document["fabric"] == ("loopback" if how == "loopback" else "shm")
    assert document["launcher"] == ("builtin" if how == "loopback" else how)
    assert document["exit_code"] == VERIFIED
    assert document["expired_waits"] == []
    assert "\x1b" not in done.stdout + done.stderr  # plain when not a terminal


@pytest.mark.parametrize("route", ["push", "local"])
def test_document_tells_the_whole_run(route: str, config_path: Path) -> None:
    document, done = run_command("builtin", config_path, "--route", route, "--seed", "9", "--layers", "2")
    assert document["schema"] == 1
    assert document["command"] == "run"
    assert document["seed"] == document["config"]["workload"]["seed"] == 9
    assert document["config"]["model"]["layers"] == 2
    assert document["geometry"]["heads"] == 16
    assert (document["route"], document["family"]) == (route, "seed")
    assert set(document["device"]) >= {"name", "driver", "architecture", "clocks"}
    assert {"torch", "python"} <= set(document["versions"])
    assert isinstance(document["dirty"], bool | None)
    assert document["commit"] is None or len(document["commit"]) == 40
    assert document["requests"]["in"] == sum(document["requests"].values()) / 2
    # Each turn keeps its own token and the drafts accepted before the first rejection.
    kept = sum((drafts + 1) * count for drafts, count in enumerate(document["acceptance"]))
    assert document["tokens"] == kept
    assert set(document["stages"]) == {"query_push", "sparse_decode", "merge", "chain"}
    for stage in document["stages"].values():
        assert 0 < stage["p50_us"] <= stage["p95_us"] <= stage["p99_us"]
        assert stage["samples"] == 2 * document["steps"]  # two layers
    chain = document["stages"]["chain"]["p50_us"]
    assert chain >= max(document["stages"][name]["p50_us"] for name in ("query_push", "sparse_decode", "merge"))
    assert "request 3 refused: 40000 input + 5 output + 4 draft tokens" in done.stdout
    assert document["refusals"][0].startswith("request 3 refused")


def test_routes_generations_and_interleave(config_path: Path, plain: RunSummary) -> None:
    local = run_here(config_path, parallel__route="local", verify__mode="every")
    assert local.verified is True
    assert run_here(config_path, mailbox__generations=3).digest == plain.digest
    assert run_here(config_path, mailbox__generations=3, parallel__route="local").digest == local.digest
    interleaved = run_here(config_path, parallel__interleave=64, verify__mode="every")
    assert interleaved.verified is True
    assert interleaved.digest != plain.digest  # other keys a rank: other bits
    assert interleaved.keys_a_row != plain.keys_a_row
    assert run_here(config_path, workload__seed=2).digest != plain.digest  # a digest can differ


def test_verification_changes_nothing_that_it_checks(config_path: Path, plain: RunSummary) -> None:
    assert (plain.verified, plain.checked_steps) == (None, 0)
    assert (plain.report().worst_error, plain.report().error_bound) == (None, None)
    sample = run_here(config_path, verify__mode="sample", verify__period=2)
    assert (sample.verified, sample.checked_steps, sample.digest) == (True, 2, plain.digest)
    every = run_here(config_path, verify__mode="every")
    assert (every.verified, every.checked_steps, every.digest) == (True, 3, plain.digest)
    assert 0 < sample.worst.share <= every.worst.share < 1


def test_row_stride_and_padding_change_no_bit(config_path: Path, plain: RunSummary) -> None:
    assert run_here(config_path, cache__page_stride_rows=100).digest == plain.digest
    assert run_here(config_path, mailbox__padded_heads=48).digest == plain.digest
    assert run_here(config_path, mailbox__capacity=14).digest == plain.digest  # still two requests a step


@pytest.mark.parametrize("how", ["loopback", "torchrun"])
def test_run_in_which_every_request_is_refused_is_bad_input_with_a_document(how: str, tmp_path: Path) -> None:
    config, output = tmp_path / "refused.toml", tmp_path / "out.json"
    two = "[cache]\npages = 1\n[workload.synthetic]\nrequests = 2\ninput_length = 15000\noutput_length = 30\n"
    config.write_text("[parallel]\ndcp = 2\n[model]\nheads = 16\n" + two)
    fabric = ("--fabric", "loopback") if how == "loopback" else ()
    done = subprocess.run(
        [*COMMANDS[how], "run", str(config), "--output", str(output), *fabric],
        capture_output=True, text=True, env=ENVIRONMENT, cwd=REPOSITORY, timeout=100, check=False,
    )  # fmt: skip
    error = "2 of 2 requests can never run; request 0 refused: 15000 input + 30 output + 4 draft tokens need "
    assert done.returncode == BAD_INPUT
    assert [line.startswith(f"error: {error}") for line in done.stderr.splitlines()] == [True]
    assert done.stdout.splitlines()[-1] == str(output)
    document = json.loads(output.read_text())
    assert (document["exit_code"], document["verified"]) == (BAD_INPUT, None)
    assert document["error"].startswith(error)
    assert document["requests"] == {"in": 2, "finished": 0, "running": 0, "waiting": 0, "refused": 2}
    assert (document["steps"], document["keys_per_row"], len(document["refusals"])) == (0, None, 2)
    assert document["stages"]["chain"]["samples"] == 0


def test_a_fused_chain_is_refused_where_auto_means_the_cpu(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_refusal", lambda compiles: "no CUDA GPU")
    with pytest.raises(UnsupportedEnvironment, match=r"parallel.chain = 'fused': needs a GPU.*rank 0: no CUDA GPU"):
        run_here(config_path, parallel__device="auto", parallel__chain="fused")


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("hang", ("--dcp", "1"), "needs two ranks, but parallel.dcp = 1"),
        ("hang", ("--max-steps", "1"), "did not show"),
        ("wrong-bit", ("--verify", "off"), "did not show"),
        ("wrong-bit", ("--verify", "sample"), "did not show"),
    ],
)
def test_an_injected_fault_that_can_not_show_is_refused(
    fault: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    command = [*COMMANDS["loopback"], "run", str(SMALL), "--fabric", "loopback", "--inject", fault, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (BAD_INPUT, "")
    assert done.stderr.startswith(f"error: --inject = '{fault}': {message}")


def test_rows_that_31_bits_do_not_number_are_refused(config_path: Path) -> None:
    assert check_row_range(2047, load_config(None, {"cache.page_stride_rows": 1 << 20}).geometry())
    with pytest.raises(ConfigError, match=r"cache.pages = 2047: .* 31 bits"):  # and the spare page of a GPU
        run_here(config_path, cache__pages=2047, cache__page_stride_rows=1 << 20)


@pytest.mark.parametrize("fabric", ["loopback", "shm"])
def test_ranks_that_do_not_fit_the_memory_are_refused_before_they_are_killed(
    fabric: str, config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "memory_bytes", lambda: 4 << 20)
    config = load_config(config_path, {"parallel.fabric": fabric, "service.max_steps": 1})
    ranks = 1 if fabric == "loopback" else 8
    supervise(
        lambda control: run_rank(config, control).report(), ranks, tmp_path,
        wait_deadline_seconds=5, control_deadline_seconds=60,
    )  # fmt: skip
    conclusion = conclude(make_plan("run", config, "builtin", None), read_records(tmp_path))
    assert conclusion.exit_code == BAD_INPUT
    error = r"cache.pages = 4: 8 ranks x 1 layers x 4 pages and the mailboxes take 0\.0 GiB, and .* has 0\.0"
    assert re.fullmatch(error, str(conclusion.error))


def test_a_limit_of_running_requests_is_the_services(config_path: Path) -> None:
    assert run_here(config_path, service__max_running=1).requests == REQUESTS | {"running": 1, "waiting": 1}


def test_ranks_agree_on_the_kernel_sources(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(run, "agree", lambda control, what, values: asked.update(values))
    run_here(config_path, service__max_steps=1)
    assert asked["kernel sources"] == source_hash()


@pytest.mark.parametrize(("place", "name", "call"), [(Verifier, "check", 2), (RankState, "prefill", 1)])
def test_what_one_rank_does_longer_than_a_mailbox_deadline_expires_no_wait(
    place: type, name: str, call: int, config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification and prefill are the host's: the ranks meet after them."""
    real, calls = getattr(place, name), []

    def slow(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            time.sleep(3.0)
        return real(*arguments)

    def body(control: ControlPlane) -> RankReport:
        if control.rank == 1:
            monkeypatch.setattr(place, name, slow)
        return run_rank(config, control).report()

    settings = {"parallel.dcp": 2, "service.max_steps": 3, "mailbox.deadline_seconds": 2.0}
    config = load_config(config_path, settings)
    supervise(body, 2, tmp_path, wait_deadline_seconds=2.0, control_deadline_seconds=60)
    conclusion = conclude(make_plan("run", config, "builtin", None), read_records(tmp_path))
    assert conclusion.exit_code == VERIFIED, conclusion.error


class TwoRanks(SoloControlPlane):
    """Rank 0 of 2 whose peer gives the values of `theirs`."""

    size = 2

    def __init__(self, theirs: Callable[[Any], Any]) -> None:
        super().__init__()
        self.theirs = theirs

    def all_gather(self, value: Any, label: str) -> list[Any]:
        return [value, self.theirs(value)]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"cache": {"k_scale": 0.5, "pages": 4}}, "cache.k_scale = 0.5: on rank 1 must equal rank 0's 0.25"),
        ({"cache": {"k_scale": 0.25}}, "cache.pages = None: on rank 1 must equal rank 0's 4"),
        ({"cache": {"k_scale": 0.25, "pages": 4, "new": 1}}, "cache.new = 1: on rank 1 must equal rank 0's None"),
    ],
)
def test_difference_between_ranks_is_named(theirs: dict, message: str) -> None:
    own = {"cache": {"k_scale": 0.25, "pages": 4}}
    flat = {f"cache.{key}": value for key, value in theirs["cache"].items()}
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        agree(TwoRanks(lambda _: flat), "config", own)
    agree(TwoRanks(lambda value: value), "config", own)


@pytest.mark.parametrize("key", ["requests", "service state"])
def test_ranks_of_other_traces_or_schedules_are_refused(key: str, config_path: Path) -> None:
    def theirs(value: Any) -> Any:
        return value | {key: "others"} if isinstance(value, dict) and key in value else value

    config = load_config(config_path, {"parallel.fabric": "loopback", "verify.mode": "off", "service.max_steps": 1})
    with pytest.raises(ConfigError, match=f"{key} = 'others': on rank 1 must equal rank 0's "):
        run_rank(config, TwoRanks(theirs))


@pytest.mark.parametrize(("key", "value"), [("k_scale", 0.0625 * (1 + 2.0**-52)), ("q_scale", 0.125)])
def test_scale_of_one_rank_is_refused_at_start(key: str, value: float, config_path: Path, tmp_path: Path) -> None:
    """Also a difference far below what a printed float of few digits would show."""

    def body(control: ControlPlane) -> RankReport:
        config: RunConfig = load_config(config_path, {f"cache.{key}": value} if control.rank == 3 else {})
        run_rank(config, control)
        return report()

    supervise(body, 8, tmp_path, wait_deadline_seconds=5, control_deadline_seconds=60)
    records = read_records(tmp_path)
    conclusion = conclude(make_plan("run", load_config(config_path), "builtin", None), records)
    assert conclusion.exit_code == BAD_INPUT
    assert conclusion.error == f"cache.{key} = {value!r}: on rank 3 must equal rank 0's 0.0625"
    assert {(record.exit_code, record.error) for record in records.values()} == {(BAD_INPUT, conclusion.error)}


def test_memory_is_flat_over_500_steps(tmp_path: Path) -> None:
    """Resident memory around step 500 against that around step 100, in a process of its own: only bookkeeping grows.

    A step of one layer keeps, for each of 2 ranks, a digest and a tuple of four floats with their objects: 0.4 KB, or
    0.3 MB in 400 steps. malloc's own threshold would move up and let freed megabytes stay resident, so it is fixed. A
    leak of the query words of a step (10 * 16 * 576 bytes a rank) would be 70 MB.
    """
    script = tmp_path / "grow.py"
    script.write_text(GROWING)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        timeout=200,
        check=True,
    )
    before, after, finished, steps = map(int, done.stdout.split())
    assert steps == 500
    assert finished > 100  # pages and salts of many requests came and went
    assert after - before < 2 * 1024  # kB
