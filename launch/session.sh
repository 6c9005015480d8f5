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

# refuse MESSAGE: ends the script as the contract says of bad input.
refuse() {
  echo "error: $1" >&2
  exit 2
}

# require_integer NAME VALUE LEAST MOST
require_integer() {
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || (($2 < $3 || $2 > $4)); then
    refuse "$1 = '$2': must be an integer in $3 .. $4"
  fi
}

# prepare LAUNCHER ARGUMENTS...: sets `ranks`; ends the script (exit 2) if the arguments or the config are bad.
prepare() {
  local launcher=$1
  shift
  case ${1:-} in
    run | checkpoint | doctor) ;;
    *)
      echo "usage: launch/$(basename "$0") run|checkpoint|doctor [CONFIG] [OPTIONS]" >&2
      exit 2
      ;;
  esac
  require_integer NNODES "$nodes" 1 999999
  require_integer NODE_RANK "$node" 0 "$((nodes - 1))"
  if ((nodes == 1)); then
    DCP_DECODE_RECORDS=$(mktemp -d) || exit 2
    trap 'rm -rf "$DCP_DECODE_RECORDS"' EXIT
  else
    local name
    for name in DCP_DECODE_RECORDS MASTER_ADDR MASTER_PORT; do
      if [[ -z "${!name:-}" ]]; then
        refuse "$name is not set, but NNODES is $nodes: see launch/session.sh"
      fi
    done
    require_integer MASTER_PORT "$MASTER_PORT" 1 65535
    mkdir -p "$DCP_DECODE_RECORDS" || exit 2
    if compgen -G "$DCP_DECODE_RECORDS/rank-*.json" >/dev/null; then
      refuse "DCP_DECODE_RECORDS = $DCP_DECODE_RECORDS: has records of another run; give a new folder"
    fi
  fi
  plan=$DCP_DECODE_RECORDS
  if ((node > 0)); then
    plan=$(mktemp -d) || exit 2 # the plan of node 0 counts
    trap 'rm -rf "$plan"' EXIT
  fi
  ranks=$("$bin/python" -m dcp_decode "$@" --prepare "$plan" --launcher "$launcher") || exit $?
  if [[ ! -s $plan/plan.json ]]; then # --help
    echo "$ranks"
    exit 0
  fi
  export DCP_DECODE_RECORDS ranks
}

# launch COMMAND...: runs it, hands on a signal to it, then ends the script with the contract's exit code.
launch() {
  local child code=0 options=()
  "$@" &
  child=$!
  trap 'options=(--stopped); kill -TERM "$child" 2>/dev/null || true' INT TERM HUP
  while kill -0 "$child" 2>/dev/null; do
    wait "$child" || true # returns early when a trap ran
  done
  if ((nodes > 1)); then
    options+=(--patience 10) # other nodes' records come through a shared file system
  fi
  if ((node > 0)); then
    options+=(--silent)
  fi
  "$bin/python" -m dcp_decode conclude "$DCP_DECODE_RECORDS" "${options[@]}" || code=$?
  exit "$code"
}
