"""Words to evidence, evidence to an archive, an archive to the first cause; real processes: test_faults.py."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_stub import report

from dcp_decode import numerics, rank_process
from dcp_decode.cli import run_command
from dcp_decode.config import load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.errors import BAD_INPUT, VERIFIED, WAIT_EXPIRED, WRONG_RESULT, RankDied
from dcp_decode.fabric.loopback import LoopbackFabric
from dcp_decode.forensics import black_box as recorder
from dcp_decode.forensics.archive import BadArchive, read
from dcp_decode.forensics.black_box import BlackBox
from dcp_decode.forensics.conclusion import conclude_folder
from dcp_decode.forensics.diagnosis import Diagnosis, diagnose, waits
from dcp_decode.forensics.evidence import (
    ControlWords,
    ExpiredWait,
    MailboxEvidence,
    PeerProcess,
    Position,
    RankEvidence,
    Slot,
    TornRow,
    write_evidence,
)
from dcp_decode.forensics.words import read_mailbox
from dcp_decode.geometry import Geometry
from dcp_decode.mailbox import Mailbox, MailboxLayout, Stage
from dcp_decode.records import RankRecord, make_plan, read_records, write_record
from dcp_decode.results import conclude
from dcp_decode.supervisor import supervise
from dcp_decode.waits import Wait
from dcp_decode.waits import write_record as write_wait

GEOMETRY = Geometry(heads=16, dcp=2, capacity=3, padded_heads=32, topk=4)
LAYOUT = MailboxLayout(GEOMETRY)
WORDS_A_HEAD = {"query": numerics.ROW_BYTES // 4, "payload": numerics.LATENT_DIM // 2, "lse_log2": 1}
WAIT = Wait("MERGE", 0, 1, 0, 2, 5, 4, numerics.ARMED_WORD, 0, 1)


def armed_mailbox() -> Mailbox:
    mailbox = Mailbox(LAYOUT, LoopbackFabric(2).allocate(LAYOUT.nbytes)[0])
    mailbox.arm()
    return mailbox


def row_words(mailbox: Mailbox, section: str, generation: int, source: int, row: int) -> torch.Tensor:
    """int32 view of a source's row: (words,) or (heads, words)."""
    words = getattr(LAYOUT, section).words(mailbox.memory.local)[generation]
    if section == "query":
        return words[row, source * GEOMETRY.owner_heads : (source + 1) * GEOMETRY.owner_heads]
    return words[source, row]


@pytest.mark.parametrize("section", ["topk", "query", "payload", "lse_log2"])
def test_rows_are_counted_by_source_and_generation(section: str) -> None:
    mailbox = armed_mailbox()
    row_words(mailbox, section, 1, 1, 0).fill_(7)
    torn = row_words(mailbox, section, 1, 1, 2)
    torn.fill_(7)
    torn.view(-1)[-1] = numerics.ARMED_WORD
    slots = [slot for slot in read_mailbox(LAYOUT, mailbox.memory.local, 0).slots if slot.mailbox == section]
    assert len(slots) == GEOMETRY.generations * GEOMETRY.dcp
    for slot in slots:
        if (slot.generation, slot.source) != (1, 1):
            assert (slot.armed, slot.arrived, slot.torn) == (GEOMETRY.capacity, 0, ())
            continue
        assert (slot.armed, slot.arrived) == (1, 1)
        words = torn.numel()
        head, word = divmod(words - 1, WORDS_A_HEAD[section]) if section != "topk" else (-1, words - 1)
        assert slot.torn == (TornRow(row=2, arrived=words - 1, words=words, head=head, word=word),)


