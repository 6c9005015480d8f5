"""The cluster's CI job: red for the right reason with each injected fault, and what its stages and report do."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from job_settings import settings

from dcp_decode.checkpoint.cpu import Clock
from dcp_decode.checkpoint.cpu import main as bench_cpu
from dcp_decode.cli import run_command
from dcp_decode.doctor.verdicts import kind_of
from dcp_decode.errors import BAD_INPUT, VERIFIED, WAIT_EXPIRED, WRONG_RESULT, UnsupportedEnvironment
from dcp_decode.job import report, stages
from dcp_decode.job.report import write_report
from dcp_decode.job.runner import Job, Outcome, differing_digest, first_error, run_stage
from dcp_decode.job.stages import Hardware, Stage
from dcp_decode.regression.compare import compare

REPOSITORY = Path(__file__).resolve().parent.parent
SMALL = REPOSITORY / "tests" / "data" / "small.toml"
RANK = {"visible_gpus": [], "cores": 2, "gpus": {"gpus": []}}
HARDWARE = {"device": "cpu", "kind": "some-processor", "ranks": [RANK]}


def run_job(artifacts: Path, *options: str) -> tuple[int, dict, dict[str, str]]:
    """launch/ci_job.sh in a folder with a doctor's findings: exit code, document, and JUnit's failure of each stage."""
    artifacts.mkdir(exist_ok=True)
    (artifacts / "doctor.json").write_text(json.dumps(HARDWARE))
    command = [str(REPOSITORY / "launch" / "ci_job.sh"), *options]
    environment = os.environ | {"ARTIFACTS": str(artifacts)}
    ended = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=240)
    assert ended.stdout.splitlines()[-1] == str(artifacts / "job.json"), ended.stderr
    failures = {
        str(case.get("name")): case[0].get("message", "")
        for case in ElementTree.parse(artifacts / "job.xml").iter("testcase")
        if len(case) and case[0].tag == "failure"
    }
    return ended.returncode, json.loads((artifacts / "job.json").read_text()), failures


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize(
    ("fault", "exit_code", "error", "cause"),
    [
        ("hang", WAIT_EXPIRED, "mailbox wait expired after 1 s: rank 1 waited for rank 0 in MERGE", "lost words"),
        ("wrong-bit", WRONG_RESULT, "step 1, layer 0, rank 1, ", "wrong data"),
    ],
)
def test_red_with_an_injected_fault(fault: str, exit_code: int, error: str, cause: str, tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    ended, document, failures = run_job(artifacts, str(SMALL), "--stages", "group", "--inject", fault)
    assert ended == document["exit_code"] == exit_code
    assert document["verdict"] == "red: group"
    assert failures.keys() == {"group"}
    assert failures["group"].startswith(error)
    assert cause in document["explanations"]["group.forensics.tar.gz"].splitlines()[0]
    page = (artifacts / "index.html").read_text()
    run = json.loads((artifacts / "group.json").read_text())
    if fault == "wrong-bit":
        assert run["verified"] is False
        assert run["worst_error"] > run["error_bound"] > 0
        assert run["worst_row"].startswith("step 1, layer 0, rank 1, row ")
    else:
        assert (run["verified"], run["worst_error"]) == (None, None)
    assert "red: group" in page
    assert "group.forensics.tar.gz" in page


def checkpoint(path: Path, slowdown: float, seed: int) -> None:
    """A checkpoint of a layer step beside its peer: 50 rounds, 10 % of noise each, 20 % in common."""
    generator = np.random.default_rng(seed)
    common, peer, step = np.exp(generator.normal(size=(3, 50)) * [[0.2], [0.1], [0.1]])
    samples = {"layer_step": (3e5 * slowdown * common * step).tolist(), "peer:torch": (1.5e5 * common * peer).tolist()}
    document = {
        "schema": 1,
        "command": "bench-cpu",
        "device": {"name": "some processor", "architecture": "x86_64"},
        "verified": None,
        "distributions": [{"batch": 5, "samples_us": samples}],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(("slowdown", "exit_code"), [(1.0, VERIFIED), (1.2, WRONG_RESULT)])
def test_red_with_a_slowdown_of_20_percent(slowdown: float, exit_code: int, tmp_path: Path) -> None:
    baselines = tmp_path / "baselines"
    checkpoint(baselines / "some-processor.json", 1.0, seed=1)
    checkpoint(tmp_path / "artifacts" / "checkpoint.json", slowdown, seed=2)
    ended, document, failures = run_job(tmp_path / "artifacts", "--stages", "gate", "--baselines", str(baselines))
    assert ended == exit_code, document
    assert failures.keys() == (set() if slowdown == 1.0 else {"gate"})
    if slowdown > 1:
        assert "1 slower than 1.1 x" in failures["gate"]


BASELINES = sorted((REPOSITORY / "results" / "baselines").glob("*.json"))


@pytest.mark.parametrize("path", BASELINES, ids=lambda path: path.stem)
@pytest.mark.parametrize(("slowdown", "slower"), [(1.0, False), (1.2, True)])
def test_committed_baselines_know_20_percent(path: Path, slowdown: float, slower: bool) -> None:
    """A baseline against itself, with every stage of ours made slower and the rounds resampled in blocks of five."""
    base = json.loads(path.read_text())
    assert path.stem.startswith(kind_of(base["device"]["name"]))
    new = copy.deepcopy(base)
    for name, rounds in series_of(new):
        generator = np.random.default_rng(3)  # the same rounds of every series
        starts = generator.integers(len(rounds) - 5, size=len(rounds) // 5)
        blocks = np.concatenate([np.array(rounds)[start : start + 5] for start in starts])
        rounds[:] = (blocks * (1.0 if ":" in name else slowdown)).tolist()
    verdicts = {stage.verdict for stage in compare(base, new, limit=1.1).stages}
    assert ("slower" in verdicts) is slower


def series_of(document: dict) -> Iterator[tuple[str, list[float]]]:
    """Every series of rounds, with a colon in the name if it is none of our stages."""
    for entry in document.get("distributions", []):
        yield from entry["samples_us"].items()
    for point in document.get("points", []):
        parts = {"": point["stages"].items(), "floor:": point["floors"].items()}
        parts["peer:"] = [(peer["name"], peer) for peer in point["peers"]]
        for prefix, timed in parts.items():
            yield from ((prefix + name, one["rounds_us"]) for name, one in timed if one and one.get("rounds_us"))


def test_a_slowdown_costs_its_share_of_cpu_time() -> None:
    """What `bench-cpu --slowdown` injects."""
    clock = Clock()
    for name, share in (("plain", 0.0), ("slower", 0.2)):
        clock.start()
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        clock.extend(share)
        clock.stop(name)
    assert clock.cpu["plain"] == [pytest.approx(0.1, rel=0.05)]
    assert clock.cpu["slower"] == [pytest.approx(0.12, rel=0.05)]
    refused = CliRunner().invoke(bench_cpu, ["--slowdown", "nan"])
    assert (refused.exit_code, "nan is not a finite number" in refused.output) == (BAD_INPUT, True)


def test_findings_of_a_gpu_become_the_hardware(tmp_path: Path) -> None:
    gpus = [{"uuid": name, "memory_bytes": size} for name, size in (("a", 7), ("b", 5), ("hidden", 3))]
    rank = {"visible_gpus": ["a", "b"], "cores": 12, "gpus": {"gpus": gpus}}
    (tmp_path / "doctor.json").write_text(json.dumps({"device": "cuda", "kind": "some-gpu", "ranks": [rank]}))
    assert Job(settings(tmp_path), (), lambda outcome: None)._hardware() == Hardware("cuda", "some-gpu", 2, 12, 5)


def python(code: str, name: str = "stage", limit: float = 30.0) -> Stage:
    return Stage(name, (sys.executable, "-c", code, *(["pytest"] if name == "tests" else [])), limit)


@pytest.mark.parametrize(
    ("name", "code", "exit_code", "text"),
    [
        ("soak", "print('fine')", VERIFIED, ""),
        ("soak", "import sys; print('error: a = 1: must be 2', file=sys.stderr); sys.exit(2)", 2, "a = 1: must be 2"),
        ("soak", "print('last words'); print('x/y.json'); raise SystemExit(1)", WRONG_RESULT, "last words"),
        ("soak", "import os; os.abort()", WAIT_EXPIRED, "no output"),
        ("tests", "print('FAILED tests/a.py::b - no'); raise SystemExit(1)", 1, "FAILED tests/a.py::b - no"),
        ("tests", "print('no tests ran'); raise SystemExit(5)", BAD_INPUT, "no tests ran"),
    ],
)
def test_a_stage_ends_in_the_contract_s_terms(name: str, code: str, exit_code: int, text: str, tmp_path: Path) -> None:
    outcome = run_stage(python(code, name), tmp_path)
    assert outcome.exit_code == exit_code
    assert outcome.text.startswith(text)
    assert (tmp_path / f"{name}.log").read_text().startswith(f"$ {sys.executable} -c ")


@pytest.mark.parametrize("name", ["stage", "tests"])
def test_a_stage_that_takes_too_long_is_ended_with_its_children(name: str, tmp_path: Path) -> None:
    code = "import os, time; child = os.fork(); print(os.getpid(), child or os.getpid(), flush=True); time.sleep(60)"
    started = time.monotonic()
    outcome = run_stage(python(code, name, limit=1.0), tmp_path)
    assert (outcome.exit_code, outcome.text) == (WAIT_EXPIRED, f"stage {name} took longer than 1 s")
    assert time.monotonic() - started < 10
    processes = {
        int(word) for line in (tmp_path / f"{name}.log").read_text().splitlines()[1:3] for word in line.split()
    }
    time.sleep(0.2)
    assert not any(Path(f"/proc/{process}/cmdline").is_file() and _runs(process) for process in processes)


def test_what_a_stage_leaves_behind_is_ended(tmp_path: Path) -> None:
    code = "import os, time; child = os.fork(); time.sleep(60 * (not child)); print(child, flush=True)"
    outcome = run_stage(python(code), tmp_path)
    assert outcome.exit_code == VERIFIED
    child = int((tmp_path / "stage.log").read_text().split()[-1])
    time.sleep(0.2)
    assert not Path(f"/proc/{child}/cmdline").is_file() or not _runs(child)


def _runs(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_nothing_runs_where_the_doctor_says_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = python("import sys; print('error: not ready', file=sys.stderr); sys.exit(2)", "doctor")
    monkeypatch.setattr(stages, "doctor", lambda _: refusing)
    shown: list[str] = []
    job = Job(settings(tmp_path), stages.NAMES, lambda outcome: shown.append(outcome.name))
    job.run()
    assert job.exit_code == BAD_INPUT
    assert tuple(shown) == stages.NAMES
    assert {outcome.text for outcome in job.outcomes} == {"not ready", "nothing can run here: see the doctor"}
    assert [outcome.exit_code for outcome in job.outcomes] == [BAD_INPUT] + [None] * (len(stages.NAMES) - 1)


@pytest.mark.xdist_group("launch")
def test_a_stopped_job_still_reports(tmp_path: Path) -> None:
    command = [str(REPOSITORY / "launch" / "ci_job.sh"), "--stages", "soak gate", "--artifacts", str(tmp_path)]
    (tmp_path / "doctor.json").write_text(json.dumps(HARDWARE))
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 30
    while not (tmp_path / "soak.log").exists() and time.monotonic() < until:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == WAIT_EXPIRED
    document = json.loads(Path(output.splitlines()[-1]).read_text())
    results = [(stage["name"], stage["result"], stage["text"]) for stage in document["stages"]]
    assert results == [
        (name, result, "the job was told to stop") for name, result in (("soak", "failed"), ("gate", "skipped"))
    ]


def stop_myself() -> None:
    """As a CI server does; Python handles the signal before the next statement."""
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a doctor that leaves no document, and of one more stage."""
    monkeypatch.setattr(stages, "doctor", lambda _: python("", "doctor"))
    monkeypatch.setattr(stages, "following", lambda *_: [python("", "soak")])


