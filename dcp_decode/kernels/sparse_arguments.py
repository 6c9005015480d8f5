"""What the methods of the sparse decode kernel pass on: two bundles instead of long argument lists.

Both are NamedTuples of DSL values, which the DSL carries through its dynamic conditions and loops; they are never
reassigned inside one.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class SparseArguments(NamedTuple):
    """The kernel's arguments; addresses are Int64, see `launch.run_sparse`."""

    region: Any  # this rank's mailbox
    table: Any  # int64 [D], base addresses of the peers' mailboxes
    rank: Any  # Int32
    kv: Any  # uint8 [N, 576]
    rows: Any  # int32 [>= B, K]
    valid: Any  # int32 [>= B]
    latent: Any  # bf16 [>= B, padded, 512], local route
    lse: Any  # fp32 [>= B, padded], local route
    scale_log2: Any  # Float32, from scores to base-2 logits
    out_scale: Any  # Float32, of the value bytes
    deadline: Any  # Int64, nanoseconds of every wait


class Worker(NamedTuple):
    """Where a thread works. Int32 but for the pointer; `thread` counts within its role (compute or query threads)."""

    row: Any  # batch row of the CTA
    tile_group: Any  # its heads are 16 t tile_group .. + 16 t - 1
    split: Any  # its number in the cluster: it has keys split, split + S ..
    thread: Any
    warp: Any  # uniform over a warp
    lane: Any
    shared: Any  # address of dynamic shared memory
    barriers: Any  # the same as a pointer to mbarriers


# Named barriers of a CTA; 0 is that of all threads.
QUERY_STAGED = 1  # the query words of all heads are in shared memory
COMPUTE = 2  # the compute warps alone
QUERY_WARPS_DONE = 3  # every query warp has polled its last word
