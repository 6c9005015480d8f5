"""DcpChain: query push, sparse decode and merge of one layer in one launch, where all clusters are resident at once.

All but the query warps of a CTA do what they do in `SparseDcpDecode`; the query warps do the exchange beside them:

    query warps     push own query | poll, stage | re-arm | close use | credit |              poll values, merge, re-arm
                        |               v QUERY_STAGED                         ^ VALUES_PUSHED
    compute warps   index, count -> gather ->  scores, softmax, values, cluster merge, push to the owners

* A CTA pushes its share of the own query before its first wait, and its values before it waits for those of others.
  All CTAs of a rank are resident (`chain_config` refuses the rest), and all ranks run: so no wait keeps its producer
  away. Ranks that share a device in one process launch stage by stage instead.
* The merge of a row and own head belongs to one CTA: its query warps, idle by then, take 4 columns a thread. What peers
  have pushed is loaded before VALUES_PUSHED, and only what is missing is polled after it.
* No data thread fences: one warp of the grid exchanges credit words for the rank (`credit`).
* No next stage is there to increment the use number. A cluster whose threads have all read it counts up a ticket, and
  the last cluster increments (`arrival.close_use`): as three stages would have, so that batches too large for one wave
  may use the stages on the same mailboxes.

Every bit is that of the stages: the same decode, and the merge sums in the same order.

A run launches it where `parallel.chain` asks for it and all ranks agree (`fusing`), the checkpoint always.

Measured (one H200, solo: peers' words in place, own words through the own mailbox; CUDA graphs with programmatic
dependent launch, slope between graphs of 6 and 24 launches, 96 heads, 256 keys a row, D 8; us, hot / cold):

                                                        B 5             B 1
    three launches, the sparse decode as below      7.13 / 7.98     6.74 / 7.09
    fused, partials                                 6.67 / -         -
    fused, probabilities                            6.26 / 6.85     5.41 / 5.57
    with shared copies and interleaved products     5.71 / 6.23     5.20 / 5.41
    short rows straight through                     5.72 / 6.12     5.04 / -
    the same, chunk 128                             5.65 / 6.05     4.96 / -
    288 keys a row, chunk 128 (64: 7.46 / 7.89)     6.43 / 6.78     5.93 / -

What it took from the first form (8.25 us at B 5, partials):
* Polling all of a thread's pieces at once, the abort word beside them, 4 columns a thread in the merge: -0.9.
* First loads without a condition, the use number last (it goes to a uniform register, where the warp stops), peers'
  addresses as relaxed loads (plain ones were moved behind a branch), leaner waits, and a sparse decode whose compute
  warps don't load the use number: -0.4 together.
* The exchange of probabilities with early loads, shared copies and interleaved products (`sparse`): -0.9.
Without an effect: leaving out the credit exchange (0.02), triggering dependents at the start or the end. Worse: the
gather after the query pushes (+0.2), values gathered after the query is there (+0.1 at B 1), polling for values during
the attention (+0.14), a wait before the first poll for values (0 to +0.2). Clock stamps, ns after the dependency wait,
B 5 without shared copies: query pushed 530, own query received 1770, values pushed 4140, merged 4850.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode.kernels import arrival, disk_cache, memory, polling, ptx
from dcp_decode.kernels.chain_config import ChainConfig, ChainRefused, can_implement
from dcp_decode.kernels.credit import exchange_credit
from dcp_decode.kernels.query import QueryPieces, quantized
from dcp_decode.kernels.source_merge import SourceMerge
from dcp_decode.kernels.sparse import SparseDcpDecode
from dcp_decode.kernels.sparse_arguments import QUERY_STAGED, QUERY_WARPS_DONE, SparseArguments, Worker
from dcp_decode.kernels.sparse_query import PIECE_BYTES, PIECES_IN_FLIGHT, ROW_PIECES
from dcp_decode.kernels.sparse_shared import ROW_PITCH, SPLIT
from dcp_decode.mailbox import Stage

# Named barriers beyond those of the sparse decode.
VALUES_PUSHED = 4  # the compute warps' pushes are issued: the values of all CTAs will be there soon
VALUES_RECEIVED = 5  # of the query warps alone: all have the values of a head


class OwnRows(NamedTuple):
    """What a chain reads and writes of this rank's own heads, beside the arguments of the sparse decode."""

    query: Any  # Int64, address of bf16 [B, H, 576]
    merged: Any  # Int64, address of bf16 [>= B, H, 512]
    inverse_scale: Any  # Float32, 1 / q_scale