@pytest.mark.usefixtures("two_stages")
def test_a_job_that_is_stopped_between_stages_ends_before_the_next(tmp_path: Path) -> None:
    job = Job(settings(tmp_path), ("doctor", "soak"), lambda outcome: stop_myself())
    job.run()
    ends = [(outcome.name, outcome.exit_code, outcome.text) for outcome in job.outcomes]
    assert ends == [("doctor", VERIFIED, ""), ("soak", WAIT_EXPIRED, "the job was told to stop")]
    assert not (tmp_path / "soak.log").exists()


@pytest.mark.usefixtures("two_stages")
def test_a_stage_that_is_being_started_when_the_job_is_stopped_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_and_stop(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(start(["sleep", "60"], start_new_session=True))
        stop_myself()
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_and_stop)
    job = Job(settings(tmp_path), ("doctor", "soak"), lambda outcome: None)
    job.run()
    monkeypatch.undo()
    assert len(started) == 1
    assert started[0].returncode == -signal.SIGTERM
    assert [outcome.exit_code for outcome in job.outcomes] == [WAIT_EXPIRED, None]


@pytest.mark.usefixtures("two_stages")
def test_a_second_signal_does_not_break_off_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped_report(*arguments: object) -> Path:
        stop_myself()
        return write_report(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(report, "write_report", stopped_report)
    monkeypatch.setattr("dcp_decode.commands.ci_job._show", lambda outcome: stop_myself())
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("a signal went past the job"))
    try:
        assert run_command(["ci-job", "--stages", "doctor soak", "--artifacts", str(tmp_path)]) == WAIT_EXPIRED
    finally:
        signal.signal(signal.SIGTERM, before)
    document = json.loads(Path(capsys.readouterr().out.splitlines()[-1]).read_text())
    assert (document["exit_code"], document["verdict"]) == (WAIT_EXPIRED, "red: soak")


