"""The checkpoint's ranks, gate and peer check on the CPU, with stand-ins for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import checkpoint_kernels  # noqa: E402
from checkpoint_kernels import GEOMETRY, SHAPE, bench_ranks  # noqa: E402

from dcp_decode import numerics  # noqa: E402
from dcp_decode.checkpoint import peer_timing  # noqa: E402
from dcp_decode.checkpoint.gate import Gate, Passed, passed_by_all  # noqa: E402
from dcp_decode.checkpoint.peers import PeerSkipped  # noqa: E402
from dcp_decode.checkpoint.peers.plain_torch import PlainTorch  # noqa: E402
from dcp_decode.checkpoint.ranks import SOLO_RANK, BenchRanks  # noqa: E402
from dcp_decode.checkpoint.timing import Subject  # noqa: E402
from dcp_decode.errors import WaitFailed, WrongResult  # noqa: E402
from dcp_decode.kernels.sparse_layout import sparse_config  # noqa: E402
from dcp_decode.mailbox import CONTROL_BYTES, Stage  # noqa: E402
from dcp_decode.verdict import Worst  # noqa: E402
from dcp_decode.waits import Wait, write_record  # noqa: E402

FAMILY = "seed"
CONFIG = sparse_config(GEOMETRY, SHAPE.batch)
LARGEST_ERROR = 0.05


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    checkpoint_kernels.install(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small, and tests run side by side
    yield
    torch.set_num_threads(threads)


def subject_named(ranks: BenchRanks, name: str, push: bool = True) -> Subject:
    config = sparse_config(GEOMETRY, SHAPE.batch, push)
    return next(subject for subject in ranks.subjects(config) if subject.name == name)


def after(subject: Subject, spoil: Callable[[int], None]) -> Subject:
    """The subject with something done behind its launch."""

    def launch(layer: int) -> None:
        subject.launch(layer)
        spoil(layer)

    return replace(subject, launch=launch)


@pytest.mark.parametrize("running", [(1,), (0, 1)], ids=["solo", "loopback"])
@pytest.mark.parametrize("push", [True, False], ids=["push", "local"])
@pytest.mark.parametrize("l2", ["hot", "cold"])
def test_gate_passes_right_kernels_with_the_same_bits_each_time(running: tuple[int, ...], push: bool, l2: str) -> None:
    ranks = bench_ranks(l2, running)
    gate = Gate(ranks)
    config = sparse_config(GEOMETRY, SHAPE.batch, push)
    sparse, chain = subject_named(ranks, "sparse_decode", push), subject_named(ranks, "chain", push)
    passed = [gate.check_sparse(sparse, config, "sparse") for _ in range(2)]
    passed += [gate.check_chain(chain, config, "chain") for _ in range(2)]
    assert passed[0].digest == passed[1].digest
    assert passed[2].digest == passed[3].digest
    for one in passed:
        assert 0 < one.worst.error <= one.worst.bound <= one.largest_bound
    ranks.require_no_expired_wait("gate")


def test_stages_alone_find_every_word_again_and_again() -> None:
    ranks = bench_ranks()
    for subject in ranks.subjects(CONFIG):
        for _ in range(2):
            subject.prepare()
            for layer in range(subject.layers or ranks.problem.layers):
                subject.launch(layer)


def test_gate_finds_one_wrong_column() -> None:
    ranks = bench_ranks()

    def spoil(layer: int) -> None:
        ranks.layout.payload.view(ranks.sinks[0])[0, 1, 1, 3, 300] *= 1.05

    with pytest.raises(WrongResult, match=r"spoilt, layer 0, rank 1: row 1 head 3 .*worst column 300"):
        Gate(ranks).check_sparse(after(subject_named(ranks, "sparse_decode"), spoil), CONFIG, "spoilt")


def test_gate_finds_a_wrong_lse_on_the_local_route() -> None:
    ranks = bench_ranks()
    config = sparse_config(GEOMETRY, SHAPE.batch, push=False)
    spoilt = after(subject_named(ranks, "sparse_decode", push=False), lambda layer: ranks.lse_ln.mul_(numerics.LOG2_E))
    with pytest.raises(WrongResult, match="LSE"):
        Gate(ranks).check_sparse(spoilt, config, "base 2 for natural")


def test_gate_finds_outputs_that_nobody_wrote() -> None:
    """Also where the right rows, the same in all layers, are still there from before."""
    ranks = bench_ranks("hot")
    gate = Gate(ranks)
    for name, check in (("sparse_decode", gate.check_sparse), ("chain", gate.check_chain)):
        subject = subject_named(ranks, name)
        idle = replace(subject, launch=lambda layer: None)
        check(subject, CONFIG, "right")
        with pytest.raises(WrongResult, match=r"idle, layer 0, rank 1: row 0 head 0 "):
            check(idle, CONFIG, "idle")


def test_gate_finds_words_left_in_a_mailbox() -> None:
    ranks = bench_ranks()

    def leave(layer: int) -> None:
        region = ranks.mailboxes_of(layer)[0].memory.local
        ranks.layout.query.view(region)[0, 1, 15, 575] = 0

    with pytest.raises(WrongResult, match="1 mailbox words are not armed"):
        Gate(ranks).check_chain(after(subject_named(ranks, "chain"), leave), CONFIG, "leaving")


def test_chain_finds_its_peers_words_and_its_own_places_armed() -> None:
    ranks = bench_ranks()
    ranks.regions.fill_(0)
    ranks.prepare_chain()
    region = ranks.regions[-1, 0]
    own, other = ranks.own_heads(1), ranks.own_heads(0)
    query = ranks.layout.query.view(region)
    for generation in range(2):
        assert bool((query[generation][:, own] == numerics.ARMED_BYTE).all())
        assert torch.equal(query[generation][:, other], ranks.problem.query_bytes[:, other])
        payload, lse = (section.words(region) for section in (ranks.layout.payload, ranks.layout.lse_log2))
        for words in (payload, lse):
            assert bool((words[generation, 1] == numerics.ARMED_WORD).all())
            assert bool((words[generation, 0] != numerics.ARMED_WORD).all())
    counters = {stage: int(ranks.mailboxes[-1][0].use_counter(stage)) for stage in Stage}
    assert counters == dict.fromkeys(Stage, 0) | {Stage.MERGE: -1}
    assert int(region[:CONTROL_BYTES].to(torch.int64).sum()) == 4 * 255


def test_layers_read_their_own_rows_only_when_cold() -> None:
    hot, cold = bench_ranks("hot").problem, bench_ranks("cold").problem
    assert torch.equal(hot.rows_of(0), hot.rows_of(3))
    assert not torch.equal(cold.rows_of(0)[:, : SHAPE.keys], cold.rows_of(1)[:, : SHAPE.keys])
    for problem in (hot, cold):
        for layer in range(4):
            rows = problem.rows_of(layer)
            assert bool((rows[:, SHAPE.keys :] == -1).all())
            keys = problem.caches.e4m3[rows[:, : SHAPE.keys].long()]
            part = problem.part_of(problem.caches.e4m3, layer)
            assert torch.equal(keys, part[problem.indices_of(layer).long()])


def test_formats_of_the_peers_hold_the_same_values() -> None:
    problem = bench_ranks().problem
    exact = numerics.e4m3_values(problem.caches.e4m3) * GEOMETRY.k_scale
    assert torch.equal(problem.caches.bf16.float(), exact)
    scaled = problem.caches.block_scaled.view(-1, 656)
    scales = scaled[:, 512:528].contiguous().view(torch.float32)
    latent = numerics.e4m3_values(scaled[:, :512].contiguous()).view(-1, 4, 128) * scales[..., None]
    assert torch.equal(latent.flatten(1), exact[:, :512])
    assert torch.equal(scaled[:, 528:].contiguous().view(torch.bfloat16).float(), exact[:, 512:])
    requantized = numerics.quantize_e4m3(problem.query, GEOMETRY.q_scale)
    assert torch.equal(requantized, problem.query_bytes)


def test_expired_wait_is_not_forgotten_by_the_next_preparation() -> None:
    for prepare in (BenchRanks.prepare_chain, BenchRanks.prepare_fused):
        ranks = bench_ranks()
        prepare(ranks)
        ranks.mailboxes[1][0].abort_word.fill_(1)
        ranks.prepare_chain()
        with pytest.raises(WaitFailed, match=r"^point: a mailbox wait expired$"):
            ranks.require_no_expired_wait("point")


def test_rows_of_an_expired_wait_are_no_wrong_result_and_it_is_told() -> None:
    ranks = bench_ranks()
    honest = subject_named(ranks, "chain")
    wait = Wait("SPARSE", SOLO_RANK, 1, 0, 2, 3, 0, -1, 4, 5)

    def expiring(layer: int) -> None:
        honest.launch(layer)
        ranks.merged.zero_()
        write_record(ranks.mailboxes_of(layer)[0], wait)

    with pytest.raises(WaitFailed) as failure:
        Gate(ranks).check_chain(replace(honest, launch=expiring), CONFIG, "point")
    assert str(failure.value) == f"point, layer 0: a mailbox wait expired; {wait}"
    assert failure.value.expired_waits == [wait.as_dict()]


def checked(ranks: BenchRanks, spoil: Callable[[torch.Tensor, torch.Tensor], None]) -> float:
    peer, gate = PlainTorch(), Gate(ranks)
    (candidate,) = peer.candidates(ranks)
    honest = candidate.launch

    def launch(layer: int) -> None:
        honest(layer)
        spoil(*candidate.outputs())

    spoilt = replace(candidate, launch=launch)
    return peer_timing.check(peer, spoilt, gate.layers, lambda layer: gate.partial(layer, 0, FAMILY), LARGEST_ERROR)


def test_peer_is_measured_only_if_its_rows_and_its_lse_are_right() -> None:
    ranks = bench_ranks()
    assert 0 < checked(ranks, lambda rows, lse: None) < LARGEST_ERROR
    with pytest.raises(PeerSkipped, match=r"wrong result: error 0\.1"):
        checked(ranks, lambda rows, lse: rows[1, 7].mul_(1.1))
    with pytest.raises(PeerSkipped, match="wrong result: error inf"):
        checked(ranks, lambda rows, lse: rows[0, 0, :1].fill_(float("nan")))
    with pytest.raises(PeerSkipped, match="LSE differs"):
        checked(ranks, lambda rows, lse: lse.mul_(numerics.LOG2_E))


def test_a_group_s_digest_tells_the_bits_of_every_rank() -> None:
    worse, better = (Passed(Worst(0, 0, error, 1.0), error, str(error)) for error in (0.5, 0.25))
    together = passed_by_all([better, worse])
    assert (together.worst, together.largest_bound) == (worse.worst, 0.5)
    assert together.digest == passed_by_all([better, worse]).digest
    for other in ([replace(better, digest="other"), worse], [better, replace(worse, digest="other")]):
        assert passed_by_all(other).digest != together.digest
