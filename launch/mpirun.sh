#!/usr/bin/env bash
# launch/mpirun.sh run|checkpoint|doctor [CONFIG] [OPTIONS]: the ranks under the mpirun of .venv, on this host.
set -euo pipefail
# shellcheck source=launch/session.sh
source "$(dirname "${BASH_SOURCE[0]}")/session.sh"

if [[ $nodes != 1 ]]; then
  refuse "NNODES = '$nodes': must be 1, since launch/mpirun.sh runs on this host only; several nodes: launch/torchrun.sh"
fi
prepare mpi "$@"
# On this host only: in an allocation of Slurm mpirun starts its daemons with srun, which hangs inside a step.
unset "${!SLURM_@}"
# Open MPI 4 ends where it finds no ssh, as in most containers, though nothing is started on another host here.
export OMPI_MCA_plm_rsh_agent="${OMPI_MCA_plm_rsh_agent:-/bin/true}"
# osc ^ucx: without UCX hardware each rank prints an error line. bind-to none: ranks may outnumber cores.
flags=(--oversubscribe --bind-to none --mca osc '^ucx')
if ((EUID == 0)); then
  flags+=(--allow-run-as-root)
fi
launch "$bin/mpirun" "${flags[@]}" -n "$ranks" "$bin/python" -m dcp_decode "$@"