def test_control_words_and_report_buffer() -> None:
    mailbox = armed_mailbox()
    mailbox.use_counter(Stage.QUERY).fill_(9)
    control = read_mailbox(LAYOUT, mailbox.memory.local, 0).control
    assert control == ControlWords(
        uses={"TOPK": 0, "QUERY": 9, "SPARSE": 0, "PUSH": 0, "MERGE": -1}, aborted=False, report=None
    )
    write_wait(mailbox, WAIT)
    control = read_mailbox(LAYOUT, mailbox.memory.local, 0).control
    assert control.aborted
    assert control.report == ExpiredWait(**WAIT.as_dict())


def test_a_peer_that_never_armed_its_mailbox_is_no_obstacle() -> None:
    mailbox = armed_mailbox()
    mailbox.memory.regions[1].fill_(0x55)
    box = BlackBox()
    box.watch([mailbox])
    peer = collected(box)[0].peers[1]
    assert (peer.aborted, peer.report) == (True, None)


def collected(box: BlackBox) -> list[RankEvidence]:
    written: list[RankEvidence] = []
    for _ in range(2):  # the second one must not count
        box.collect(0, SoloControlPlane(), "a test", None, written.append)
    return written


def test_a_black_box_is_read_once() -> None:
    box = BlackBox()
    box.watch([armed_mailbox()])
    box.at("prefill", step=7)
    first, last = collected(box)
    assert first.mailboxes == ()
    assert (last.position.activity, last.position.step) == ("prefill", 7)
    assert [mailbox.rank for mailbox in last.mailboxes] == [0]
    assert last.problem is None
    assert last.versions["torch"] == torch.__version__


def test_a_process_does_not_leave_while_its_black_box_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def read_slowly(layout: MailboxLayout, region: torch.Tensor, rank: int) -> MailboxEvidence:
        begun.set()
        time.sleep(0.2)
        return read_mailbox(layout, region, rank)

    monkeypatch.setattr(recorder, "read_mailbox", read_slowly)
    box, written = BlackBox(), []
    box.watch([armed_mailbox()])
    told_to_stop = threading.Thread(target=box.collect, args=(0, None, "SIGTERM", None, written.append))
    told_to_stop.start()
    begun.wait(5)
    box.collect(0, None, "the main thread's own failure", None, written.append)
    assert [(one.reason, len(one.mailboxes)) for one in written] == [("SIGTERM", 0), ("SIGTERM", 1)]
    told_to_stop.join()


