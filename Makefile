# `make run` and `make test` do all the set-up: one .venv from constraints.txt. Needs python3 (3.11 or 3.12) with venv.

SHELL := /bin/bash
CONFIG ?= configs/smoke.toml
GPUS ?= 8
WORKERS ?= 2
GPU_WORKERS ?= 8
MINUTES ?= 10

# The first Python that runs and is of an allowed version (a pyenv shim may exist and still not run).
PYTHON ?= $(shell for name in python3 python3.12 python3.11; do \
	$$name -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& { echo $$name; break; }; done)
VENV := .venv/bin
INSTALLED := .venv/installed

.PHONY: install run test check protocol soak bench-cpu test-gpu test-multigpu clean

install: $(INSTALLED)

run: $(INSTALLED)
	$(VENV)/dcp-decode run $(CONFIG)

test: check
	$(VENV)/python -m pytest -m "not gpu and not multigpu" -n $(WORKERS) --dist loadgroup

check: $(INSTALLED)
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/shellcheck launch/*.sh launch/*.sbatch .ci/run

protocol: $(INSTALLED)
	$(VENV)/python -m dcp_decode.protocol --json results/protocol.json

soak: $(INSTALLED)
	$(VENV)/dcp-decode soak configs/soak.toml --minutes $(MINUTES) --output results/soak.json

bench-cpu: $(INSTALLED)
	$(VENV)/python -m dcp_decode.checkpoint.cpu

test-gpu: $(INSTALLED)
	$(VENV)/python -m pytest -m "gpu and not alone" -n $(GPU_WORKERS) tests/gpu
	$(VENV)/python -m pytest -m "gpu and alone" tests/gpu

test-multigpu: $(INSTALLED)
	$(VENV)/torchrun --standalone --nproc-per-node $(GPUS) -m pytest -m multigpu

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 with venv found; set PYTHON=..." >&2; exit 2; }
	test -x $(VENV)/python || $(PYTHON) -m venv .venv
	$(VENV)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gpu,mpi,report,dev]'
	touch $@

clean:
	rm -rf .venv build artifacts *.egg-info .pytest_cache .mypy_cache .ruff_cache
