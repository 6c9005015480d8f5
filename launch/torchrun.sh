#!/usr/bin/env bash
# launch/torchrun.sh run [CONFIG] [OPTIONS]: the ranks of CONFIG under torchrun on this host.
set -euo pipefail
# shellcheck source=launch/session.sh
source "$(dirname "${BASH_SOURCE[0]}")/session.sh"

prepare torchrun "$@"
launch "$bin/python" -m dcp_decode.control.agent --standalone --nproc-per-node "$ranks" -m dcp_decode "$@"
