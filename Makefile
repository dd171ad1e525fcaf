# The environment of everything is .venv, made on first use.
#
#   make demo          train a small GPT in full precision and with presets int8 and int4: 90 seconds after the install;
#                      DEMO=--long: a larger model, about 6 minutes; DEMO="--tp 4 --bits 8,6": flash-allreduce demo --help
#                      PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu: the CPU build of torch, a tenth of the download
#   make test          the product: every collective on ranks, a training with each framework; OPTIONS="-k hook": of pytest
#   make test-all      every test that is not slow: half an hour
#   make test-changed  the tests of the files that differ from main, and the gates
#   make lint          ruff, mypy, clang-format
#   make format        the same tools, which mend the files
#   make bench         measure the tables of the docs and write them there (the links need root);
#                      BENCH="--only codec sizes": these; python -m scripts.make_benchmarks --help
#   make gpu-check     on a machine with a GPU, with its own python3 and torch: build, test and measure; no network needed;
#                      GPU="--quick": python -m scripts.gpu_check --help (docs/trust/cuda.md)
#   make clean         remove .venv and everything that was built
#   make help          this, and the sessions of nox: other releases, other programs, packages, fuzzing, CUDA

PYTHON ?= python3
VENV ?= .venv
# The CPU build of the package index; any torch >= 2.11 serves: make demo TORCH="torch==2.12.*"
TORCH ?= torch==2.13.0
DEEPSPEED ?= 0.19.8
DEMO ?=
BENCH ?=
OPTIONS ?=
# Where gpu-check leaves gpu_check.json and log.txt, and its options.
GPU_OUT ?= build/gpu-check
GPU ?=

# A test starts hundreds of processes, and each of them would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/*)
FORMATTED := $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/*.h csrc/cpu/*.cpp csrc/cuda/* tests/host/* tests/ptx/*.h tests/ptx/*.cpp tests/fuzz/*.h tests/fuzz/*.cpp)

.PHONY: help demo test test-all test-changed lint format bench gpu-check installed deepspeed clean

help: $(VENV)/.tools
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile
	@$(BIN)/nox --list
	@echo "To run one: $(BIN)/nox -s NAME"

demo: $(VENV)/.installed
	@echo "[4/4] training a small GPT on two ranks: 90 seconds on two cores (DEMO=--long: 6 minutes)"
	@$(BIN)/flash-allreduce demo $(DEMO)

test: deepspeed
	$(BIN)/python -m pytest -m "not slow and not thorough" $(OPTIONS)

test-all: deepspeed
	$(BIN)/python -m pytest -m "not slow" $(OPTIONS)

test-changed: deepspeed
	@tests=$$($(BIN)/python -m scripts.changed_tests) && $(BIN)/python -m pytest -m "not slow" $(OPTIONS) $$tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

bench: deepspeed
	$(BIN)/python -m scripts.make_benchmarks $(BENCH)

gpu-check:
	$(PYTHON) -m scripts.gpu_check --out $(GPU_OUT) $(GPU)

installed: $(VENV)/.installed

deepspeed: $(VENV)/.deepspeed-$(DEEPSPEED)

$(VENV)/.tools:
	@echo "[1/4] making a virtual environment in $(VENV), with pip, setuptools, ninja and nox: half a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel ninja nox
	@touch $@

$(VENV)/.torch: $(VENV)/.tools
	@echo "[2/4] installing $(TORCH) and numpy: a minute for the CPU build (200 MB), longer for a CUDA build (3 GB;"
	@echo "      make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes the CPU build)"
	@$(BIN)/python -m pip install --quiet "$(TORCH)" numpy
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	@echo "[3/4] compiling the C++ codec, installing the plugin with megatron-core and tools: two minutes"
	@$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[cli,megatron,dev]"
	@touch $@

# The demo need not wait for it. It has no wheel; with DS_BUILD_OPS=0 it compiles nothing now.
$(VENV)/.deepspeed-$(DEEPSPEED): | $(VENV)/.installed
	@echo "[4/4] installing DeepSpeed $(DEEPSPEED): half a minute"
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation "deepspeed==$(DEEPSPEED)"
	@touch $@

clean:
	rm -rf $(VENV) .nox build dist *.egg-info flash_allreduce_plugin/_C*.so flash_allreduce_plugin/_cuda.so
