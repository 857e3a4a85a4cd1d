# make train   set up, build, and run the demonstration: two ranks against one process (two minutes)
# make test    set up, build, lint, and test: C under sanitizers, Python (6 to 13 minutes on two cores)
# make test-cuda  test the CUDA kernels on the host emulator, and what nvcc makes of them where it is installed (3 to 8 minutes)
# make test-all  both with the long tests too, and CUDA kernels for every architecture (an hour)
# make test-isa  the tests of kernels with every instruction set, in C where the CPU lacks it; ISAS="avx512 amx_bf16"
# make mutants   break one line of the product at a time, drop one barrier of the CUDA kernels, and show that a test goes
#              red (an hour)
# make faults    hostile trials by the thousand, counted in one table: kills, fuzzed calls, malformed files (ten
#              minutes); `cd tests/campaigns && python -m faults --trials N MODULE` for more of one kind;
#              `make test` makes a few hundred
# make tsan    run every threaded kernel under the thread sanitizer; by hand
# make aarch64  cross-compile the C core for aarch64, and run its tests under qemu; by hand, skips what is missing
# make emulator  run the CUDA kernels on the host emulator; no CUDA toolkit needed
# make cuda    compile the CUDA kernels too, with the nvcc of CUDA_HOME, PATH or /usr/local/cuda; needs no GPU
# make lint    clang-format, ruff, mypy
# make wheel   the sdist and, from it alone, the wheel for any Linux with glibc 2.28, checked by auditwheel: dist/
# make matrix  the wheel with each torch, Python and library that it supports, one fresh venv each; writes the table of
#              docs/guide/versions.md (an hour, gigabytes; `make matrix ROWS="0 2"` tries these rows of matrix.py,
#              ROWS="2 transformers==5.25.0" one with a new release, before the extra dev allows it)
# make try-wheel  the wheel in a fresh venv, without a compiler: README's first script and demonstration (minutes)
# make docs    build the documentation site into build/site, in a venv of its own (build/docs-venv); Python >= 3.11
# make setup   .venv with everything that constraints.txt pins; TORCH=2.15 with another torch
# make clean   remove the build outputs
PYTHON ?= python3
BIN := .venv/bin
CORE := $(wildcard csrc/*.[ch] csrc/*/*.[ch] csrc/*/*.inc csrc/torch/*.cpp)
PIP := $(BIN)/pip --disable-pip-version-check --quiet
NVCC := $(or $(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
LOCK := mkdir -p build && flock build/.lock
# Here every compiler warning fails the build; a user's pip install only prints it.
STRICT := RINGTILE_WERROR=1
CUDA := .venv/.ready setup.py pyproject.toml $(CORE) $(shell find cuda -name '*.*' -type f)
JOBS := -j2
ALL := $(filter all,$(RINGTILE_TESTS))

.PHONY: setup build cuda train test test-cuda test-isa test-all checks cuda-checks pytest pytest-nvcc mutants faults lint clean ctest tsan aarch64 emulator docs wheel try-wheel matrix
setup: .venv/.ready
build: build/.built
cuda: build/.cuda

# To compile all 14,000 modules takes as long as to install them; Python compiles those that it imports, and keeps them.
unexport PYTHONDONTWRITEBYTECODE
.venv/.ready: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install --no-compile -r constraints.txt
	$(if $(TORCH),$(PIP) install --no-compile "torch==$(TORCH).*")
	touch $@

build/.built: .venv/.ready setup.py pyproject.toml $(CORE)
	$(LOCK) env $(STRICT) RINGTILE_CUDA=0 $(PIP) install --no-build-isolation --no-deps -e .
	touch $@

# On a fresh clone one pip install builds everything; later only changed files are compiled.
BUILD_CUDA = if [ -e build/.built ]; then $(BIN)/python setup.py -q build_clib build_ext --inplace; \
	else $(PIP) install --no-build-isolation --no-deps -e . && touch build/.built; fi

build/.cuda: $(CUDA)
	$(LOCK) env $(STRICT) RINGTILE_CUDA=1 sh -c '$(BUILD_CUDA)'
	touch $@ build/.cuda_one

# Kernels for one architecture, which compile in a third of the time.
build/.cuda_one: $(CUDA)
	$(LOCK) env $(STRICT) RINGTILE_CUDA=1 RINGTILE_CUDA_ARCHS=one sh -c '$(BUILD_CUDA)'
	rm -f build/.cuda
	touch $@

train: build
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m ringtile train configs/tiny_cpu.yaml \
		--compare --json out/train.json

ctest:
	$(MAKE) -s $(JOBS) -C tests/c

tsan:
	$(MAKE) -s $(JOBS) -C tests/c SANITIZER=thread

aarch64:
	@if ! command -v aarch64-linux-gnu-gcc > /dev/null; then \
		echo "aarch64: skipped; aarch64-linux-gnu-gcc is not installed (Debian: gcc-aarch64-linux-gnu)"; \
	elif ! command -v qemu-aarch64-static qemu-aarch64 > /dev/null; then \
		echo "aarch64: compiled only; qemu-aarch64 is not installed (Debian: qemu-user-static)"; \
		$(MAKE) -s $(JOBS) -C tests/c TARGET=aarch64 build; \
	else \
		$(MAKE) -s $(JOBS) -C tests/c TARGET=aarch64; \
	fi

emulator:
	$(MAKE) -s $(JOBS) -C tests/emulator

# The C tests need nothing that setup installs.
test:
	+$(MAKE) --no-print-directory -j4 JOBS= checks

test-cuda: build
	+$(MAKE) --no-print-directory $(JOBS) JOBS= cuda-checks

test-all:
	+RINGTILE_TESTS=all $(MAKE) --no-print-directory test
	+RINGTILE_TESTS=all $(MAKE) --no-print-directory test-cuda

# The package with AVX-512 and AMX in C, for any CPU with AVX2: its own binary beside links to python/ringtile.
MODEL := $(CURDIR)/tests/c/isa_model.h
build/.isa: build/.built $(MODEL)
	$(if $(filter $(MODEL),$?),rm -rf build/isa)
	$(LOCK) env RINGTILE_CUDA=0 CFLAGS="-Wno-psabi '-DRT_ISA_MODEL=\"$(MODEL)\"'" $(BIN)/python setup.py -q \
		build_clib --build-clib build/isa --build-temp build/isa build_ext --build-temp build/isa --build-lib build/isa/python
	touch $@

ISAS := generic avx2 avx512 avx512_bf16 amx_bf16
test-isa: build/.isa
	@ln -sfn $(filter-out %.so %__pycache__,$(wildcard $(CURDIR)/python/ringtile/*)) build/isa/python/ringtile
	@for isa in $(ISAS); do export RINGTILE_CPU_ISA=$$isa; unset PYTHONPATH; echo "test-isa: $$isa"; \
		$(BIN)/python -c "from ringtile import ops; ops.cpu_isa()" 2> /dev/null || export PYTHONPATH=$(CURDIR)/build/isa/python; \
		$(PYTEST) -m pytest tests/attn tests/recurrent tests/tiled || exit 1; done

checks: ctest build lint pytest

cuda-checks: pytest-nvcc emulator

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python
CELLS := $(if $(ALL),-m 'not nvcc')

pytest: build
	$(PYTEST) tests/parts.py $(CELLS)

pytest-nvcc: build $(if $(NVCC),$(if $(ALL),cuda,build/.cuda_one))
	$(if $(NVCC),$(PYTEST) -m pytest -m nvcc $(shell grep -lw 'nvcc' tests/*/test_*.py),@echo "test-cuda: nvcc is not installed; the emulator alone runs")