@pytest.mark.parametrize(
    ("digests", "text"), [(("a", "a"), ""), (("a", None), ""), (("a", "b"), "digest b, but stage group has a")]
)
def test_mpi_must_have_torchrun_s_digest(digests: tuple[str, str | None], text: str, tmp_path: Path) -> None:
    for name, digest in zip(("group", "mpi"), digests, strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps({"digest": digest}))
    mpi = next(stage for stage in stages.following(settings(tmp_path), Hardware()) if stage.name == "mpi")
    assert text in differing_digest(mpi, tmp_path)
    assert bool(differing_digest(mpi, tmp_path)) is bool(text)


@pytest.mark.parametrize(("wanted", "exit_code"), [(("mpi",), VERIFIED), (("group", "mpi"), WRONG_RESULT)])
def test_an_earlier_job_s_digest_says_nothing(
    wanted: tuple[str, ...], exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, mpi = [
        python(f"import json; json.dump({{'digest': {name!r}}}, open({str(tmp_path / f'{name}.json')!r}, 'w'))", name)
        for name in ("group", "mpi")
    ]
    monkeypatch.setattr(stages, "following", lambda *_: [group, dataclasses.replace(mpi, same_digest_as="group")])
    (tmp_path / "doctor.json").write_text(json.dumps(HARDWARE))
    (tmp_path / "group.json").write_text('{"digest": "an earlier one"}')
    job = Job(settings(tmp_path), wanted, lambda outcome: None)
    job.run()
    assert job.exit_code == exit_code


@pytest.mark.parametrize(
    ("document", "exit_code"), [({"verified": True}, VERIFIED), ({"verified": None}, BAD_INPUT), ({}, BAD_INPUT)]
)
def test_a_run_that_verified_nothing_is_red(document: dict, exit_code: int, tmp_path: Path) -> None:
    output = tmp_path / "group.json"
    group = python(f"import json; json.dump({document}, open({str(output)!r}, 'w'))", "group")
    outcome = run_stage(dataclasses.replace(group, verifies=True), tmp_path)
    assert (outcome.exit_code, outcome.text.startswith("no row was verified")) == (exit_code, exit_code == BAD_INPUT)
    assert run_stage(group, tmp_path).exit_code == VERIFIED


@pytest.mark.parametrize("damaged", ["", '{"verified": tr', "[]", "[" * 100_000, "\udcff"])
def test_a_damaged_document_is_red_with_a_text(damaged: str, tmp_path: Path) -> None:
    document = tmp_path / "damaged"
    document.write_bytes(damaged.encode(errors="surrogateescape"))
    group = python(f"import shutil; shutil.copy({str(document)!r}, {str(tmp_path / 'group.json')!r})", "group")
    mpi = dataclasses.replace(python("", "mpi"), same_digest_as="group")
    for stage in (dataclasses.replace(group, verifies=True), mpi):
        outcome = run_stage(stage, tmp_path)
        assert (outcome.exit_code, outcome.text) == (BAD_INPUT, "group.json is damaged, so nothing is proved by it")


@pytest.mark.parametrize(("fault", "exit_code"), [("slowdown", BAD_INPUT), (None, VERIFIED)])
def test_a_fault_that_turns_no_stage_red_turns_the_job_red(fault: str | None, exit_code: int, tmp_path: Path) -> None:
    (tmp_path / "doctor.json").write_text(json.dumps(HARDWARE))
    shown: list[Outcome] = []
    job = Job(settings(tmp_path, inject=fault), ("gate",), shown.append)  # of a kind of device without a baseline
    job.run()
    assert job.exit_code == exit_code
    assert [outcome.name for outcome in shown] == ["gate", "inject"][: 1 + (fault is not None)]


def test_report_shows_every_kind_of_end_and_escapes(tmp_path: Path) -> None:
    outcomes = [
        Outcome("doctor", "d", VERIFIED, 1.0, "", "doctor.log"),
        Outcome("group", "g", BAD_INPUT, 2.0, "<b> & 'c' \x1b[31m", "group.log"),
        Outcome("gate", "c", None, 0.0, "no baseline", None),
    ]
    document = json.loads(write_report(tmp_path, outcomes, BAD_INPUT).read_text())
    assert [stage["result"] for stage in document["stages"]] == ["ok", "failed", "skipped"]
    suite = ElementTree.parse(tmp_path / "job.xml").getroot()
    assert [suite.get(key) for key in ("tests", "failures", "skipped")] == ["3", "1", "1"]
    assert suite[1][0].get("message") == "<b> & 'c' ?[31m"
    page = (tmp_path / "index.html").read_text()
    assert "&lt;b&gt; &amp; &#39;c&#39;" in page
    assert '<a href="group.log">group</a>' in page


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("a\nerror: first\nerror: second\n", "first"),
        ("E assert\nFAILED tests/x.py::y\n1 failed\n", "FAILED tests/x.py::y"),
        ("", "no output"),
    ],
)
def test_first_error(log: str, line: str) -> None:
    assert first_error(log) == line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "doctor party"], "error: --stages = 'party': must be among doctor, group, mpi, tests"),
        (["--stages", " "], "error: --stages = ' ': must be among doctor"),
        (["--nnodes", "2", "--node-rank", "2"], "error: NODE_RANK = 2: must be less than NNODES = 2"),
        (["--artifacts", "/dev/null/x"], "error: --artifacts = '/dev/null/x': must be a folder (Not a directory)"),
        (["--stages", "gate"], "doctor.json is missing or damaged: run the stage doctor too"),
        (["--inject", "rain"], "'rain' is not one of 'hang', 'wrong-bit', 'slowdown'"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dcp_decode", "ci-job", "--artifacts", str(tmp_path), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (ended.returncode, ended.stdout) == (BAD_INPUT, "")
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"device": "gpu"},
        {"device": ["cpu"]},
        {"kind": "../baselines/other"},
        {"ranks": []},
        {"ranks": [RANK | {"visible_gpus": 1}]},
        {"ranks": [RANK | {"cores": 0}]},
        {"ranks": [RANK | {"gpus": []}]},
    ],
    ids=str,
)
def test_findings_that_are_damaged_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    job = Job(settings(tmp_path), ("gate",), lambda outcome: None)
    (tmp_path / "doctor.json").write_text(json.dumps(HARDWARE | change))
    with pytest.raises(UnsupportedEnvironment, match="run the stage doctor too"):
        job.run()
    (tmp_path / "doctor.json").write_text("[]")
    assert json.loads(write_report(tmp_path, (), VERIFIED).read_text())["device"] is None
