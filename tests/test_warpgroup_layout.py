"""Who holds what in the warpgroup decode: its own address arithmetic, run on 512 emulated threads.

The kernel's methods without control flow are plain Python, so they run on numpy arrays of threads; the instructions
below them (ldmatrix, stmatrix, wgmma with its descriptors and swizzle) are emulated from the PTX manual.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from dcp_decode.geometry import Geometry  # noqa: E402
from dcp_decode.kernels import (  # noqa: E402
    memory,
    ptx,
    warpgroup_gather,
    warpgroup_query,
    warpgroup_scores,
    warpgroup_values,
    wgmma,
)
from dcp_decode.kernels.sparse_arguments import Worker  # noqa: E402
from dcp_decode.kernels.warpgroup import SparseWarpgroups  # noqa: E402
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig  # noqa: E402

SHARED = 0x2000400  # of CTA 2 of a cluster: the bits above must not reach a descriptor
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
F16 = ALL_BYTES.view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy().astype(np.int64) & 0xFFFF
SHAPES = [(8, 1, 256), (24, 1, 256), (32, 1, 256), (16, 2, 128), (16, 4, 64), (8, 8, 64)]


class Cta:
    """Shared memory of one CTA, and the instructions that touch it; a register is an array over the threads."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.full(nbytes, 0xFF, np.uint8)

    def places(self, addresses):
        return np.asarray(addresses) - SHARED

    def words(self, addresses):
        return np.stack([self.memory[self.places(addresses) + byte] for byte in range(4)]).T.copy().view("<u4")[:, 0]

    def put(self, addresses, words):
        for byte in range(4):
            self.memory[self.places(addresses) + byte] = np.asarray(words, np.int64) >> (8 * byte) & 0xFF

    def store_shared(self, address, values):
        for number, value in enumerate(values):
            self.put(address + 4 * number, value)

    @staticmethod
    def rows(address, matrix):
        """Row addresses [threads, 8] of a matrix, for every thread's warp."""
        by_warp = np.asarray(address).reshape(-1, 32)[:, 8 * matrix : 8 * matrix + 8]
        return np.repeat(by_warp, 32, 0)

    def load_matrices(self, address, count, transposed=False):
        thread = np.arange(len(address))
        g, q = thread % 32 // 4, thread % 4
        found = []
        for matrix in range(count):
            rows = self.rows(address, matrix)
            if transposed:
                halves = [self.words(rows[thread, 2 * q + odd] + g // 2 * 4) >> (16 * (g % 2)) for odd in (0, 1)]
                found.append((halves[0] & 0xFFFF).astype(np.int64) | (halves[1] & 0xFFFF).astype(np.int64) << 16)
            else:
                found.append(self.words(rows[thread, g] + 4 * q).astype(np.int64))
        return found

    def store_matrices(self, address, registers):
        thread = np.arange(len(address))
        g, q = thread % 32 // 4, thread % 4
        for matrix, word in enumerate(registers):
            rows = self.rows(address, matrix)
            for odd in (0, 1):
                place = self.places(rows[thread, 2 * q + odd] + 2 * g)
                half = word >> (16 * odd)
                self.memory[place], self.memory[place + 1] = half & 0xFF, half >> 8 & 0xFF

    def right(self, descriptor, columns):
        """The operand [columns, 16] that a descriptor names."""
        assert descriptor >> 62 == 1, "128-byte swizzle"
        assert (descriptor & 0x3FFF) == descriptor & 0xFFFF, "an address has 14 bits"
        group_bytes = (descriptor >> 32 & 0x3FFF) << 4
        row, k = np.arange(columns)[:, None], np.arange(16)[None]
        address = ((descriptor & 0x3FFF) << 4) + row // 8 * group_bytes + row % 8 * 128 + 2 * k
        address = (address ^ (address >> 7 & 7) << 4) - (SHARED & 0x3FFFF)
        return (self.memory[address] | self.memory[address + 1].astype(np.uint16) << 8).view(np.float16).astype(float)

    def multiply_add(self, sums, left, right, offsets):
        return [self.multiply_tile(*tile, right, offsets) for tile in zip(sums, left, strict=True)]

    def multiply_tile(self, sums, left, right, offsets):
        sums = [np.broadcast_to(value, 512).astype(float) for value in sums]
        result = [value.copy() for value in sums]
        thread = np.arange(512)
        g, q = thread % 32 // 4, thread % 4
        for words, offset in zip(left, offsets, strict=True):
            halves = [(np.asarray(word, np.uint32).view("<u2").reshape(-1, 2)).view(np.float16) for word in words]
            for group in range(4):
                own = slice(128 * group, 128 * group + 128)
                a = np.zeros((64, 16))
                for word, half in enumerate(halves):
                    line = thread[own] % 128 // 32 * 16 + g[own] + word % 2 * 8
                    for odd in (0, 1):
                        a[line, word // 2 * 8 + 2 * q[own] + odd] = half[own, odd]
                units = np.broadcast_to(right, 512)[own]
                assert (units == units[0]).all(), "a warpgroup has one descriptor"
                product = a @ self.right(int(units[0]) + offset, 2 * len(sums)).T
                for element in range(len(sums)):
                    line = thread[own] % 128 // 32 * 16 + g[own] + element % 4 // 2 * 8
                    result[element][own] += product[line, element // 4 * 8 + 2 * q[own] + element % 2]
        return result


def unpack(word):
    bytes_ = [np.asarray(word) >> (8 * byte) & 0xFF for byte in range(4)]
    return [F16[bytes_[0]] | F16[bytes_[1]] << 16, F16[bytes_[2]] | F16[bytes_[3]] << 16]


def pack(low, high):
    halves = [np.broadcast_to(value, 512).astype(np.float16).view(np.uint16).astype(np.int64) for value in (low, high)]
    return halves[0] | halves[1] << 16


def permute(low, high, selector):
    found = 0
    for byte in range(4):
        source = selector >> (4 * byte) & 7
        found = found | (np.asarray(low if source < 4 else high) >> (8 * (source % 4)) & 0xFF) << (8 * byte)
    return found


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def cta(request, monkeypatch):
    head_rows, split, chunk = request.param
    config = WarpgroupConfig(
        Geometry(heads=head_rows * 2, dcp=1, padded_heads=head_rows * 2), 1, True, head_rows, split, chunk
    )
    cta = Cta(config.shared_bytes)
    for name in ("store_shared", "load_matrices"):
        monkeypatch.setattr(memory, name, getattr(cta, name))
    for name in ("store_matrices", "multiply_add"):
        monkeypatch.setattr(wgmma, name, getattr(cta, name))
    monkeypatch.setattr(ptx, "e4m3_to_f16", unpack)
    monkeypatch.setattr(ptx, "permute_bytes", permute)
    monkeypatch.setattr(ptx, "minimum_int32", np.minimum)
    monkeypatch.setattr(wgmma, "rounded_pair", pack)
    for module in (wgmma, warpgroup_query, warpgroup_scores, warpgroup_values):
        for kind in ("Int32", "Uint32", "Int64", "Float32"):
            monkeypatch.setattr(module, kind, lambda value: value, raising=False)
    cta.kernel = SparseWarpgroups(config)
    thread = np.arange(512)
    cta.worker = Worker(0, 0, 0, thread, thread // 32, thread % 32, SHARED, None)
    generator = np.random.default_rng(7)
    finite = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)
    cta.keys, cta.query = (generator.choice(finite, (rows, 576)) for rows in (chunk, head_rows))
    for key in range(chunk):
        first = config.shared.keys + key * 592
        cta.memory[first : first + 576] = cta.keys[key]
    return cta


def values_of(bytes_):
    return torch.from_numpy(bytes_).view(torch.float8_e4m3fn).double().numpy()


def stage_query(cta):
    """What the query warps do with the words of all pieces; every piece once."""
    seen = set()
    words = cta.query.view("<u4").astype(np.int64)
    thread = np.arange(cta.kernel.config.query_threads)
    worker = cta.worker._replace(thread=thread)
    for turn in range(cta.kernel.query_turns):
        line, piece = cta.kernel.place(turn, thread)
        address = cta.kernel.place_address(0, turn, thread)
        np.testing.assert_array_equal(address, line * 576 + piece * 16)
        cta.kernel.stage_piece([words[line, 4 * piece + word] for word in range(4)], turn, worker)
        seen |= set(zip(line, piece, strict=True))
    assert seen == {(line, piece) for line in range(cta.kernel.config.head_rows) for piece in range(36)}


def keys_and_heads(cta, element):
    """Key of the chunk and head of the CTA that a lane's score number `element` belongs to, as documented."""
    worker = cta.worker
    key = cta.kernel.tile_of(worker) * 64 + worker.warp % 4 * 16 + worker.lane // 4 + element % 4 // 2 * 8
    return key, cta.kernel.head_of(element // 4 * 2 + element % 2, worker)


def test_scores_are_those_of_the_documented_keys_and_heads(cta):
    stage_query(cta)
    found = cta.kernel.scores(cta.worker)
    expected = values_of(cta.keys) @ values_of(cta.query).T
    total = np.zeros_like(expected)
    for element, values in enumerate(found):
        key, head = keys_and_heads(cta, element)
        np.add.at(total, (key, head), values)  # over the depths
    np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-6)


def test_values_meet_their_probabilities(cta):
    chunk, head_rows = cta.kernel.config.chunk, cta.kernel.config.head_rows
    probability = np.random.default_rng(3).integers(0, 16, (chunk, head_rows)).astype(float)
    scores = [probability[keys_and_heads(cta, element)] for element in range(head_rows // 2)]
    cta.kernel.store_probabilities(scores, cta.worker)
    sums = [[0.0] * (head_rows // 2) for _ in range(2)]
    right = wgmma.descriptor(SHARED + cta.kernel.config.shared.probabilities)
    words = [0] * 8
    for step in range(chunk // 32):
        cta.kernel.load_values(words, cta.kernel.value_place(cta.worker) + step * 32 * 592)
        left = [warpgroup_values.value_operands(words[first : first + 4]) for first in (0, 4)]
        operand = right + cta.kernel.probability_units(step)
        sums = wgmma.multiply_add(sums, left, operand, [0, wgmma.STEP_UNITS])
    expected = values_of(cta.keys)[:, :512].T @ probability
    worker = cta.worker
    for tile in range(2):
        for element, values in enumerate(sums[tile]):
            column = worker.warp // 4 * 128 + tile * 64 + worker.warp % 4 * 16 + worker.lane // 4 * 2 + element % 4 // 2
            head = element // 4 * 8 + worker.lane % 4 * 2 + element % 2
            np.testing.assert_allclose(values, expected[column, head], rtol=1e-12)


def test_a_wrong_swizzle_is_seen(cta, monkeypatch):
    monkeypatch.setattr(wgmma, "swizzled", lambda row, piece: row * 128 + piece * 16)
    with pytest.raises(AssertionError):
        test_scores_are_those_of_the_documented_keys_and_heads(cta)
    with pytest.raises(AssertionError):
        test_values_meet_their_probabilities(cta)


GATHERS = [(32, 1, 256, 1), (32, 1, 256, 3), (16, 1, 256, 6), (16, 2, 128, 3), (16, 4, 64, 2), (8, 2, 64, 4)]


@pytest.mark.parametrize("size", GATHERS, ids=lambda size: "x".join(map(str, size)))
def test_a_cluster_copies_every_key_once_to_all_its_head_groups(size, monkeypatch):
    head_rows, split, chunk, groups = size
    kernel = SparseWarpgroups(WarpgroupConfig(Geometry(), 1, True, head_rows, split, chunk, groups))
    monkeypatch.setattr(warpgroup_gather, "Int32", int)
    copies = []
    monkeypatch.setattr(memory, "bulk_load", lambda place, *_: copies.append((place, 1)))
    monkeypatch.setattr(memory, "bulk_multicast", lambda place, *rest: copies.append((place, rest[-1])))
    own = split - 1
    for tile_group in range(groups, 2 * groups):
        for thread in range(512):
            worker = Worker(0, tile_group, own, thread, thread // 32, thread % 32, SHARED, None)
            key = kernel.gathered_key(worker)
            assert key >= chunk or worker.lane < kernel.gathering_lanes, "its row number was loaded"
            if key < chunk:
                kernel.copy_key(key, 0, 0, worker)
    assert sorted(place for place, _ in copies) == list(range(chunk))
    # The rank of CTA (s, g) in its cluster is s + S g.
    receivers = sum(1 << (own + split * group) for group in range(groups)) if groups > 1 else 1
    assert {ctas for _, ctas in copies} == {receivers}
