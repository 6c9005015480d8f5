"""Where ranks run, and what a fabric refuses: all of it decided before anything is allocated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.fabric import placement
from dcp_decode.fabric.multicast import NCCL, NoMulticast, forbid_multicast
from dcp_decode.fabric.symm_mem import refuse_shared_devices


class StubControl:
    """A control plane of which every rank makes the given offers."""

    rank = 1

    def __init__(self, offers: list[placement._Offer]) -> None:
        self.offers = offers
        self.size = len(offers)
        self.peers = [SimpleNamespace(hostname=offer.host) for offer in offers]

    def all_gather(self, value: object, label: str) -> list[placement._Offer]:
        return self.offers


def offers(gpus: list[str], nvshmem: bool = True, refusal: str = "") -> list[placement._Offer]:
    return [placement._Offer(refusal, "host", index, gpu, nvshmem) for index, gpu in enumerate(gpus)]


@pytest.fixture(autouse=True)
def _no_look_at_this_machine(monkeypatch):
    monkeypatch.setattr(placement, "_offer", lambda control, compiles: None)


@pytest.mark.parametrize(
    ("gpus", "nvshmem", "fabric", "shared"),
    [(["a", "b"], True, "nvshmem", False), (["a", "a"], True, "nvshmem", True), (["a", "b"], False, "symm_mem", False)],
)
def test_auto_takes_what_fits_the_gpus(gpus, nvshmem, fabric, shared):
    chosen = placement.place("auto", "cuda", StubControl(offers(gpus, nvshmem)))
    assert (chosen.fabric, chosen.shared, chosen.device) == (fabric, shared, torch.device("cuda", 1))
    assert chosen.reason


@pytest.mark.parametrize(("ranks", "gpus"), [(8, "ab"), (4, "abc")])
def test_all_ranks_of_a_group_know_that_some_share_a_gpu(monkeypatch, ranks, gpus):
    """Else those with a GPU to themselves replay graphs, and the others wait for them at a barrier."""
    group = StubControl(offers([gpus[rank % len(gpus)] for rank in range(ranks)]))
    placed = []
    for rank in range(ranks):
        monkeypatch.setattr(StubControl, "rank", rank)
        placed.append(placement.place("auto", "cuda", group))
    assert {(one.fabric, one.shared) for one in placed} == {("nvshmem", True)}


def test_sharing_a_gpu_needs_nvshmem():
    with pytest.raises(UnsupportedEnvironment, match="ranks share a GPU"):
        placement.place("auto", "cuda", StubControl(offers(["a", "a"], nvshmem=False)))


@pytest.mark.parametrize(("fabric", "device"), [("auto", "cuda"), ("nvshmem", "auto"), ("symm_mem", "auto")])
def test_one_rank_without_a_gpu_refuses_all(fabric, device):
    mixed = [offers(["a"])[0], offers(["b"], refusal="no CUDA GPU")[0]]
    with pytest.raises(UnsupportedEnvironment, match="rank 1: no CUDA GPU"):
        placement.place(fabric, device, StubControl(mixed))


def test_auto_without_a_gpu_is_the_cpu_with_the_reason():
    chosen = placement.place("auto", "auto", StubControl(offers(["", ""], refusal="no CUDA GPU")))
    assert (chosen.fabric, chosen.device.type) == ("shm", "cpu")
    assert "no CUDA GPU" in chosen.reason
    assert placement.place("auto", "cpu", SoloControlPlane()).fabric == "loopback"


@pytest.mark.parametrize(
    ("fabric", "device", "gpus", "processes"),
    [
        ("auto", "cuda", 1, 1),
        ("auto", "auto", 7, 1),
        ("auto", "cuda", 8, 8),
        ("auto", "auto", 0, 8),
        ("auto", "cpu", 1, 8),
        ("nvshmem", "cuda", 1, 8),
        ("loopback", "cpu", 0, 1),
    ],
)
def test_one_process_runs_all_ranks_that_would_share_gpus(monkeypatch, fabric, device, gpus, processes):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert placement.processes_to_start(fabric, device, 8) == processes


@pytest.mark.parametrize(
    ("capability", "refusal"),
    [
        ((9, 0), ""),
        ((10, 3), ""),
        ((8, 9), "compute capability 8.9, and the kernels need 9.0 or later"),
        ((12, 0), "GPU architecture sm_120a, and the kernels are for sm_90a, sm_100a, sm_103a"),
    ],
)
def test_a_gpu_without_kernels_is_no_gpu(monkeypatch, capability, refusal):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert placement._refusal(compiles=False) == refusal


def test_multicast_is_turned_off_or_refused():
    environment = {"OTHER": "0"}
    forbid_multicast(environment, NoMulticast("NO_MULTICAST", "1"))
    assert environment == {"OTHER": "0", "NO_MULTICAST": "1"}
    forbid_multicast(environment, NCCL)
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    with pytest.raises(UnsupportedEnvironment, match="NO_MULTICAST=0"):
        forbid_multicast({"NO_MULTICAST": "0"}, NoMulticast("NO_MULTICAST", "1"))


def test_symm_mem_names_the_ranks_that_share_a_gpu():
    refuse_shared_devices([("host", "a"), ("host", "b")])
    with pytest.raises(UnsupportedEnvironment, match="ranks 0 and 2 share one"):
        refuse_shared_devices([("host", "a"), ("host", "b"), ("host", "a")])
    with pytest.raises(UnsupportedEnvironment, match="one host"):
        refuse_shared_devices([("host", "a"), ("other", "b")])
