# make train   set up, build, and run the demonstration: two ranks against one process (about a minute)
# make test    set up, build, lint, and run every test (C under sanitizers, then Python)
# make emulator  run the CUDA kernels on the host emulator; no CUDA toolkit needed
# make cuda    compile the CUDA kernels too, with the nvcc of CUDA_HOME or PATH; needs no GPU
# make lint    clang-format, ruff, mypy
# make setup   .venv with everything that constraints.txt pins
# make clean   remove what a build leaves behind
PYTHON ?= python3
BIN := .venv/bin
CORE := $(wildcard csrc/*.[ch] csrc/*.cpp csrc/*/*.[ch])
PIP := $(BIN)/pip --disable-pip-version-check --quiet
NVCC := $(or $(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc))
LOCK := mkdir -p build && flock build/.lock

.PHONY: setup build cuda train test lint clean ctest emulator
setup: .venv/.ready
build: build/.built
cuda: build/.cuda

.venv/.ready: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -r constraints.txt
	touch $@

build/.built: .venv/.ready setup.py pyproject.toml $(CORE)
	$(LOCK) env RINGTILE_CUDA=0 $(PIP) install --no-build-isolation --no-deps -e .
	touch $@

build/.cuda: build/.built $(wildcard cuda/*.* cuda/*/*.*)
	$(LOCK) env RINGTILE_CUDA=1 $(BIN)/python setup.py -q build_clib build_ext --inplace
	touch $@

train: build
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m ringtile train configs/tiny_cpu.yaml \
		--compare --json out/train.json --plot out/loss.png

ctest:
	$(MAKE) -C tests/c

emulator:
	$(MAKE) -C tests/emulator

test: build $(if $(NVCC),cuda) lint ctest emulator
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'c*/*.[ch]' '*.cpp' '*.cu' '*.cuh' 'tests/*.[ch]')
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build out python/ringtile/*.so python/*.egg-info
