#!/usr/bin/env bash
# launch/torchrun.sh run|checkpoint|doctor [CONFIG] [OPTIONS]: the ranks under torchrun, on this host or on several nodes.
set -euo pipefail
# shellcheck source=launch/session.sh
source "$(dirname "${BASH_SOURCE[0]}")/session.sh"

prepare torchrun "$@"
if ((ranks % nodes != 0)); then
  refuse "parallel.dcp = $ranks: must be a multiple of the $nodes nodes (NNODES)"
fi
where=(--standalone)
if ((nodes > 1)); then
  where=(--nnodes "$nodes" --node-rank "$node" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
fi
# The agent never removes its folder of logs; the dot keeps it out of a forensics archive.
where+=(--log-dir "$plan/.torchrun")
launch "$bin/python" -m dcp_decode.control.agent "${where[@]}" --nproc-per-node "$((ranks / nodes))" -m dcp_decode "$@"