class DcpChain(SparseDcpDecode):
    """The kernel specialised for one `ChainConfig`."""

    def __init__(self, chain: ChainConfig) -> None:
        refusal = can_implement(chain)
        if refusal is not None:
            raise ChainRefused(refusal)
        super().__init__(chain.sparse)
        self.chain = chain
        self.query_pieces = QueryPieces(chain.geometry)
        self.sources = SourceMerge(chain.geometry, chain.sparse.query_threads)

    @cute.jit
    def __call__(
        self,
        region: Int64,
        table: Int64,
        rank: Int32,
        query: Int64,
        kv: Int64,
        rows: Int64,
        valid: Int64,
        merged: Int64,
        inverse_scale: Float32,
        scale_log2: Float32,
        out_scale: Float32,
        deadline: Int64,
        stream: cuda.CUstream,
    ) -> None:
        """Launch with the sparse decode's grid; arguments as in `launch.run_chain`, addresses as integers."""
        nowhere = Int64(0)
        self.chain_kernel(
            SparseArguments(region, table, rank, kv, rows, valid, nowhere, nowhere, scale_log2, out_scale, deadline),
            OwnRows(query, merged, inverse_scale),
        ).launch(**self.launch_shape, stream=stream)

    @cute.kernel
    def chain_kernel(self, arguments: SparseArguments, own: OwnRows) -> None:
        worker = self.begin()
        first_query_warp = self.config.first_query_warp
        if worker.warp >= first_query_warp:
            self.exchange_with_ranks(arguments, own, self.counted_from(worker, first_query_warp))
        else:
            self.compute(arguments, worker)
            cute.arch.barrier_arrive(barrier_id=VALUES_PUSHED, number_of_threads=self.config.threads)
        self.end()

    @cute.jit
    def exchange_with_ranks(self, arguments: SparseArguments, own: OwnRows, worker: Worker) -> None:
        """The query warps: all that passes between ranks but the push of the values."""
        config, chain = self.config, self.chain
        region = arguments.region
        cluster = worker.row * chain.clusters_a_row + worker.tile_group
        loaded, bases = self.load_own_query(arguments, own, worker, cluster * SPLIT + worker.split)
        gave_up = arrival.read_abort(region)
        # The last of the first loads: it goes to a uniform register, and the warp stops until it is there.
        use = arrival.read_use(region, int(Stage.QUERY))
        waiter = polling.Waiter(region, arguments.rank, use, arguments.deadline)
        # A rank that gave up must not overwrite words that a slow peer has yet to read.
        if gave_up == 0:
            self.push_query(loaded, bases, arguments, own, worker, use, cluster * SPLIT + worker.split)
        address = self.query_address(arguments, worker, use)
        self.receive_query(arguments, worker, use, address)
        self.publish_use(worker, use, gave_up)
        cute.arch.barrier_arrive(barrier_id=QUERY_STAGED, number_of_threads=config.staged_threads)
        # As in `serve_query`: first arrival (barriers), then all readers of the cluster have their words.
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.barrier(barrier_id=QUERY_WARPS_DONE, number_of_threads=config.query_threads)
        cute.arch.cluster_wait()
        aborted = memory.load_shared(worker.shared + config.shared.abort_flag, 1, Int32)[0]
        if aborted == 0:
            self.rearm_query(worker, address)
        # Only query threads read the use number from global memory, and the polls' addresses depend on it.
        if (worker.thread == 0) & (worker.split == 0):
            arrival.close_use(region, Int32(chain.clusters))
        if (cluster == chain.clusters - 1) & (worker.split == SPLIT - 1) & (worker.warp == 0):
            exchange_credit(config.geometry, waiter, arguments.table, gave_up, worker.lane)
        self.merge_own_heads(waiter, own, worker)

    def own_piece(self, cta: Any, worker: Worker, turn: int) -> Any:
        """A lane's piece of the own heads' query in one turn of its CTA's share."""
        return cta * self.chain.pieces_a_cta + worker.lane + 32 * turn

    def first_peer(self, worker: Worker) -> Any:
        """The first of the ranks that a query warp pushes to."""
        return worker.warp * self.chain.peers_a_warp

    def load_own_query(
        self, arguments: SparseArguments, own: OwnRows, worker: Worker, cta: Any
    ) -> tuple[list[list[Any]], list[Any]]:
        """First loads of a push, without a condition: each turn's piece, and the base addresses of the warp's ranks."""
        chain = self.chain
        pieces = [self.own_piece(cta, worker, turn) for turn in range(chain.push_turns)]
        loaded = [self.query_pieces.load(own.query, ptx.minimum_int32(each, chain.pieces - 1)) for each in pieces]
        peers = [self.first_peer(worker) + peer for peer in range(chain.peers_a_warp)]
        slots = [Int64(ptx.minimum_int32(peer, chain.geometry.dcp - 1)) * 8 for peer in peers]
        return loaded, [memory.load_base(arguments.table + slot) for slot in slots]

    @cute.jit
    def push_query(
        self,
        loaded: list[list[Any]],
        bases: list[Any],
        arguments: SparseArguments,
        own: OwnRows,
        worker: Worker,
        use: Int32,
        cta: Int32,
    ) -> None:
        """This CTA's share of the own heads' query to all ranks: a lane a piece, the ranks dealt over the warps."""
        chain = self.chain
        for turn in cutlass.range_constexpr(chain.push_turns):
            piece = self.own_piece(cta, worker, turn)
            words = quantized(loaded[turn], own.inverse_scale)
            offset = self.query_pieces.offset(use, arguments.rank, piece) + self.config.mailbox.query.offset
            mine = (worker.lane + 32 * turn < chain.pieces_a_cta) & (piece < chain.pieces)
            if mine & (self.first_peer(worker) < chain.geometry.dcp):
                for peer in cutlass.range_constexpr(chain.peers_a_warp):
                    memory.store_words_system(bases[peer] + offset, words)

    @cute.jit
    def receive_query(self, arguments: SparseArguments, worker: Worker, use: Int32, address: Int64) -> None:
        """As the sparse decode's, but all of a thread's pieces are polled together: here they come while it polls."""
        turns = -(-self.pieces // self.config.query_threads)
        in_flight = -(-turns // -(-turns // PIECES_IN_FLIGHT))
        waiter = polling.Waiter(arguments.region, arguments.rank, use, arguments.deadline)
        for first in cutlass.range_constexpr(0, turns, in_flight):
            pieces = [self.piece(turn, worker.thread) for turn in range(first, min(first + in_flight, turns))]
            self.receive_pieces(pieces, waiter, worker, address)

    @cute.jit
    def receive_pieces(self, pieces: list[Any], waiter: polling.Waiter, worker: Worker, address: Int64) -> None:
        """Load all of these pieces, wait for what has not come, and stage them."""
        addresses = [address + Int64(piece) * PIECE_BYTES for piece in pieces]
        words = cute.make_rmem_tensor(4 * len(pieces), Uint32)
        for turn in cutlass.range_constexpr(len(pieces)):
            loaded = memory.load_words_system(addresses[turn])
            for element in cutlass.range_constexpr(4):
                words[4 * turn + element] = loaded[element]
        aborted = polling.wait_pieces(
            waiter, words, addresses, int(Stage.SPARSE), lambda turn: self.piece_place(pieces[turn], worker)
        )
        if aborted != 0:
            memory.store_shared(worker.shared + self.config.shared.abort_flag, [Int32(1)])
        for turn in cutlass.range_constexpr(len(pieces)):
            line = pieces[turn] // ROW_PIECES
            staged = worker.shared + self.config.shared.query + line * ROW_PITCH
            staged += (pieces[turn] - line * ROW_PIECES) * PIECE_BYTES
            memory.store_shared(staged, [words[4 * turn + element] for element in range(4)])

    def piece_place(self, piece: Any, worker: Worker) -> polling.Place:
        """What a piece is, for the record of a wait that expires."""
        line = piece // ROW_PIECES
        head = worker.tile_group * self.config.head_rows + line
        first_word = (piece - line * ROW_PIECES) * (PIECE_BYTES // 4)
        return polling.Place(head // self.config.geometry.owner_heads, worker.row, head, first_word)

    @cute.jit
    def merge_own_heads(self, waiter: polling.Waiter, own: OwnRows, worker: Worker) -> None:
        """The own heads of the CTA's row, dealt over the row's CTAs."""
        chain, g = self.chain, self.chain.geometry
        cta = worker.tile_group * SPLIT + worker.split
        for turn in cutlass.range_constexpr(-(-g.owner_heads // chain.ctas_a_row)):
            head = cta + turn * chain.ctas_a_row
            # A CTA without a head loads in vain.
            some_head = ptx.minimum_int32(head, Int32(g.owner_heads - 1))
            generation = waiter.use % g.generations
            lse, payload = self.sources.load(waiter.region, generation, worker.row, some_head, worker.thread)
            if cutlass.const_expr(turn == 0):
                cute.arch.barrier(barrier_id=VALUES_PUSHED, number_of_threads=self.config.threads)
            if head < g.owner_heads:
                self.sources.receive(waiter, lse, payload, worker.row, head, worker.thread, own.merged, VALUES_RECEIVED)


@cache
def compile_chain(config: ChainConfig) -> disk_cache.JitKernel:
    """The compiled kernel of a configuration (cached); `ChainRefused` when it is refused."""
    return disk_cache.compile_kernel(DcpChain(config), example_arguments())


def example_arguments() -> tuple[Any, ...]:
    """Typed arguments of the compiled kernel, without the stream: for compilation and export."""
    address, scale = Int64(0), Float32(1.0)
    return (
        address, address, Int32(0), address, address, address, address, address, scale, scale, scale, Int64(0),
    )  # fmt: skip
