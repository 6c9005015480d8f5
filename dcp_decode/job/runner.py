"""Runs the stages one after the other, each with a deadline and a log, and keeps going after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, Literal
from xml.etree import ElementTree

from pydantic import BaseModel, Field, ValidationError

from dcp_decode.errors import BAD_INPUT, VERIFIED, WAIT_EXPIRED, WRONG_RESULT, ConfigError, UnsupportedEnvironment
from dcp_decode.inputs import read_input
from dcp_decode.job import stages
from dcp_decode.job.stages import REPOSITORY, Hardware, Settings, Stage

SUFFIXES = (".log", ".json", ".xml", ".html", ".forensics.tar.gz")  # of what a stage leaves
# From SIGTERM to SIGKILL of a stage. torchrun, whose ranks are in sessions of their own, kills those that don't end
# after 30 s; if it were killed before that, they would be left on the GPUs of the stages that follow.
GRACE_SECONDS = 40.0
NO_TEST_RAN = 5  # pytest's exit code
LOOK_SECONDS = 0.1  # between two looks, while a stage runs, at whether the job was told to stop
STOPPED = "the job was told to stop"
NODE_VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: exit_code None if it was skipped, `text` then says why, else the first error, if any.

    text of tests that passed: how many, and why others were skipped.
    """

    name: str
    command: str
    exit_code: int | None
    seconds: float
    text: str
    log: str | None


class _Gpu(BaseModel):
    uuid: str
    memory_bytes: Annotated[int, Field(ge=0)]


class _HostGpus(BaseModel):
    gpus: list[_Gpu]


class _Rank(BaseModel):
    visible_gpus: list[str]
    cores: Annotated[int, Field(ge=1)]
    gpus: _HostGpus


class _Findings(BaseModel):
    """What a job reads of the doctor's document."""

    device: Literal["cpu", "cuda"]
    kind: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    ranks: Annotated[list[_Rank], Field(min_length=1)]


class Stopped(Exception):
    """A stage was ended, since the job was told to stop."""


class Job:
    """A job under way: what its stages came to, and why the rest are skipped, if they are.

    told_to_stop: set by a signal, and looked at between the stages and while one runs. An exception from the handler
    would land anywhere: in the middle of a stage's start, whose process nobody would then end, or of the report.
    """

    def __init__(self, settings: Settings, wanted: Sequence[str], on_outcome: Callable[[Outcome], None]) -> None:
        self.settings = settings
        self.wanted = wanted
        self.on_outcome = on_outcome
        self.outcomes: list[Outcome] = []
        self.stopped = ""
        self.told_to_stop = False

    @contextlib.contextmanager
    def noting_signals(self) -> Iterator[None]:
        """Signals that would end this process only set `told_to_stop`; may be nested."""

        def note(_number: int, _frame: object) -> None:
            self.told_to_stop = True

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self) -> None:
        """All wanted stages in order; told to stop, it ends the one that runs, or counts the next one as stopped.

        Raises UnsupportedEnvironment if there is no doctor's document to go by.
        """
        folder = self.settings.artifacts
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("--artifacts", str(folder), f"must be a folder ({error.strerror})") from None
        with self.noting_signals():
            if "doctor" in self.wanted:
                self._run(stages.doctor(self.settings))
                if self.outcomes[0].exit_code != VERIFIED:
                    self.stopped = self.stopped or "nothing can run here: see the doctor"
            for stage in stages.following(self.settings, self._hardware()):
                if stage.name in self.wanted:
                    # What an earlier job left in the folder may be another config's.
                    same = stage.same_digest_as if stage.same_digest_as in self.wanted else None
                    self._run(replace(stage, same_digest_as=same))
        fault = self.settings.inject
        if fault is not None and self.settings.node == 0 and self.exit_code == VERIFIED:
            # Left out with --stages, or a gate without a baseline: green would say that the job finds it.
            self._end(Outcome("inject", f"--inject {fault}", BAD_INPUT, 0.0, "no stage turned red", None))

    @property
    def exit_code(self) -> int:
        """The first failing stage's."""
        return next((outcome.exit_code for outcome in self.outcomes if outcome.exit_code), VERIFIED)

    def _hardware(self) -> Hardware:
        """As the doctor found it, in this job or an earlier one."""
        if self.stopped or self.told_to_stop or self.settings.node > 0:
            return Hardware()
        path = self.settings.artifacts / "doctor.json"
        try:
            found = _Findings.model_validate_json(read_input(path))
        except (OSError, ValidationError):
            raise UnsupportedEnvironment(f"{path} is missing or damaged: run the stage doctor too") from None
        first = found.ranks[0]
        memory = [gpu.memory_bytes for gpu in first.gpus.gpus if gpu.uuid in first.visible_gpus]
        return Hardware(found.device, found.kind, len(first.visible_gpus), first.cores, min(memory, default=0))

    def _run(self, stage: Stage) -> None:
        command = shlex.join(stage.command)
        started = time.monotonic()
        if self.told_to_stop and not self.stopped:
            self.stopped = STOPPED
            outcome = Outcome(stage.name, command, WAIT_EXPIRED, 0.0, STOPPED, None)
        elif skip := self.stopped or stage.skip:
            outcome = Outcome(stage.name, command, None, 0.0, skip, None)
        else:
            try:
                outcome = run_stage(stage, self.settings.artifacts, lambda: self.told_to_stop)
            except Stopped:
                self.stopped = STOPPED
                seconds = time.monotonic() - started
                outcome = Outcome(stage.name, command, WAIT_EXPIRED, seconds, STOPPED, _log(stage))
        self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.on_outcome(outcome)


