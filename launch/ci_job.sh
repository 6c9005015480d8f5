#!/usr/bin/env bash
# launch/ci_job.sh [CONFIG] [OPTIONS]: a whole CI job of a cluster, one exit code, everything it found in $ARTIFACTS.
# --help lists the stages and options; every option is a variable too (ARTIFACTS, DEVICE, STAGES, INJECT, ...).
# Several nodes: start it once on each, with the variables of launch/session.sh; launch/slurm.sbatch does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ! -x .venv/bin/python ]]; then
  echo "error: no $PWD/.venv/bin/python: run make first" >&2
  exit 2
fi
exec .venv/bin/python -m dcp_decode ci-job "$@"
