# Everything a newcomer types. `make` alone lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# One thread per test process: tiny tensors run slower on more.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup demo test check verify bench gpu-check test-engine wheel clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with the tested versions (nothing to do when it is there)

demo: $(READY)  ## train, export, decode and report on SmolLM2-135M: runs/demo/report.html, about 15 minutes on 2 cores
	$(BIN)/python -m serve_eval task=demo run_dir=runs/demo

test: $(READY)  ## the whole test suite
	$(ONE_THREAD) $(BIN)/python -m pytest

check: $(READY)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

verify: $(READY)  ## prove on the real target that the decode is lossless, token for token
	$(BIN)/python -m serve_eval task=verify

bench: $(READY)  ## measure speed and memory, the physical limits beside: bench/results/, under 15 minutes
	$(BIN)/python -m bench

gpu-check:  ## what only a CUDA GPU can show, under 8 minutes; needs PyTorch, transformers and lightning, no setup
	$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) -m bench.gpu_check --out runs/gpu-check.json

test-engine: $(READY)  ## install vLLM, llama.cpp and OpenVINO (6 GB, once) and run exports in them
	$(BIN)/python -m engines setup all
	$(BIN)/python -m pytest -m engine

wheel: $(READY)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## remove what the tools leave behind (not .venv, not runs)
	rm -rf dist build .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# torch first and by itself: an index that offers a CPU build of this version serves it here.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) must be Python 3.11 or newer; try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
