#!/usr/bin/env bash
# launch/torchrun.sh run [CONFIG] [OPTIONS]: the ranks of CONFIG under torchrun, on this host or on several nodes.
set -euo pipefail
# shellcheck source=launch/session.sh
source "$(dirname "${BASH_SOURCE[0]}")/session.sh"

prepare torchrun "$@"
if ((ranks % nodes != 0)); then
  echo "error: parallel.dcp = $ranks: must be a multiple of the $nodes nodes (NNODES)" >&2
  exit 2
fi
where=(--standalone)
if ((nodes > 1)); then
  where=(--nnodes "$nodes" --node-rank "$node" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
fi
launch "$bin/python" -m dcp_decode.control.agent "${where[@]}" --nproc-per-node "$((ranks / nodes))" -m dcp_decode "$@"