@pytest.mark.parametrize(
    ("reading", "problem"),
    [
        (lambda *_: time.sleep(60), "mailboxes were not read within 0.2 s"),
        (lambda *_: (_ for _ in ()).throw(RuntimeError("device\nlost")), "mailboxes can't be read: device lost"),
    ],
)
def test_a_device_that_does_not_answer_costs_a_bounded_time(
    reading: Callable[..., Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "read_mailbox", reading)
    monkeypatch.setattr(recorder, "READ_SECONDS", 0.2)
    box = BlackBox()
    box.watch([armed_mailbox()])
    started = time.monotonic()
    last = collected(box)[-1]
    assert time.monotonic() - started < 2
    assert (last.mailboxes, last.problem) == ((), problem)


PLAN = make_plan("run", load_config(None, {"parallel.dcp": 2, "model.heads": 16}), "torchrun", None)


def record_of(rank: int, **fields: Any) -> RankRecord:
    base = RankRecord(rank, 100 + rank, "host", "failed", WAIT_EXPIRED, 10.0 + rank, "a wait expired")
    return RankRecord(**asdict(base) | fields)


def evidence_of(rank: int, **fields: Any) -> RankEvidence:
    position = Position(activity="merge", step=1, layer=0, seconds=2.0)
    base = RankEvidence(
        rank=rank,
        process_id=100 + rank,
        hostname="host",
        collected=10.0 + rank,
        reason="a wait expired",
        position=position,
        versions={},
        processes={1 - rank: PeerProcess(hostname="host", process_id=101 - rank, state="S (sleeping)")},
        peers={
            1 - rank: ControlWords(uses=dict.fromkeys(("TOPK", "QUERY", "SPARSE", "PUSH", "MERGE"), 4), aborted=False)
        },
    )
    return base.model_copy(update=fields)


def pack(folder: Path, records: list[RankRecord], evidence: list[RankEvidence]) -> Path:
    """The archive of a run of PLAN, beside the document run.json of a folder."""
    left = folder / "records"
    left.mkdir()
    for record in records:
        write_record(left, record)
    for one in evidence:
        write_evidence(left, one)
    plan = type(PLAN)(**asdict(PLAN) | {"output": str(folder / "run.json")})
    path = conclude_folder(plan, left).document["forensics"]
    assert path == str(folder / "run.forensics.tar.gz")
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []
    return Path(path)


def state(text: str) -> dict[int, PeerProcess]:
    return {1: PeerProcess(hostname="host", process_id=101, state=text)}


def pushed(uses: int) -> dict[int, ControlWords]:
    counters = {"TOPK": 5, "QUERY": 5, "SPARSE": uses, "PUSH": 0, "MERGE": 4}
    return {1: ControlWords(uses=counters, aborted=False)}


def mailbox_with(torn: TornRow, generation: int = 0) -> tuple[MailboxEvidence, ...]:
    slot = Slot(mailbox="payload", generation=generation, source=1, armed=1, arrived=1, torn=(torn,))
    uses = dict.fromkeys(("TOPK", "QUERY", "SPARSE", "PUSH", "MERGE"), 4)
    return (MailboxEvidence(rank=0, control=ControlWords(uses=uses, aborted=True), slots=(slot,)),)


TORN = TornRow(row=0, arrived=5, words=2048, head=2, word=5)
EXPIRED = {"expired_waits": [WAIT.as_dict()]}
TOLD = {"outcome": "terminated", "consequence": True, "error": "told to stop (SIGTERM)"}


@pytest.mark.parametrize(
    ("records", "seen", "kind"),
    [
        # What rank 0 saw when its wait for rank 1 expired. Rank 1's own record comes later, if at all.
        ([record_of(0, **EXPIRED), record_of(1, **TOLD)], {"processes": state("T (stopped)")}, "stopped rank"),
        ([record_of(0, **EXPIRED)], {"processes": state("T (stopped)")}, "stopped rank"),
        ([record_of(0, **EXPIRED)], {"processes": state("gone")}, "dead rank"),
        ([record_of(0, **EXPIRED)], {}, "late rank"),  # killed by its launcher, after the fact
        ([record_of(0, **EXPIRED), record_of(1, **TOLD)], {"peers": pushed(4)}, "late rank"),
        ([record_of(0, **EXPIRED), record_of(1, **TOLD)], {"peers": pushed(5)}, "lost words"),
        ([record_of(0, **EXPIRED), record_of(1, **TOLD)], {"mailboxes": mailbox_with(TORN)}, "lost words"),
        # Torn rows of another generation or another row are no evidence.
        ([record_of(0, **EXPIRED), record_of(1, **TOLD)], {"mailboxes": mailbox_with(TORN, 1)}, "late rank"),
        (
            [record_of(0, **EXPIRED), record_of(1, **TOLD)],
            {"mailboxes": mailbox_with(TORN.model_copy(update={"row": 1}))},
            "late rank",
        ),
        ([record_of(0, **EXPIRED), record_of(1, outcome="killed", error="SIGKILL")], {}, "dead rank"),
        ([record_of(0, **EXPIRED), record_of(1, outcome="crashed", error="KeyError")], {}, "crashed rank"),
        ([record_of(0, **EXPIRED), record_of(1, exit_code=WRONG_RESULT, error="a row")], {}, "wrong data"),
    ],
)
def test_first_causes(records: list[RankRecord], seen: dict[str, Any], kind: str, tmp_path: Path) -> None:
    case = read(pack(tmp_path, records, [evidence_of(0, **seen)]))
    diagnosis = diagnose(case)
    assert (diagnosis.kind, diagnosis.rank) == (kind, 1)
    assert [(wait.waiting_rank, wait.source_rank) for wait in waits(case)] == [(0, 1)]


def test_a_rank_that_was_killed_is_the_cause_of_one_that_crashed_over_it(tmp_path: Path) -> None:
    # As under torchrun: the killed rank has no record, and a peer's GPU failed over the memory that went with it.
    crashed = record_of(0, outcome="crashed", error="AcceleratorError: unspecified launch failure")
    path = pack(tmp_path, [crashed], [evidence_of(0, processes=state("gone"))])
    diagnosis = diagnose(read(path))
    assert (diagnosis.kind, diagnosis.rank) == ("dead rank", 1)
    assert conclude(PLAN, {0: crashed}).error == diagnosis.sentence.replace(" 101 on host", "")


def test_a_failure_that_names_nobody_blames_nobody(tmp_path: Path) -> None:
    silent = "rank 0 waited 2 s at 'two': the launcher's store has not answered for 2.0 s"
    path = pack(tmp_path, [record_of(0, error=silent), record_of(1, **TOLD)], [evidence_of(0)])
    assert diagnose(read(path)) == Diagnosis("other failure", None, f"rank 0: {silent}")


def test_told_to_stop_is_nobodys_fault(tmp_path: Path) -> None:
    told = [record_of(rank, **TOLD) for rank in range(2)]
    case = read(pack(tmp_path, told, [evidence_of(rank) for rank in range(2)]))
    assert diagnose(case).kind == "told to stop"


def test_the_least_advanced_wait_is_the_first(tmp_path: Path) -> None:
    later = Wait("TOPK", 1, 0, 0, -1, 0, 5, numerics.ARMED_WORD, 0, 1)
    records = [record_of(0, **EXPIRED), record_of(1, ended=1.0, expired_waits=[later.as_dict()])]
    diagnosis = diagnose(read(pack(tmp_path, records, [evidence_of(rank) for rank in range(2)])))
    assert (diagnosis.kind, diagnosis.rank) == ("late rank", 1)


def test_of_equal_waits_the_one_with_an_explanation_is_the_first(tmp_path: Path) -> None:
    other = Wait("MERGE", 1, 0, 0, 2, 5, 4, numerics.ARMED_WORD, 0, 1)  # rank 1 waits for rank 0 at the same place
    waited = [record_of(0, **EXPIRED), record_of(1, expired_waits=[other.as_dict()])]
    torn = MailboxEvidence(**mailbox_with(TORN)[0].model_dump() | {"rank": 1})
    slots = [slot.model_copy(update={"source": 0}) for slot in torn.slots]
    evidence = [evidence_of(0), evidence_of(1, mailboxes=(torn.model_copy(update={"slots": tuple(slots)}),))]
    diagnosis = diagnose(read(pack(tmp_path, waited, evidence)))
    assert (diagnosis.kind, diagnosis.rank) == ("lost words", 0)


def test_a_process_that_nobody_saw_is_not_said_to_live(tmp_path: Path) -> None:
    elsewhere = {1: PeerProcess(hostname="another", process_id=101, state=None)}
    told = [record_of(0, **EXPIRED), record_of(1, **TOLD)]
    diagnosis = diagnose(read(pack(tmp_path, told, [evidence_of(0, processes=elsewhere)])))
    assert (diagnosis.kind, diagnosis.rank) == ("late rank", 1)
    assert "nobody saw its process, and it had not pushed" in diagnosis.sentence


def test_nothing_is_kept_of_a_run_that_verified(tmp_path: Path) -> None:
    left = tmp_path / "records"
    left.mkdir()
    for rank in range(2):
        write_record(left, record_of(rank, outcome="ok", exit_code=VERIFIED, error=None))
    conclusion = conclude_folder(PLAN, left)
    assert (conclusion.exit_code, conclusion.document["forensics"]) == (VERIFIED, None)


def test_an_archive_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = tmp_path / "records"
    left.mkdir()
    (tmp_path / "file").touch()
    write_record(left, record_of(0, **EXPIRED))
    plan = type(PLAN)(**asdict(PLAN) | {"output": str(tmp_path / "file" / "run.json")})
    conclusion = conclude_folder(plan, left)
    assert (conclusion.exit_code, conclusion.document["forensics"]) == (WAIT_EXPIRED, None)
    assert "not written: File exists" in capsys.readouterr().err


def test_evidence_that_cannot_be_read_changes_no_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = tmp_path / "records"
    left.mkdir()
    write_record(left, record_of(0, **EXPIRED))
    (left / "forensics-0.json").write_text('{"rank": 0}')
    plan = type(PLAN)(**asdict(PLAN) | {"output": str(tmp_path / "run.json")})
    conclusion = conclude_folder(plan, left)
    assert (conclusion.exit_code, conclusion.document["first_cause"]) == (WAIT_EXPIRED, None)
    assert Path(conclusion.document["forensics"]).is_file()
    assert "is damaged: forensics-0.json.process_id: " in capsys.readouterr().err


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pack(tmp_path, [record_of(0, **EXPIRED)], [evidence_of(0, processes=state("T (stopped)"))])
    assert run_command(["explain", str(path)]) == VERIFIED
    text = capsys.readouterr().out
    assert text.startswith("first cause: stopped rank\nrank 1 was stopped, its process in state T (stopped)")
    assert "MERGE, use 4, row 0, head 2, word 5" in text
    assert run_command(["explain", "--json", str(path)]) == VERIFIED
    explained = json.loads(capsys.readouterr().out)
    assert (explained["first_cause"]["kind"], explained["first_cause"]["rank"]) == ("stopped rank", 1)
    assert explained["waits"] == [{key: value for key, value in WAIT.as_dict().items() if key != "cta"}]


def rewritten(path: Path, changes: dict[str, bytes | None]) -> None:
    """Replace members of an archive; None drops one."""
    with tarfile.open(path, "r:gz") as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (members | changes).items():
            if text is not None:
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "can't be read (No such file or directory)": lambda path: path.unlink(),
    "no forensics archive (not a gzip file)": lambda path: path.write_bytes(b"{}"),
    "is damaged or no forensics archive": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "(no manifest of the format)": lambda path: rewritten(path, {"manifest.json": None}),
    "is no forensics archive of dcp-decode": lambda path: rewritten(path, {"manifest.json": b'{"format": "another"}'}),
    "schema = 2: must be 1": lambda path: rewritten(
        path, {"manifest.json": b'{"format": "dcp_decode forensics", "schema": 2}'}
    ),
    "plan.json is missing": lambda path: rewritten(path, {"plan.json": None}),
    "rank-0.json.rank: ": lambda path: rewritten(path, {"rank-0.json": b'{"process_id": 1}'}),
    "rank-1023.json.rank: ": lambda path: rewritten(path, {"rank-1023.json": b"{}"}),
    "forensics-0.json: ": lambda path: rewritten(path, {"forensics-0.json": b"{"}),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_or_foreign_archive_is_one_clear_error(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pack(tmp_path, [record_of(0, **EXPIRED)], [evidence_of(0)])
    DAMAGES[message](path)
    with pytest.raises(BadArchive):
        read(path)
    assert run_command(["explain", str(path)]) == BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {path}: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_any_damaged_field_is_one_clear_error_or_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = {"mailboxes": mailbox_with(TORN), "processes": state("T (stopped)")}
    path = pack(tmp_path, [record_of(0, **EXPIRED), record_of(1, **TOLD)], [evidence_of(0, **seen)])
    intact = path.read_bytes()
    with tarfile.open(path, "r:gz") as archive:
        names = [name for name in archive.getnames() if name.endswith(".json")]
        documents = {name: json.loads(archive.extractfile(name).read()) for name in names}  # type: ignore[union-attr]
    fields = [(name, keys) for name, document in documents.items() for keys in places(document)]
    refused = 0
    for number, (name, keys) in enumerate(fields):
        path.write_bytes(intact)
        damaged = replaced(documents[name], keys, (None, "another")[number % 2])
        rewritten(path, {name: json.dumps(damaged).encode()})
        code = run_command(["explain", str(path)])
        errors = capsys.readouterr().err
        assert code in (VERIFIED, BAD_INPUT), (name, keys)
        assert errors.count("\n") == (code == BAD_INPUT), (name, keys, errors)
        refused += code == BAD_INPUT
    assert refused > len(fields) / 4


def places(value: Any, keys: tuple = ()) -> Iterator[tuple]:
    """The keys of every value of a JSON document that a diagnosis may look at."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if key not in ("config", "uses", "records", "versions", "stages", "device"):
            yield (*keys, key)
            yield from places(item, (*keys, key))


def replaced(value: Any, keys: tuple, new: Any) -> Any:
    """A copy of a JSON document with another value at a place."""
    if not keys:
        return new
    copy = value.copy()
    copy[keys[0]] = replaced(value[keys[0]], keys[1:], new)
    return copy


def test_a_member_of_no_possible_rank_says_nothing(tmp_path: Path) -> None:
    path = pack(tmp_path, [record_of(0, **EXPIRED)], [evidence_of(0)])
    rewritten(path, {f"stacks-{'1' * 5000}.txt": b"of nobody"})  # more digits than int() takes
    assert read(path).stacks == {}


def test_a_changed_bit_is_noticed(tmp_path: Path) -> None:
    path = pack(tmp_path, [record_of(0, **EXPIRED)], [evidence_of(0)])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadArchive):
        read(path)


def test_evidence_that_fails_hides_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect of the recorder")

    def body(control: ControlPlane) -> Any:
        raise KeyError("the failure")

    monkeypatch.setattr(rank_process.black_box, "collect", broken)
    record = rank_process.RankProcess(0, tmp_path).run(SoloControlPlane, body)
    assert (record.outcome, record.error) == ("crashed", "KeyError: 'the failure'")
    assert read_records(tmp_path) == {0: record}
    assert capsys.readouterr().err == (
        "forensics: rank 0 could not say everything: RuntimeError('a defect of the recorder')\n"
    )


@pytest.mark.parametrize("failure", [KeyError, lambda: RankDied("rank 1 died", [])])
def test_what_a_failed_body_held_lives_until_the_process_has_said_everything(
    failure: Callable[[], Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    class Pinned:
        def __del__(self) -> None:
            ended.append("pinned")  # where torch's destructor ends a process whose GPU has failed

    def body(control: ControlPlane) -> Any:
        held = Pinned()
        raise failure() if held else KeyError

    monkeypatch.setattr(rank_process.black_box, "collect", lambda *_: ended.append("collected"))
    process = rank_process.RankProcess(0, tmp_path)
    process.run(SoloControlPlane, body)
    assert ended == ["collected"]


def test_a_fatal_signal_leaves_its_stack(tmp_path: Path) -> None:
    def crash(control: ControlPlane) -> Any:
        if control.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        control.barrier("meeting")
        return report()

    supervise(crash, 2, tmp_path, wait_deadline_seconds=0.2, control_deadline_seconds=20.0)
    plan = type(PLAN)(**asdict(PLAN) | {"output": str(tmp_path / "run.json")})
    case = read(Path(conclude_folder(plan, tmp_path).document["forensics"]))
    assert list(read_records(tmp_path)) == [0, 1]
    diagnosis: Diagnosis = diagnose(case)
    assert (diagnosis.kind, diagnosis.rank) == ("dead rank", 1)
    assert "ended by SIGSEGV" in diagnosis.sentence
    assert diagnosis.details[0] == "Fatal Python error: Segmentation fault"
    assert any("in crash" in line for line in diagnosis.details)
