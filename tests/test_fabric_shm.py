"""Fabric `shm` among forked ranks: shared stores, no file left behind, and one refusal for all when memory is short."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch_stub import report

from dcp_decode import owner_lock
from dcp_decode.config import load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import BAD_INPUT, VERIFIED, WAIT_EXPIRED
from dcp_decode.fabric import shared_files
from dcp_decode.fabric.shared_files import SHARED_MEMORY
from dcp_decode.fabric.shm import ShmFabric
from dcp_decode.records import RankRecord, RankReport, make_plan, read_records
from dcp_decode.results import Conclusion, conclude
from dcp_decode.supervisor import supervise

pytestmark = pytest.mark.xdist_group("processes")

RANKS = 4
NBYTES = 1 << 20
Body = Callable[[ControlPlane, Path], RankReport]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Stands for /dev/shm: an ordinary folder is mapped and shared alike."""
    path = tmp_path / "shared"
    path.mkdir()
    return path


def launch(body: Body, folder: Path, tmp_path: Path) -> tuple[Conclusion, dict[int, RankRecord]]:
    records = tmp_path / "records"
    records.mkdir()
    supervise(
        lambda control: body(control, folder), RANKS, records, wait_deadline_seconds=0.2, control_deadline_seconds=30
    )
    plan = make_plan("stub", load_config(None, {"parallel.dcp": RANKS}), "builtin", None)
    return conclude(plan, read_records(records)), read_records(records)


