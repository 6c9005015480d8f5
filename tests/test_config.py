"""Configs: what is refused and in which words, defaults, overrides, and the exit code of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dcp_decode.cli import run_command
from dcp_decode.config import SAMPLE_TRACE, RunConfig, load_config
from dcp_decode.errors import BAD_INPUT, ConfigError
from dcp_decode.trace import read_trace

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

# TOML text -> (key named, value named, words of what is allowed)
BAD_CONFIGS = {
    "[model\n": ("config", "bad.toml", "valid TOML"),
    "model = 3": ("model", "3", "a table with the keys name, heads, layers"),
    "[modle]\nheads = 96": ("modle", "heads", "did you mean model?"),
    "[model]\nhead = 96": ("model.head", "96", "unknown key, allowed are name, heads, layers"),
    "[model]\nheads = 96.0": ("model.heads", "96.0", "an integer"),
    "[model]\nheads = '96'": ("model.heads", "'96'", "an integer"),
    "[model]\nheads = true": ("model.heads", "True", "an integer"),
    "[model]\nheads = 100": ("model.heads", "100", "multiple of 16"),
    "[model]\nheads = 0": ("model.heads", "0", "16 .. 1024"),
    "[model]\nheads = 48\n[parallel]\ndcp = 16\ninterleave = 0": ("parallel.interleave", "0", "1 .. 1048576"),
    "[model]\nheads = 2032\n": ("model.heads", "2032", "16 .. 1024"),
    "[model]\nlayers = 0": ("model.layers", "0", "1 .. 256"),
    "[model]\ntopk = 0": ("model.topk", "0", "1 .. 2048"),
    "[model]\ntopk = 2049": ("model.topk", "2049", "1 .. 2048"),
    "[model]\nsoftmax_scale = 0.0": ("model.softmax_scale", "0.0", "greater than 0"),
    "[model]\nsoftmax_scale = -1.0": ("model.softmax_scale", "-1.0", "greater than 0"),
    "[model]\nsoftmax_scale = nan": ("model.softmax_scale", "nan", "a finite number"),
    "[model]\nsoftmax_scale = inf": ("model.softmax_scale", "inf", "a finite number"),
    "[model]\nsoftmax_scale = 1e36": ("softmax_scale * cache.q_scale * cache.k_scale", "e+33", "finite in FP32"),
    "[parallel]\ndcp = 3": ("parallel.dcp", "3", "1, 2, 4, 8, 16"),
    "[parallel]\ndcp = 32": ("parallel.dcp", "32", "1, 2, 4, 8, 16"),
    "[parallel]\nfabric = 'infiniband'": ("parallel.fabric", "'infiniband'", "auto, shm, loopback, nvshmem, symm_mem"),
    "[parallel]\nroute = 'pull'": ("parallel.route", "'pull'", "push, local"),
    "[parallel]\ndevice = 'tpu'": ("parallel.device", "'tpu'", "auto, cpu, cuda"),
    "[parallel]\nfabric = 'shm'\ndevice = 'cuda'": ("parallel.device", "'cuda'", "cpu or auto"),
    "[parallel]\nfabric = 'nvshmem'\ndevice = 'cpu'": ("parallel.device", "'cpu'", "cuda or auto"),
    "[mailbox]\ncapacity = 0": ("mailbox.capacity", "0", "1 .. 4096"),
    "[mailbox]\ncapacity = 4": ("service.draft_tokens", "4", "must fit mailbox.capacity = 4"),
    "[mailbox]\npadded_heads = 95": ("mailbox.padded_heads", "95", "96 .. 2048"),
    "[parallel]\nchain = 'fused'": ("parallel.chain", "'fused'", "use auto or staged"),
    "[parallel]\nchain = 'fused'\ndevice = 'cuda'\nroute = 'local'": ("parallel.chain", "'fused'", "route = push"),
    "[mailbox]\ngenerations = 1": ("mailbox.generations", "1", "2, 3"),
    "[mailbox]\ndeadline_seconds = 0": ("mailbox.deadline_seconds", "0", "greater than 0"),
    "[mailbox]\ndeadline_seconds = inf": ("mailbox.deadline_seconds", "inf", "at most 86400"),
    "[mailbox]\ncontrol_deadline_seconds = 1.0": ("mailbox.control_deadline_seconds", "1.0", "at least"),
    "[cache]\npages = 0": ("cache.pages", "0", "1 .. "),
    "[cache]\npage_stride_rows = 63": ("cache.page_stride_rows", "63", "64 .. "),
    "[cache]\nq_scale = 0.0": ("cache.q_scale", "0.0", "greater than 0"),
    "[cache]\nk_scale = 1e-45": ("softmax_scale * cache.q_scale * cache.k_scale", "e-", "finite in FP32"),
    "[service]\ndraft_tokens = -1": ("service.draft_tokens", "-1", "0 .. 63"),
    "[service]\nacceptance = 1.5": ("service.acceptance", "1.5", "0 .. 1"),
    "[service]\nstep_milliseconds = 0": ("service.step_milliseconds", "0", "greater than 0"),
    "[service]\nmax_steps = 0": ("service.max_steps", "0", "1 .. "),
    "[workload]\nseed = -1": ("workload.seed", "-1", "0 .. "),
    "[workload]\nrequests = 0": ("workload.requests", "0", "1 .. "),
    "[workload]\ntrace = 5": ("workload.trace", "5", "a path"),
    "[workload]\ntrace = 'missing.jsonl'": ("workload.trace", "missing.jsonl", "an existing file"),
    "[workload]\ntrace = 'bad.toml'\n[workload.synthetic]\nrequests = 1\ninput_length = 1\noutput_length = 1": (
        "workload.trace",
        "bad.toml",
        "not both",
    ),
    "[workload.synthetic]\nrequests = 1\ninput_length = 1": ("workload.synthetic.output_length", "None", "is required"),
    "[workload.synthetic]\nrequests = 1\ninput_length = 1048576\noutput_length = 1": (
        "workload.synthetic.input_length",
        "1048576",
        "at most 1048576",
    ),
    "[verify]\nmode = 'always'": ("verify.mode", "'always'", "every, sample, off"),
    "[verify]\nperiod = 0": ("verify.period", "0", "1 .. "),
    "[workload]\ntrace = 'loop/x'": ("workload.trace", "loop/x", "an existing file"),
    f"[workload]\ntrace = '{'x' * 300}'": ("workload.trace", " ... ", "an existing file"),
    '[parallel]\nkernels = "a\\u0000b"': ("parallel.kernels", "\\x00", "a path without null bytes"),
    f"[parallel]\nfabric = '{'x' * 90_000}'": ("parallel.fabric", " ... ", "auto, shm"),
    f"[model]\n{'x' * 90_000} = 1": ("model.xx", " ... ", "unknown key"),
    '[model]\n"a\\nb" = 1': ("model.a\\nb", "1", "unknown key"),
    f"[model]\nlayers = {'9' * 4000}": ("model.layers", " ... ", "1 .. 256"),
    f"[model]\nlayers = {'9' * 5000}": ("config", "bad.toml", "4300 digits"),
    f"model = {'[' * 5000}": ("config", "bad.toml", "recursion"),
    ".".join(["model"] * 2000) + " = 1": ("model.model", "too large to show", "unknown key"),
    "#" * ((1 << 20) + 1): ("config", "bad.toml", "has more than 1048576 bytes"),
}

# command line after `run` -> (name, value, words)
BAD_OPTIONS = {
    "--layers 0": ("model.layers", "0", "1 .. 256"),
    "--layers two": ("--layers", "'two'", "not a valid integer"),
    "--seed -5": ("workload.seed", "-5", "0 .. "),
    "--verify never": ("verify.mode", "'never'", "every, sample, off"),
    "--fabric tcp": ("parallel.fabric", "'tcp'", "loopback"),
    "--route up": ("parallel.route", "'up'", "push, local"),
    "--generations 4": ("mailbox.generations", "4", "2, 3"),
    "--interleave 0": ("parallel.interleave", "0", "1 .. "),
    "--max-steps 0": ("service.max_steps", "0", "1 .. "),
    "--requests 0": ("workload.requests", "0", "1 .. "),
    "--trace /nowhere.jsonl": ("workload.trace", "/nowhere.jsonl", "an existing file"),
    "--deadline 0": ("mailbox.deadline_seconds", "0.0", "greater than 0"),
    "/nowhere.toml": ("config", "/nowhere.toml", "No such file"),
    "--stalled-after nan": ("--stalled-after", "nan", "not a finite number"),
    "--stalled-after inf": ("--stalled-after", "inf", "not a finite number"),
    "--frobnicate": ("--frobnicate", "", "No such option"),
}


def assert_refused(arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error with all the words, nothing on standard output, exit code 2."""
    assert run_command(arguments) == BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


