"""`dcp-decode doctor`: verdicts from made-up facts of clusters, NVML by a stand-in, and the command on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
from rich.console import Console

from dcp_decode import __version__
from dcp_decode.cli import run_command
from dcp_decode.config import load_config
from dcp_decode.device_rank import step_batches
from dcp_decode.doctor import facts as observing
from dcp_decode.doctor import report
from dcp_decode.doctor.facts import Import, RankFacts, try_imports
from dcp_decode.doctor.gpus import Gpu, HostGpus, PeerPath, observe_gpus
from dcp_decode.doctor.verdicts import Examination, examine
from dcp_decode.kernels.aot import MANIFEST, file_hash
from dcp_decode.kernels.fingerprint import source_hash
from dcp_decode.world import Launcher

REPOSITORY = Path(__file__).resolve().parent.parent
LOADS = {"cutlass": Import(True, "loads"), "nvshmem": Import(True, "loads"), "mpi4py": Import(True, "loads")}
GIB = 2**30


def gpu(index: int = 0, host: str = "a", capability: tuple[int, int] = (9, 0), domain: str = "") -> Gpu:
    return Gpu(index, f"{host}-{index}", "NVIDIA H200", capability, 141 * GIB, False, 18, domain)


def rank_facts(rank: int = 0, host: str = "a", gpus: Sequence[Gpu] = (), **given: Any) -> RankFacts:
    """A rank on a host whose GPUs all reach each other, with everything installed."""
    paths = tuple(PeerPath(i, j, "NV18", True) for j in range(len(gpus)) for i in range(j))
    facts = RankFacts(
        rank=rank,
        host=host,
        process_id=100 + rank,
        processor="CPU",
        cores=64,
        memory_bytes=1024 * GIB,
        system="Linux",
        versions={"python": "3.12.3", "torch": "2.11.0"},
        cuda_torch="13.0",
        visible_gpus=tuple(one.uuid for one in gpus),
        gpus=HostGpus("580.1", "13.0", tuple(gpus), paths, "" if gpus else "the driver has no GPU"),
        imports=LOADS,
        mpirun="/bin/mpirun",
        shared_memory_bytes=64 * GIB,
        shared_memory_free_bytes=64 * GIB,
    )
    return replace(facts, **given)


def group(hosts: int = 1, gpus_a_host: int = 8, ranks: int = 8, domain: str = "", **given: Any) -> list[RankFacts]:
    """Ranks in blocks on hosts named a, b, ..."""
    found = []
    for rank in range(ranks):
        host = "abcd"[rank * hosts // ranks]
        found.append(rank_facts(rank, host, [gpu(i, host, domain=domain) for i in range(gpus_a_host)], **given))
    return found


def judged(ranks: Sequence[RankFacts], launcher: str = "builtin", **overrides: object) -> Examination:
    config = load_config(None, {key.replace("__", "."): value for key, value in overrides.items()})
    return examine(config, Launcher(launcher, 0, len(ranks)), ranks)


def fabrics(examination: Examination) -> dict[str, bool]:
    return {verdict.name: verdict.works for verdict in examination.fabrics}


def reason(examination: Examination, name: str) -> str:
    everything = (*examination.fabrics, *examination.kernels, *examination.launchers)
    return next(verdict.reason for verdict in everything if verdict.name == name)


CPU_ONLY = {"loopback": True, "shm": True, "nvshmem": False, "symm_mem": False}


def test_a_laptop_runs_on_the_cpu_and_hears_why_not_on_a_gpu() -> None:
    laptop = rank_facts(gpus=())
    found = judged([laptop])
    assert (found.ready, found.answer) == (True, "8 ranks on the CPU over fabric shm")
    assert (found.device, found.kind) == ("cpu", "cpu-64-cores")
    assert fabrics(found) == CPU_ONLY
    assert reason(found, "nvshmem") == "no CUDA GPU: the driver has no GPU"
    assert judged([laptop], parallel__device="auto").ready
    assert not judged([laptop], parallel__device="cuda").ready
    assert not judged([laptop], parallel__device="auto", parallel__fabric="symm_mem").ready
    assert not judged([laptop], parallel__device="auto", parallel__chain="fused").ready


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_beside_a_gpu_that_is_of_no_use_one_process_runs_all_ranks(capability: tuple[int, int]) -> None:
    found = judged([rank_facts(gpus=[gpu(capability=capability)])], parallel__device="auto")
    assert (found.ready, found.answer) == (True, "8 ranks on the CPU over fabric loopback")
    eight = [rank_facts(gpus=[gpu(index, capability=capability) for index in range(8)])]
    assert judged(eight, parallel__device="auto").answer == "8 ranks on the CPU over fabric shm"


def test_caches_beyond_the_memory_of_a_host_are_refused() -> None:
    laptop = rank_facts(gpus=())  # 1 TiB
    fits = {"model__layers": 16, "cache__page_stride_rows": 64, "cache__pages": 233_000}
    assert judged([laptop], **fits).ready
    found = judged([laptop], **fits | {"cache__pages": 234_000})
    assert not found.ready
    assert found.answer == (
        "cache.pages = 234000: 8 ranks x 16 layers x 234000 pages and the mailboxes take 1028.4 GiB, and a has 1024.0"
    )


def test_mailboxes_take_memory_too() -> None:
    settings = {"parallel__fabric": "loopback", "cache__pages": 1, "mailbox__capacity": 4096}
    assert judged([rank_facts(memory_bytes=32 * GIB)], **settings).ready
    assert "cache.pages = 1: 8 ranks " in judged([rank_facts(memory_bytes=8 * GIB)], **settings).answer


def test_a_container_has_the_memory_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "memory_bytes", lambda: 5 * GIB)
    assert observing.observe(0, with_imports=False).memory_bytes == 5 * GIB


@pytest.mark.parametrize("visible", [("a-0", "a-1"), ("a-1",)])
def test_a_kind_of_hardware_counts_the_gpus_of_a_host(visible: tuple[str, ...]) -> None:
    two = rank_facts(gpus=[gpu(0), gpu(1)], visible_gpus=visible)
    assert judged([two], parallel__device="auto").kind == "nvidia-h200-2-gpus"
    assert judged([two], parallel__device="cpu").kind == "cpu-64-cores"


def test_one_gpu_runs_eight_ranks_in_one_process_or_over_nvshmem() -> None:
    found = judged([rank_facts(gpus=[gpu()])], parallel__device="auto")
    assert (found.ready, found.answer) == (True, "8 ranks on the GPU over fabric loopback")
    assert (found.device, found.kind) == ("cuda", "nvidia-h200-1-gpu")
    found = judged(group(gpus_a_host=1), "mpi", parallel__device="auto")
    assert found.answer == "8 ranks on the GPU over fabric nvshmem"
    found = judged([rank_facts(gpus=[gpu()])], parallel__device="cuda", parallel__fabric="nvshmem")
    assert found.answer == "8 ranks on the GPU over fabric nvshmem"
    assert fabrics(found) == CPU_ONLY | {"nvshmem": True}
    assert reason(found, "symm_mem") == "needs a GPU a rank: 8 ranks, 1 GPUs"
    assert reason(found, "sparse decode") == "for sm_90a"


def test_a_node_runs_everything_and_falls_back_without_nvshmem() -> None:
    found = judged(group(), "torchrun", parallel__device="auto")
    assert found.answer == "8 ranks on the GPU over fabric nvshmem"
    assert fabrics(found) == {"loopback": False, "shm": True, "nvshmem": True, "symm_mem": True}
    assert "start it without torchrun" in reason(found, "loopback")
    broken = LOADS | {"nvshmem": Import(False, "ImportError: libnvshmem_host.so.3")}
    found = judged(group(imports=broken), "torchrun", parallel__device="auto")
    assert found.answer == "8 ranks on the GPU over fabric symm_mem"
    assert reason(found, "nvshmem") == "nvshmem does not load on a: ImportError: libnvshmem_host.so.3"


@pytest.mark.parametrize(("domain", "works"), [("rack:0", True), ("", False)])
def test_two_hosts_need_one_nvlink_domain(domain: str, works: bool) -> None:
    found = judged(group(hosts=2, gpus_a_host=4, domain=domain), "mpi", parallel__device="cuda")
    assert fabrics(found) == {"loopback": False, "shm": False, "nvshmem": works, "symm_mem": False}
    assert found.ready is works
    assert reason(found, "shm") == "the ranks are on 2 hosts (a, b)"
    if not works:
        assert found.answer.endswith("the ranks are on 2 hosts (a, b), whose GPUs are not in one NVLink domain")


def test_hosts_of_different_nvlink_domains_are_refused() -> None:
    ranks = group(hosts=2, gpus_a_host=4, domain="rack:0")
    ranks[4:] = [replace(facts, gpus=group(1, 4, 1, "rack:1")[0].gpus) for facts in ranks[4:]]
    ranks[4:] = [replace(facts, visible_gpus=tuple(one.uuid for one in facts.gpus.gpus)) for facts in ranks[4:]]
    assert not fabrics(judged(ranks, "mpi"))["nvshmem"]


def test_a_pair_of_gpus_without_peer_access_is_named() -> None:
    ranks = group()
    paths = tuple(
        replace(path, kind="SYS", peer_access=False) if (path.first, path.second) == (2, 5) else path
        for path in ranks[0].gpus.paths
    )
    ranks = [replace(facts, gpus=replace(facts.gpus, paths=paths)) for facts in ranks]
    found = judged(ranks, "torchrun", parallel__device="cuda")
    assert not found.ready
    assert reason(found, "nvshmem") == reason(found, "symm_mem") == "GPUs 2 and 5 of a have no peer access (SYS)"
    assert judged(ranks[:1], parallel__dcp=2, parallel__device="cuda").ready  # two ranks use GPUs 0 and 1 only


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gpus": [gpu(capability=(8, 0))]}, "compute capability 8.0, and the kernels need 9.0 or later"),
        ({"gpus": [gpu(capability=(12, 0))]}, "is sm_120a, and the kernels are for sm_90a, sm_100a, sm_103a"),
        ({"gpus": [gpu()], "visible_gpus": (), "cuda_torch": None}, "torch 2.11.0 is built without CUDA"),
        ({"gpus": [gpu()], "visible_gpus": (), "variables": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES="),
        ({"gpus": [gpu()], "visible_gpus": ()}, "CUDA does not start"),
        ({"gpus": [gpu()], "imports": LOADS | {"cutlass": Import(False, "no")}}, "cutlass does not load on a: no"),
        ({"gpus": [gpu()], "variables": {"NVSHMEM_DISABLE_NVLS": "0"}}, "rank 0: NVSHMEM_DISABLE_NVLS=0"),
    ],
)
def test_every_obstacle_of_one_gpu_is_named(given: dict[str, Any], why: str) -> None:
    found = judged([rank_facts(**given)], parallel__device="cuda", parallel__fabric="nvshmem")
    assert not found.ready
    assert why in found.answer
    assert why in reason(found, "nvshmem")


def test_small_shared_memory_is_refused_with_the_size() -> None:
    found = judged([rank_facts(shared_memory_free_bytes=40 * 2**20)])
    assert not found.ready
    assert reason(found, "shm") == "needs 52 MiB of 40 MiB free in /dev/shm (docker: --shm-size)"


def test_a_world_of_another_size_is_not_ready() -> None:
    assert "torchrun started 4 ranks, but parallel.dcp is 8" in judged(group(ranks=4), "torchrun").answer


def write_build(folder: Path, **given: object) -> None:
    """A build of the default config for one architecture, with a library of a few bytes."""
    folder.mkdir()
    (folder / "kernels.so").write_bytes(b"code")
    config = load_config()
    symbols = [
        {
            "architecture": "sm_90a",
            "symbol": f"s{batch}",
            "kernel": "merge",
            "batch": batch,
            "config": {},
            "parameters": [],
        }
        for batch in step_batches(config.service.draft_tokens + 1, config.geometry())
    ]
    manifest = {
        "dcp_decode": __version__,
        "commit": None,
        "dirty": None,
        "source": source_hash(),
        "route": "push",
        "geometry": asdict(config.geometry()),
        "versions": {},
        "libraries": {"sm_90a": {"file": "kernels.so", "sha256": file_hash(folder / "kernels.so")}},
        "kernels": symbols,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest | given))


def test_builds_are_matched_to_the_config_and_the_gpus(tmp_path: Path) -> None:
    good, stale, broken = (tmp_path / name for name in ("good", "stale", "broken"))
    write_build(good)
    write_build(stale, source="of another day")
    write_build(broken)
    (broken / "kernels.so").write_bytes(b"cod")
    folders = (good, stale, broken, tmp_path / "absent")
    laptop = examine(load_config(), Launcher("builtin", 0, 1), [rank_facts()], folders)
    assert [verdict.works for verdict in laptop.builds] == [True, False, False, False]
    assert [verdict.reason.split(":")[0] for verdict in laptop.builds] == [
        "for sm_90a, batches 2, 5, 10, 20",
        "was built for source = 'of another day', must be '" + source_hash() + "'",
        "kernels.so is damaged",
        "must be a folder that `dcp-decode build` wrote; its manifest.json can't be read",
    ]
    blackwell = rank_facts(gpus=[gpu(capability=(10, 0))])
    found = judged([blackwell], parallel__device="cuda", parallel__kernels=good)
    assert (found.ready, found.answer) == (False, "was built for sm_90a, and this GPU is sm_100a: build it again")
    no_compiler = {"imports": LOADS | {"cutlass": Import(False, "not installed")}}
    assert judged([rank_facts(gpus=[gpu()], **no_compiler)], parallel__device="cuda", parallel__kernels=good).ready


def text_of(examination: Examination, ranks: Sequence[RankFacts]) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    report.show(console, examination, ranks)
    return console.export_text()


def test_what_differs_between_ranks_is_set_off() -> None:
    ranks = group()
    same = judged(ranks, "torchrun")
    assert same.differences == ()
    assert "ranks 0-7" in text_of(same, ranks)
    assert "differs" not in text_of(same, ranks)
    ranks[3] = replace(ranks[3], versions=ranks[3].versions | {"torch": "2.13.0"})
    ranks[4] = replace(ranks[4], variables={"NCCL_DEBUG": "INFO"})
    found = judged(ranks, "torchrun")
    assert [(one.fact, dict(one.values)) for one in found.differences] == [
        ("package torch", {"2.11.0": [0, 1, 2, 4, 5, 6, 7], "2.13.0": [3]}),
        ("NCCL_DEBUG", {"absent": [0, 1, 2, 3, 5, 6, 7], "INFO": [4]}),
    ]
    text = text_of(found, ranks)
    assert "ranks 0-2, 5-7" in text
    assert "package torch (differs)" in text
    assert "ranks differ in package torch: '2.11.0' on ranks 0-2, 4-7; '2.13.0' on rank 3" in text


def test_document_is_json_with_everything() -> None:
    ranks = group(ranks=2, gpus_a_host=2)
    found = judged(ranks, "torchrun", parallel__dcp=2)
    document = json.loads(json.dumps(report.document(found, ranks)))
    assert document["ready"] is True
    assert [verdict["name"] for verdict in document["fabrics"]] == ["loopback", "shm", "nvshmem", "symm_mem"]
    assert document["ranks"][1]["gpus"]["paths"] == [{"first": 0, "second": 1, "kind": "NV18", "peer_access": True}]


class Nvml:
    """A host as NVML would describe it; questions whose answer is absent raise its error."""

    NVMLError = pynvml.NVMLError
    NVML_NVLINK_MAX_LINKS = 18
    c_nvmlGpuFabricInfo_v2_t = pynvml.c_nvmlGpuFabricInfo_v2_t

    def __init__(self, links: dict[int, list[int | None]], ancestor: int = 50, peer_access: bool = True) -> None:
        """links: GPU -> what each of its NVLinks leads to, a GPU or (None) a switch."""
        self.links, self.ancestor, self.peer_access = links, ancestor, peer_access

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return self._unsupported

    def _unsupported(self, *_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return len(self.links)

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13020

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-uuid-{handle}"

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return int(link < len(self.links[handle]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self.links[handle][link] is None else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return self.nvmlDeviceGetPciInfo(self.links[handle][link])

    def nvmlDeviceGetPciInfo(self, handle: int | None) -> Any:
        address = pynvml.nvmlPciInfo_t()
        address.busId = f"0000:0{handle}:00.0".encode()
        return address

    def nvmlDeviceGetTopologyCommonAncestor(self, _one: int, _other: int) -> int:
        return self.ancestor

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, _capability: int) -> int:
        return 0 if self.peer_access or one < other else 5  # works one way only

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, info: Any) -> None:
        if handle == 0:
            return self._unsupported()
        info._obj.state = 3
        info._obj.cliqueId = 7
        info._obj.clusterUuid[0] = 0xAB
        return 0


@pytest.mark.parametrize(
    ("links", "kind"),
    [
        ({0: [None] * 18, 1: [None] * 16}, "NV16"),  # to switches: what the narrower one has
        ({0: [1, 1, 2], 1: [0, 0, 2, 2], 2: [0, 1, 1]}, "NV2"),
        ({0: [], 1: []}, "SYS"),
    ],
)
def test_nvlink_and_pcie_are_told_apart(links: dict[int, list[int | None]], kind: str) -> None:
    found = observe_gpus(Nvml(links))
    assert found.paths[0] == PeerPath(0, 1, kind, True)
    assert [one.nvlinks for one in found.gpus] == [len(ends) for ends in links.values()]
    assert (found.cuda_driver, found.driver, found.problem) == ("13.2", None, "")
    assert (found.gpus[0].uuid, found.gpus[0].name, found.gpus[0].domain) == ("uuid-0", "unknown", "")
    assert found.gpus[1].domain == "ab" + 15 * "00" + ":7"


def test_peer_access_must_work_both_ways() -> None:
    assert not observe_gpus(Nvml({0: [], 1: []}, peer_access=False)).paths[0].peer_access


def test_a_gpu_that_the_driver_has_lost_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_gpu(self: Nvml, index: int) -> int:
        return index if index != 1 else self._unsupported()

    monkeypatch.setattr(Nvml, "nvmlDeviceGetHandleByIndex", open_gpu)
    monkeypatch.setattr(Nvml, "nvmlShutdown", Nvml._unsupported)
    found = observe_gpus(Nvml({0: [None], 1: [], 2: [None]}))
    assert [gpu.index for gpu in found.gpus] == [0, 2]
    assert found.paths == (PeerPath(0, 2, "NV1", True),)
    assert found.problem == "the driver can't open GPU 1 of 3"


def test_no_driver_is_a_finding() -> None:
    nvml = Nvml({})
    nvml.nvmlInit = nvml._unsupported  # type: ignore[method-assign]
    assert "no NVIDIA driver" in observe_gpus(nvml).problem


def test_imports_that_crash_or_hang_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "IMPORT_SECONDS", 1.0)
    statements = {
        "good": "print('version 7')",
        "missing": "import no_such_package_here",
        "crashing": "import os; os.abort()",
        "hanging": "import time; time.sleep(60)",
    }
    assert try_imports(statements) == {
        "good": Import(True, "version 7"),
        "missing": Import(False, "ModuleNotFoundError: No module named 'no_such_package_here'"),
        "crashing": Import(False, "its import dies of signal 6"),
        "hanging": Import(False, "its import hangs (ended after 1 s)"),
    }


def test_this_machine_runs_on_its_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ready"], found["answer"]) == (True, "8 ranks on the CPU over fabric shm")
    assert found["ranks"][0]["versions"]["torch"]
    assert {verdict["name"] for verdict in found["launchers"] if verdict["works"]} == {"builtin", "torchrun", "mpi"}


def test_beside_json_a_refusal_is_one_line_of_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--json", "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: not ready: {json.loads(printed.out)['answer']}\n"


@pytest.mark.xdist_group("launch")
def test_under_mpirun_there_is_one_finding_of_all_ranks(tmp_path: Path) -> None:
    config = tmp_path / "pair.toml"
    config.write_text("[parallel]\ndcp = 2\n")
    command = [str(REPOSITORY / "launch" / "mpirun.sh"), "doctor", str(config), "--json", "--device", "cuda"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    found = json.loads(ended.stdout)
    refusal = "parallel.device = cuda: rank 0: no CUDA GPU: "
    assert (ended.returncode, found["ready"]) == (2, False)
    assert found["answer"].startswith(refusal)
    assert ended.stderr.splitlines()[-1].startswith(f"error: not ready: {refusal}")
    assert {verdict["name"] for verdict in found["fabrics"] if verdict["works"]} == {"shm"}
    assert [facts["rank"] for facts in found["ranks"]] == [0, 1]
    assert [facts["imports"] is None for facts in found["ranks"]] == [False, True]
