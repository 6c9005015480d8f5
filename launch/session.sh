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

# Several nodes: start the script once on each, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT (as of torchrun)
# and DCP_DECODE_RECORDS, a new folder that all nodes share. Node 0 reports, all return the same code.
nodes=${NNODES:-1}
node=${NODE_RANK:-0}

# prepare LAUNCHER ARGUMENTS...: sets `ranks`; ends the script (exit 2) if the arguments or the config are bad.
prepare() {
  local launcher=$1
  shift
  if (($# == 0)); then
    echo "usage: launch/$launcher.sh run [CONFIG] [OPTIONS]" >&2
    exit 2
  fi
  if ((nodes == 1)); then
    DCP_DECODE_RECORDS=$(mktemp -d)
    trap 'rm -rf "$DCP_DECODE_RECORDS"' EXIT
  else
    local name
    for name in DCP_DECODE_RECORDS MASTER_ADDR MASTER_PORT; do
      if [[ -z "${!name:-}" ]]; then
        echo "error: $name is not set, but NNODES is $nodes: see launch/session.sh" >&2
        exit 2
      fi
    done
    mkdir -p "$DCP_DECODE_RECORDS"
    if compgen -G "$DCP_DECODE_RECORDS/rank-*.json" >/dev/null; then
      echo "error: DCP_DECODE_RECORDS = $DCP_DECODE_RECORDS: has records of another run; give a new folder" >&2
      exit 2
    fi
  fi
  plan=$DCP_DECODE_RECORDS
  if ((node > 0)); then
    plan=$(mktemp -d) # the plan of node 0 counts
    trap 'rm -rf "$plan"' EXIT
  fi
  ranks=$("$bin/python" -m dcp_decode "$@" --prepare "$plan" --launcher "$launcher") || exit $?
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
  local options=()
  if ((nodes > 1)); then
    options+=(--patience 10) # other nodes' records come through a shared file system
  fi
  if ((node > 0)); then
    options+=(--silent)
  fi
  "$bin/python" -m dcp_decode conclude "$DCP_DECODE_RECORDS" "${options[@]}" || code=$?
  exit "$code"
}