@pytest.mark.parametrize(("text", "words"), BAD_CONFIGS.items(), ids=lambda value: str(value).replace("\n", " ")[:50])
def test_bad_config_is_refused_in_one_line(
    text: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    (tmp_path / "loop").symlink_to("loop")
    assert_refused(["run", str(path)], words, capsys)


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.items(), ids=BAD_OPTIONS)
def test_bad_option_is_refused_in_one_line(
    options: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(["run", *options.split()], words, capsys)


@pytest.mark.parametrize("options", [["--layers", "9" * 5000], ["--layers", "x\n" * 5000], [f"--{'x' * 5000}"]])
def test_a_long_option_is_not_shown_whole(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", *options]) == BAD_INPUT
    error = capsys.readouterr().err
    assert (error.startswith("error: "), error.count("\n")) == (True, 1)
    assert " ... " in error
    assert len(error) < 400


def test_config_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe")
    assert_refused(["run", str(path)], ("config", "UTF-8"), capsys)
    assert_refused(["run", str(tmp_path)], ("config", "directory"), capsys)
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it, and nobody may wait for that
    pipe = str(tmp_path / "pipe")
    for arguments in (["run", pipe], ["compare", pipe, pipe], ["explain", pipe], ["checkpoint", "--render", pipe]):
        assert_refused(arguments, ("a pipe or a device",), capsys)


@pytest.mark.parametrize(
    ("redirection", "exit_code", "error"),
    [
        (">/dev/full", BAD_INPUT, "No space left on device"),
        (">/dev/full 2>/dev/full", BAD_INPUT, None),
        (">&- <&-", 0, None),
        ("| (exec <&-; sleep 0.5)", BAD_INPUT, "Broken pipe"),
    ],
)
def test_standard_output_that_takes_nothing(redirection: str, exit_code: int, error: str | None) -> None:
    command = f"set -o pipefail; (sleep 0.1; exec {sys.executable} -m dcp_decode --help) {redirection}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert ended.returncode == exit_code
    assert ended.stderr.count("\n") == (error is not None)
    if error is not None:
        assert ended.stderr.startswith("error: standard output")
        assert error in ended.stderr


def test_defaults_are_the_smoke_config() -> None:
    smoke = load_config(CONFIGS / "smoke.toml")
    assert smoke == load_config()
    assert smoke == RunConfig()


def test_smoke_config_spells_out_every_default() -> None:
    document = tomllib.loads((CONFIGS / "smoke.toml").read_text())
    implied = {
        "mailbox": {"padded_heads"},
        "parallel": {"kernels"},
        "service": {"max_running"},
        "workload": {"synthetic"},
    }
    for name, field in RunConfig.model_fields.items():
        keys = set(type(field.get_default()).model_fields)
        assert set(document[name]) == keys - implied.get(name, set())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = load_config(path)
    assert config.geometry().heads == config.model.heads


def test_latency_checkpoint_is_the_models() -> None:
    config = load_config(CONFIGS / "latency_checkpoint.toml")
    geometry = config.geometry()
    assert (geometry.heads, geometry.dcp, geometry.owner_heads, geometry.topk) == (96, 8, 12, 2048)
    assert (config.model.layers, config.service.draft_tokens + 1, geometry.padded_heads) == (24, 5, 96)
    assert config.workload.synthetic is not None
    assert config.workload.synthetic.input_length == 120_000


def test_a_byte_order_mark_is_no_part_of_a_config_or_trace(tmp_path: Path) -> None:
    """Editors of some systems begin every UTF-8 file with one."""
    trace, path = tmp_path / "own.jsonl", tmp_path / "config.toml"
    trace.write_bytes(b'\xef\xbb\xbf{"timestamp": 0, "input_length": 3, "output_length": 1}\n')
    path.write_bytes(b"\xef\xbb\xbf[model]\nlayers = 3\n[workload]\ntrace = 'own.jsonl'\n")
    config = load_config(path)
    assert (config.model.layers, config.workload.trace) == (3, trace)
    assert [request.input_length for request in read_trace(trace)] == [3]
    path.write_bytes(b"[model]\n\xef\xbb\xbflayers = 3\n")  # only at the very beginning
    trace.write_bytes(trace.read_bytes() * 2)
    for refused in (lambda: load_config(path), lambda: list(read_trace(trace))):
        with pytest.raises(ConfigError, match=r"config\.toml|own\.jsonl:2"):
            refused()


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().model.layers = 3  # type: ignore[misc]


def test_trace_path_is_relative_to_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.jsonl").touch()
    path = tmp_path / "config.toml"
    path.write_text("[workload]\ntrace = 'own.jsonl'\n")
    monkeypatch.chdir("/")
    assert load_config(path).workload.trace == tmp_path / "own.jsonl"


def test_overrides_follow_the_same_rules_and_win(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[model]\nlayers = 3\n[workload.synthetic]\nrequests = 1\ninput_length = 9\noutput_length = 1\n")
    assert load_config(path).workload.trace is None
    config = load_config(path, {"model.layers": 5, "workload.trace": str(SAMPLE_TRACE)})
    assert config.model.layers == 5
    assert (config.workload.trace, config.workload.synthetic) == (SAMPLE_TRACE, None)
    with pytest.raises(ConfigError, match=r"mailbox.generations = 9: must be one of 2, 3"):
        load_config(path, {"mailbox.generations": 9})


def test_padded_heads_follow_heads_unless_given() -> None:
    assert load_config(None, {"model.heads": 128}).geometry().padded_heads == 128
    assert load_config(None, {"mailbox.padded_heads": 128}).geometry().padded_heads == 128
