# Shared by torchrun.sh and mpirun.sh; sourced, never run. The launcher's own exit code says little, so the ranks'
# records decide: `--prepare` validates the command line and leaves the plan, `conclude` judges the records after.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin="$root/.venv/bin"
if [[ ! -x "$bin/python" ]]; then
  echo "error: no $bin/python: run make first" >&2
  exit 2
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# One thread a rank: eight share the machine, and torchrun warns if the variable is unset.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# prepare LAUNCHER ARGUMENTS...: sets `ranks`; ends the script (exit 2) if the arguments or the config are bad.
prepare() {
  local launcher=$1
  shift
  if (($# == 0)); then
    echo "usage: launch/$launcher.sh run [CONFIG] [OPTIONS]" >&2
    exit 2
  fi
  DCP_DECODE_RECORDS=$(mktemp -d)
  trap 'rm -rf "$DCP_DECODE_RECORDS"' EXIT
  ranks=$("$bin/python" -m dcp_decode "$@" --prepare "$DCP_DECODE_RECORDS" --launcher "$launcher") || exit $?
  export DCP_DECODE_RECORDS ranks
}

# launch COMMAND...: runs it, hands on a signal to it, then ends the script with the contract's exit code.
launch() {
  local child code=0
  "$@" &
  child=$!
  trap 'kill -TERM "$child" 2>/dev/null || true' INT TERM HUP
  while kill -0 "$child" 2>/dev/null; do
    wait "$child" || true # returns early when a trap ran
  done
  "$bin/python" -m dcp_decode conclude "$DCP_DECODE_RECORDS" || code=$?
  exit "$code"
}