def run_stage(stage: Stage, folder: Path, told_to_stop: Callable[[], bool] = lambda: False) -> Outcome:
    """Run one stage; its output goes to its log in `folder`. Raises Stopped, once it has ended, when told to stop."""
    for suffix in SUFFIXES:  # of an earlier job in the same folder
        (folder / f"{stage.name}{suffix}").unlink(missing_ok=True)
    started = time.monotonic()
    log = folder / _log(stage)
    command = shlex.join(stage.command)
    with log.open("w") as errors, contextlib.ExitStack() as files:
        errors.write(f"$ {command}\n")
        errors.flush()
        output = errors if stage.output is None else files.enter_context((folder / stage.output).open("w"))
        ended = _exit_code(stage, output, errors, told_to_stop)
    exit_code = contract_code(stage, ended)
    text = "" if exit_code == VERIFIED else first_error(log.read_text(errors="replace"))
    if exit_code == VERIFIED and (text := unverified(stage, folder)):
        exit_code = BAD_INPUT
    if exit_code == VERIFIED and (text := differing_digest(stage, folder)):
        exit_code = WRONG_RESULT
    results = folder / f"{stage.name}.xml"
    if results.is_file():
        try:
            ran, said = tests_that_ran(results)
        except ElementTree.ParseError as error:  # pytest was killed while it wrote, or the disk is full
            ran, said = 0, f"{results.name} is damaged ({error}), so nobody knows which tests ran; see {log.name}"
        if ended in (VERIFIED, NO_TEST_RAN) or not ran:  # torchrun makes pytest's code a 1
            exit_code, text = VERIFIED if ran else BAD_INPUT, said
    return Outcome(stage.name, command, exit_code, time.monotonic() - started, text, log.name)


def _exit_code(stage: Stage, output: IO[str], errors: IO[str], told_to_stop: Callable[[], bool]) -> int | None:
    """Of the stage's process, once its whole session has ended; None if it took too long. Raises Stopped."""
    process = subprocess.Popen(
        stage.command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        cwd=REPOSITORY,
        env=_environment(stage),
        start_new_session=True,
    )
    until = time.monotonic() + stage.limit_seconds
    try:
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, LOOK_SECONDS))
            if told_to_stop():
                raise Stopped
        errors.write(f"error: stage {stage.name} took longer than {stage.limit_seconds:g} s\n")
        return None
    finally:
        _end(process)


def _environment(stage: Stage) -> dict[str, str]:
    """This process's, without what is meant for a group of nodes if the stage runs on this one alone."""
    ours = dict(os.environ)
    if not stage.environment:
        for name in NODE_VARIABLES:
            ours.pop(name, None)
    return ours | stage.environment


def unverified(stage: Stage, folder: Path) -> str:
    """Why a stage that ended well has proved nothing, or nothing."""
    for name in filter(None, (stage.name if stage.verifies else None, stage.same_digest_as)):
        if _document(folder, name) is None:
            return f"{name}.json is damaged, so nothing is proved by it"
    if not stage.verifies or (_document(folder, stage.name) or {}).get("verified") is True:
        return ""
    return "no row was verified: could any request of the config run?"


def differing_digest(stage: Stage, folder: Path) -> str:
    """Why a stage's rows are not those of the stage before it, or nothing."""
    if stage.same_digest_as is None:
        return ""
    first, second = ((_document(folder, name) or {}).get("digest") for name in (stage.same_digest_as, stage.name))
    if first is None or second is None or first == second:
        return ""
    return f"wrong result: digest {second}, but stage {stage.same_digest_as} has {first}"


def _document(folder: Path, name: str) -> dict[str, Any] | None:
    """A stage's document; empty if it left none, None if it is damaged."""
    try:
        document = json.loads(read_input(folder / f"{name}.json"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def tests_that_ran(results: Path) -> tuple[int, str]:
    """How many tests did, and in words, with the reasons of the others; of pytest's JUnit XML."""
    cases = ElementTree.parse(results).findall(".//testcase")
    reasons = [_reason(skipped) for case in cases for skipped in case.findall("skipped")]
    ran = len(cases) - len(reasons)
    skipped = f", {len(reasons)} skipped: {'; '.join(sorted(set(reasons)))}" if reasons else ""
    return ran, f"{ran or 'no'} test{'s' * (ran != 1)} passed{skipped}"


def _reason(skipped: ElementTree.Element) -> str:
    message = skipped.get("message", "")
    if message == "collection skipped":  # a whole module: the reason is in a tuple's text, (path, line, 'Skipped: ...')
        return (skipped.text or message).rpartition("Skipped: ")[2].rstrip("')\"")
    return message


def contract_code(stage: Stage, exit_code: int | None) -> int:
    """A stage's exit code in the contract's terms: pytest counts failed tests as 1, all else of it is bad input.

    exit_code: None of a stage that took too long.
    """
    if exit_code is None:
        return WAIT_EXPIRED
    if "pytest" in stage.command and exit_code > WRONG_RESULT:
        return BAD_INPUT
    return exit_code if VERIFIED <= exit_code <= WAIT_EXPIRED else WAIT_EXPIRED


def first_error(log: str) -> str:
    """The line that says what went wrong: of this package's commands, or of pytest, else the last one.

    Neither the command's own line counts nor a document's path, with which commands end.
    """
    lines = [line.strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not line.startswith("$ ") and not line.endswith(".json")]
    for start in ("error: ", "FAILED ", "ERROR "):
        for line in lines:
            if line.startswith(start):
                return line.removeprefix("error: ")
    return lines[-1] if lines else "no output"


def _log(stage: Stage) -> str:
    return f"{stage.name}.log"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage's session: its first process, which may still report, and whatever that has left behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