def share(control: ControlPlane, folder: Path) -> RankReport:
    """Every rank writes one word of its own into every region; all find what all have written."""
    fabric = ShmFabric(control, folder)
    for turn in range(2):  # two allocations are two different regions
        (memory,) = fabric.allocate(NBYTES)
        assert (memory.rank, memory.nbytes, len(memory.regions)) == (control.rank, NBYTES, RANKS)
        assert memory.addresses.tolist() == [region.data_ptr() for region in memory.regions]
        assert all(address % 4096 == 0 for address in memory.addresses.tolist())
        assert not memory.local.any()
        control.barrier("mapped")
        assert list(folder.iterdir()) == []  # unlinked, though in use
        for owner, region in enumerate(memory.regions):
            region.view(torch.int32)[control.rank + 8 * turn] = 100 * owner + control.rank + 1
        control.barrier("written")
        expected = torch.zeros(NBYTES // 4, dtype=torch.int32)
        expected[8 * turn : 8 * turn + RANKS] = torch.arange(1, RANKS + 1) + 100 * control.rank
        assert torch.equal(memory.local.view(torch.int32), expected)
        for owner, region in enumerate(memory.regions):
            assert int(region.view(torch.int32)[8 * turn]) == 100 * owner + 1
    fabric.close()
    return report()


def test_peers_see_each_others_stores_and_no_file_is_left(folder: Path, tmp_path: Path) -> None:
    conclusion, _ = launch(share, folder, tmp_path)
    assert (conclusion.exit_code, conclusion.error) == (VERIFIED, None)
    assert list(folder.iterdir()) == []


def test_default_folder_is_dev_shm_and_stays_clean(tmp_path: Path) -> None:
    conclusion, records = launch(share_by_default, Path(), tmp_path)
    assert (conclusion.exit_code, conclusion.error) == (VERIFIED, None)
    left = {path.name.split("-")[1] for path in SHARED_MEMORY.glob("dcp_decode-*")}
    assert not left & {str(record.process_id) for record in records.values()}


def share_by_default(control: ControlPlane, _: Path) -> RankReport:
    (memory,) = ShmFabric(control).allocate(NBYTES)
    memory.regions[0][control.rank] = control.rank + 1
    control.barrier("written")
    assert memory.regions[0][:RANKS].tolist() == [1, 2, 3, 4]
    return report()


def full_for_one(control: ControlPlane, folder: Path) -> RankReport:
    """As a full tmpfs answers, on rank 2 only."""
    if control.rank == 2:

        def refuse(*_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = refuse
    ShmFabric(control, folder).allocate(NBYTES)
    return report()


def limited_for_all(control: ControlPlane, folder: Path) -> RankReport:
    """The kernel itself refuses to reserve, on every rank."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES // 2, NBYTES // 2))
    ShmFabric(control, folder).allocate(NBYTES)
    return report()


@pytest.mark.parametrize(
    ("body", "first", "reason"), [(full_for_one, 2, errno.ENOSPC), (limited_for_all, 0, errno.EFBIG)]
)
def test_too_little_memory_is_refused_on_all_ranks(
    body: Body, first: int, reason: int, folder: Path, tmp_path: Path
) -> None:
    conclusion, records = launch(body, folder, tmp_path)
    assert conclusion.exit_code == BAD_INPUT
    for record in records.values():
        assert (record.outcome, record.exit_code) == ("failed", BAD_INPUT)
        assert record.error == conclusion.error  # one refusal, the same everywhere
    message = str(conclusion.error)
    assert message.startswith(f"rank {first}: {folder} has ")
    assert "MiB free but the 4 ranks' mailboxes need 4.0 MiB" in message
    assert os.strerror(reason) in message
    assert "--shm-size" in message
    assert "mailbox.capacity" in message
    assert list(folder.iterdir()) == []


def test_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    conclusion, _ = launch(allocate, tmp_path / "absent", tmp_path)
    assert conclusion.exit_code == BAD_INPUT
    assert str(conclusion.error).startswith(f"rank 0: {tmp_path / 'absent' / 'dcp_decode-'}")
    assert "No such file" in str(conclusion.error)


def allocate(control: ControlPlane, folder: Path) -> RankReport:
    ShmFabric(control, folder).allocate(NBYTES)
    return report()


def lose_one(control: ControlPlane, folder: Path) -> RankReport:
    """Rank 1's file is gone before anybody maps it."""
    fabric = ShmFabric(control, folder)
    if control.rank == 1:
        reserve = fabric._reserve

        def reserve_and_lose(nbytes: int) -> object:
            reservation = reserve(nbytes)
            Path(reservation.path).unlink()
            return reservation

        fabric._reserve = reserve_and_lose
    fabric.allocate(NBYTES)
    return report()


def test_region_that_cannot_be_mapped_is_refused_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    conclusion, records = launch(lose_one, folder, tmp_path)
    assert conclusion.exit_code == BAD_INPUT
    assert all(record.exit_code == BAD_INPUT for record in records.values())
    assert str(conclusion.error).startswith("rank 0: rank 1's shared memory ")
    assert list(folder.iterdir()) == []


def die_with_memory(control: ControlPlane, folder: Path) -> RankReport:
    ShmFabric(control, folder).allocate(NBYTES)
    control.barrier("mapped")
    if control.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    control.barrier("never")
    return report()


def test_killed_rank_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    conclusion, _ = launch(die_with_memory, folder, tmp_path)
    assert (conclusion.exit_code, conclusion.dead_ranks) == (WAIT_EXPIRED, (3,))
    assert list(folder.iterdir()) == []


def stop_all_with_memory(control: ControlPlane, folder: Path) -> RankReport:
    """Rank 1 tells the launcher to stop, which waits for it while the others have reserved their memory."""
    fabric = ShmFabric(control, folder)
    if control.rank == 1:
        while len(list(folder.iterdir())) < RANKS - 1:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(30)
    fabric.allocate(NBYTES)
    return report()


def test_ranks_told_to_stop_while_they_allocate_leave_no_file(folder: Path, tmp_path: Path) -> None:
    conclusion, records = launch(stop_all_with_memory, folder, tmp_path)
    assert conclusion.exit_code == WAIT_EXPIRED
    assert {record.outcome for record in records.values()} == {"terminated"}
    assert list(folder.iterdir()) == []


def die_while_allocating(control: ControlPlane, _: Path) -> RankReport:
    fabric = ShmFabric(control)
    if control.rank == 3:
        fabric._reserve(NBYTES)
        os.kill(os.getpid(), signal.SIGKILL)
    fabric.allocate(NBYTES)
    return report()


def test_rank_killed_while_it_allocates_leaves_no_file(tmp_path: Path) -> None:
    conclusion, records = launch(die_while_allocating, Path(), tmp_path)
    assert (conclusion.exit_code, conclusion.dead_ranks) == (WAIT_EXPIRED, (3,))
    left = {path.name.split("-")[1] for path in SHARED_MEMORY.glob("dcp_decode-*")}
    assert not left & {str(record.process_id) for record in records.values()}


def kill_all_while_allocating(control: ControlPlane, folder: Path) -> RankReport:
    ShmFabric(control, folder)._reserve(NBYTES)
    control.barrier("reserved")
    os.kill(os.getpid(), signal.SIGKILL)
    return report()


def test_a_later_run_removes_what_killed_ranks_left(folder: Path, tmp_path: Path) -> None:
    launch(kill_all_while_allocating, folder, tmp_path)
    assert len(list(folder.iterdir())) == RANKS
    (later := tmp_path / "later").mkdir()
    conclusion, _ = launch(share, folder, later)
    assert (conclusion.exit_code, list(folder.iterdir())) == (VERIFIED, [])


def test_only_files_that_no_process_has_are_removed(folder: Path) -> None:
    living, _ = shared_files.create(folder)
    left, other, elsewhere = (folder / name for name in ("dcp_decode-1-ab", "another-1-ab", "elsewhere"))
    for path in (left, other, elsewhere):
        path.touch()
    (link := folder / "dcp_decode-2-ab").symlink_to(elsewhere)
    (pipe := folder / "dcp_decode-3-ab")
    os.mkfifo(pipe)
    shared_files.remove_abandoned(folder)
    assert set(folder.iterdir()) == {living, other, elsewhere, link, pipe}
    shared_files.remove(living)
    assert not living.exists()


@pytest.mark.parametrize("removed", [True, False])
def test_a_file_taken_for_abandoned_before_it_is_locked_is_made_anew(
    removed: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """removed: whether the other process is done with it when this one asks for the lock."""
    lock, taken = owner_lock.take, []

    def late(descriptor: int) -> bool:
        if taken:
            return lock(descriptor)
        [path] = folder.iterdir()
        taken.append(other := os.open(path, os.O_RDWR))
        assert lock(other)
        path.unlink()
        if removed:
            os.close(other)
        return lock(descriptor)

    monkeypatch.setattr(owner_lock, "take", late)
    path, descriptor = shared_files.create(folder)
    assert list(folder.iterdir()) == [path]
    assert os.fstat(descriptor).st_nlink == 1
    shared_files.remove(path)