mutants: build
	$(BIN)/python -u tests/campaigns/mutants.py
	$(BIN)/python -u tests/campaigns/cuda_barriers.py

faults: build
	cd tests/campaigns && ../../$(BIN)/python -m faults

docs: build/docs-venv/.ready
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --quiet

build/docs-venv/.ready: docs/requirements.txt
	$(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/pip --disable-pip-version-check --quiet install -r docs/requirements.txt
	touch $@

# The oldest glibc that the wheel runs on: torch's own. auditwheel fails if the binaries need a newer one.
GLIBC := 2.28
POLICY := manylinux_$(subst .,_,$(GLIBC))_$(shell uname -m)
TORCH_LIBRARIES := libc10.so libtorch.so libtorch_cpu.so # torch brings them
AUDITWHEEL := PATH="$(CURDIR)/build/wheel-venv/bin:$$PATH" auditwheel

# The wheel is built again when a file of it has changed, or RINGTILE_CUDA.
WITH_CUDA := $(or $(RINGTILE_CUDA),$(if $(NVCC),1,0))
WHEEL := build/.wheel-$(WITH_CUDA)
wheel: $(WHEEL)

$(WHEEL): build/wheel-venv/.ready $(CUDA) MANIFEST.in README.md tools/wheel/older_glibc.py $(shell find python -name '*.py')
	rm -rf dist build/wheel build/.wheel-*
	$(BIN)/python setup.py -q sdist -d dist
	flags=$$($(BIN)/python tools/wheel/older_glibc.py build/wheel/glibc $(GLIBC)) && \
		env $(STRICT) RINGTILE_CUDA=$(WITH_CUDA) LDFLAGS="$$flags" \
		$(PIP) wheel --no-build-isolation --no-deps -w build/wheel dist/*.tar.gz
	$(AUDITWHEEL) repair --strip --plat $(POLICY) $(TORCH_LIBRARIES:%=--exclude %) -w dist build/wheel/*.whl || \
		{ $(AUDITWHEEL) show build/wheel/*.whl; exit 1; } # names the symbols that are too new
	du -h dist/*
	touch $@

build/wheel-venv/.ready: tools/wheel/requirements.txt
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/pip --disable-pip-version-check --quiet install -r tools/wheel/requirements.txt
	touch $@

try-wheel: wheel
	$(PYTHON) tools/wheel/try_wheel.py dist/*.whl build/try-wheel

matrix: wheel
	PATH="$$PATH:$(CURDIR)/build/wheel-venv/bin" $(PYTHON) tools/wheel/matrix.py dist/*.whl build/matrix $(ROWS)

lint: setup
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'c*/*.[ch]' '*.inc' 'benchmarks/*.c' '*.cpp' '*.cu' '*.cuh' 'tests/*.[ch]')
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist out python/ringtile/*.so python/*.egg-info
