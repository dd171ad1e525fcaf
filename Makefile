# Everything runs in a virtual environment of its own, made on first use.
#
#   make demo        train a small GPT in full precision, INT8 and INT4, and compare: about 70 seconds after the install;
#                    DEMO=--long: a larger model, about 6 minutes; DEMO="--tp 4 --bits 8,6": flash-allreduce demo --help
#                    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu: the CPU build of torch, a tenth of the download
#   make test        the tests, those with megatron-core and with DeepSpeed too (about half an hour on two cores)
#   make lint        ruff, mypy, clang-format
#   make test-slow   what takes minutes or many GiB
#   make test-older  the Megatron tests on an older megatron-core: make test-older MEGATRON=0.14.0
#   make test-deepspeed   the DeepSpeed tests alone, on any release: make test-deepspeed DEEPSPEED=0.17.6
#   make test-hf     the examples of DeepSpeed and the Trainer, and Accelerate: installs transformers and accelerate, minutes
#   make test-programs   programs of others, unmodified, served by FLASH_ALLREDUCE_ATTACH: installs transformers, accelerate,
#                    lightning and torchtitan (with triton, which it imports: 1 GB); takes the rest from TRANSFORMERS_PATH,
#                    ACCELERATE_PATH, NANOGPT_PATH, PYTORCH_PATH=<checkout> or from GitHub, or says what it has skipped; an hour
#   make test-upstream-deepspeed   DeepSpeed's own tests with the plugin and without, from DEEPSPEED_PATH=<checkout>
#   make check-versions   whether every seam fits every supported megatron-core and DeepSpeed (downloads the wheels and
#                         the sources, imports none); VERSIONS="0.13.0 0.19.2" DEEPSPEED_VERSIONS="0.19.8": these only
#   make check-cuda  compiles the CUDA library for every architecture and checks spills, registers, symbols and the instructions
#                    of the main kernels; no GPU needed
#   make check-ptx   nvcc's PTX of the kernels and their launches, run on the CPU against the CPU codec, a part of the cases
#                    (PTX= PTX_EVERY=1: all, minutes, as test-slow does it); no GPU needed; PTX_ARCHITECTURE=80: that generation's
#   make fuzz        the codec with any bytes under AddressSanitizer and UBSan, the library too, and what parses text
#                    (docs/inside/testing.md); FUZZ_SECONDS=3600, or FUZZ_RUNS=10000000 executions; FUZZ="codec": only that
#   make fuzz-check  the codec and its CUDA text for seconds, three of the widths, as CI does it
#   make gpu-check   on a machine with a GPU, with its own python3 and torch: builds, tests and measures; no network
#                    needed; GPU="--quick", GPU="--wheels FOLDER": python -m scripts.gpu_check --help (docs/trust/cuda.md)
#   make package     the sdist and the wheel, into dist/: built, checked, each installed into an empty environment and tested
#   make package-cuda  a wheel with the CUDA library for H100, compiled against a CUDA build of torch for Python 3.12 and
#                    imported without a GPU: ten minutes, 5 GB; PACKAGE_CUDA="--architectures 8.0": python -m scripts.package_cuda --help
#   make matrix      that wheel with other Pythons, releases of torch and of the frameworks, into the table of docs/trust/releases.md:
#                    downloads gigabytes; MATRIX="--cells 3.12:2.11.0": python -m scripts.support_matrix --help
#   make soak        100,000 random collectives and sends, 5,000 steps each with Megatron, DeepSpeed, DDP and FSDP2: wrong results,
#                    drift, hangs and memory (an hour or two on two cores); into SOAK_OUT (docs/trust/reliability.md)
#   make bench       measures the tables of docs/decide/benchmarks.md and docs/decide/accuracy.md and writes them there (the links need
#                    root); BENCH="--only codec sizes": these; python -m scripts.make_benchmarks --help

PYTHON ?= python3
VENV ?= .venv
# The CPU build of the package index; any torch >= 2.11 serves: make demo TORCH="torch==2.12.*"
TORCH ?= torch==2.13.0
DEMO ?=
BENCH ?=
# An older release, for test-older; the one for test and test-deepspeed; every release of the windows, for check-versions.
MEGATRON ?= 0.13.1
DEEPSPEED ?= 0.19.8
# For test-hf, with that DeepSpeed, and for test-programs.
TRANSFORMERS ?= 5.23.0
ACCELERATE ?= 1.15.0
# For test-programs.
LIGHTNING ?= 2.6.6
DATASETS ?= 5.2.0
EVALUATE ?= 0.4.6
TORCHTITAN ?= 0.2.2
# For check-cuda and check-ptx where there is no nvcc.
NVCC_WHEELS := "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-nvvm==13.0.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*"
# For check-cuda where there is no nvdisasm; its options: CUDA=--write writes the table of docs/trust/cuda.md.
NVDISASM_WHEEL := "nvidia-cuda-nvdisasm==13.*"
CUDA ?=
# Of check-ptx: which tests, and of widths, group sizes and dtypes, crossed, every which one.
PTX ?= -m "not slow"
PTX_EVERY ?= 37
VERSIONS ?=
DEEPSPEED_VERSIONS ?=
# Of pytest, for test, test-older and test-deepspeed.
OPTIONS ?=
# Of make fuzz: how long each program runs, or how often; what; examples of each test; the compiler.
FUZZ_SECONDS ?= 300
FUZZ_RUNS ?=
FUZZ ?=
FUZZ_EXAMPLES ?= 5000
FUZZ_CXX ?=
# Where gpu-check leaves gpu_check.json and log.txt, and its options.
GPU_OUT ?= build/gpu-check
GPU ?=
# Options of support_matrix, and of package_cuda.
MATRIX ?=
PACKAGE_CUDA ?=
# Where soak leaves its results.
SOAK_OUT ?= build/soak

BIN := $(VENV)/bin
OLDER := $(abspath $(VENV))/megatron-core-$(MEGATRON)
DEEPSPEED_SITE := $(abspath $(VENV))/deepspeed-$(DEEPSPEED)
HF_SITE := $(abspath $(VENV))/transformers-$(TRANSFORMERS)-accelerate-$(ACCELERATE)
PROGRAMS_SITE := $(abspath $(VENV))/programs-$(TRANSFORMERS)-$(ACCELERATE)-$(LIGHTNING)-$(DATASETS)-$(EVALUATE)-$(TORCHTITAN)
NVCC_SITE := $(abspath $(VENV))/cuda
NVDISASM_SITE := $(abspath $(VENV))/nvdisasm
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/*)
FORMATTED := $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/*.h csrc/cpu/*.cpp csrc/cuda/* tests/host/* tests/ptx/*.h tests/ptx/*.cpp tests/fuzz/*.h tests/fuzz/*.cpp)

.PHONY: demo test test-slow test-older test-deepspeed test-hf test-programs test-upstream-deepspeed lint format bench soak check-versions check-cuda check-ptx gpu-check fuzz fuzz-check package package-cuda matrix clean

demo: $(VENV)/.installed
	@echo "[4/4] training a small GPT on two ranks: about 70 seconds on two cores (DEMO=--long: 6 minutes)"
	@$(BIN)/flash-allreduce demo $(DEMO)

test: $(VENV)/.installed $(DEEPSPEED_SITE)
	PYTHONPATH=$(DEEPSPEED_SITE) $(BIN)/python -m pytest -m "not slow" $(OPTIONS)

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow
	$(MAKE) check-ptx PTX= PTX_EVERY=1
	PTX_ARCHITECTURE=80 $(MAKE) check-ptx PTX_EVERY=11

# The older release stands before the installed one on the path. MEGATRON_LM_PATH brings a megatron-core of its own.
# Left out: what is of Megatron-LM's training package, which no release of megatron-core has.
test-older: $(VENV)/.installed $(OLDER)
	PYTHONPATH=$(OLDER) $(BIN)/python -W ignore -c "import megatron.core as m; \
		assert m.__version__ == '$(MEGATRON)', m.__file__; print('megatron-core', m.__version__, m.__file__)"
	PYTHONPATH=$(OLDER) MEGATRON_LM_PATH= $(BIN)/python -m pytest -m "not slow" tests/integrations/megatron \
		$(patsubst %,--ignore=tests/integrations/megatron/test_%.py,launch monitor checkpoints) $(OPTIONS)

test-deepspeed: $(VENV)/.installed $(DEEPSPEED_SITE)
	PYTHONPATH=$(DEEPSPEED_SITE) $(BIN)/python -W ignore -c "from importlib.metadata import version; import deepspeed; \
		assert version('deepspeed') == '$(DEEPSPEED)', deepspeed.__file__; print('deepspeed', deepspeed.__file__)"
	PYTHONPATH=$(DEEPSPEED_SITE) $(BIN)/python -m pytest -m "not slow" tests/integrations/deepspeed $(OPTIONS)

test-hf: $(VENV)/.installed $(DEEPSPEED_SITE) $(HF_SITE)
	PYTHONPATH=$(DEEPSPEED_SITE):$(HF_SITE) $(BIN)/python -m pytest \
		tests/integrations/deepspeed/test_deepspeed_examples.py tests/integrations/deepspeed/test_accelerate.py

test-programs: $(VENV)/.installed $(PROGRAMS_SITE)
	PYTHONPATH=$(PROGRAMS_SITE) $(BIN)/python -m pytest tests/programs $(OPTIONS)

test-upstream-deepspeed: $(VENV)/.installed $(DEEPSPEED_SITE)
	PYTHONPATH=$(DEEPSPEED_SITE) $(BIN)/python -m pytest -s tests/integrations/deepspeed/test_deepspeed_upstream.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

bench: $(VENV)/.installed $(DEEPSPEED_SITE)
	PYTHONPATH=$(DEEPSPEED_SITE) $(BIN)/python -m scripts.make_benchmarks $(BENCH)

soak: $(VENV)/.installed $(DEEPSPEED_SITE)
	mkdir -p $(SOAK_OUT)
	$(BIN)/python -m lab.benchmarks.handshake --json $(SOAK_OUT)/handshake.json
	$(BIN)/python -m lab.soak collectives --json $(SOAK_OUT)/soak-collectives.json
	$(BIN)/python -m lab.soak megatron --json $(SOAK_OUT)/soak-megatron.json
	PYTHONPATH=$(DEEPSPEED_SITE) $(BIN)/python -m lab.soak deepspeed --json $(SOAK_OUT)/soak-deepspeed.json
	$(BIN)/python -m lab.soak ddp --json $(SOAK_OUT)/soak-ddp.json
	$(BIN)/python -m lab.soak fsdp --json $(SOAK_OUT)/soak-fsdp.json

check-versions: $(VENV)/.installed
	$(BIN)/python -m scripts.check_megatron_versions --wheels $(VENV)/wheels $(VERSIONS)
	$(BIN)/python -m scripts.check_deepspeed_versions --archives $(VENV)/archives $(DEEPSPEED_VERSIONS)

FOUND_NVCC = command -v nvcc || test -d $(NVCC_SITE) || $(BIN)/python -m pip install --quiet --target $(NVCC_SITE) $(NVCC_WHEELS)
WITH_NVCC = NVCC=$$(command -v nvcc || echo $(NVCC_SITE)/nvidia/cu13/bin/nvcc)

FOUND_NVDISASM = command -v nvdisasm || test -d $(NVDISASM_SITE) || $(BIN)/python -m pip install --quiet --target $(NVDISASM_SITE) $(NVDISASM_WHEEL)

check-cuda: $(VENV)/.installed
	$(FOUND_NVCC)
	$(FOUND_NVDISASM)
	$(WITH_NVCC) NVDISASM=$$(command -v nvdisasm || echo $(NVDISASM_SITE)/nvidia/cu13/bin/nvdisasm) \
		$(BIN)/python -m scripts.check_cuda $(CUDA)

check-ptx: $(VENV)/.installed
	$(FOUND_NVCC)
	$(WITH_NVCC) GPU_TESTS_ON=ptx GPU_TESTS_EVERY=$(PTX_EVERY) \
		$(BIN)/python -m pytest $(PTX) tests/ptx tests/gpu/test_gpu_codec.py $(OPTIONS)

package: $(VENV)/.installed
	$(BIN)/python -m scripts.package

package-cuda: $(VENV)/.installed
	$(FOUND_NVCC)
	$(WITH_NVCC) $(BIN)/python -m scripts.package_cuda $(PACKAGE_CUDA)

matrix: $(VENV)/.installed
	test -n "$(wildcard dist/*.whl)" || $(BIN)/python -m scripts.package
	$(BIN)/python -m scripts.support_matrix $(MATRIX)

FUZZING = $(BIN)/python -m scripts.fuzz $(FUZZ) $(if $(FUZZ_CXX),--compiler $(FUZZ_CXX))

fuzz: $(VENV)/.installed
	$(FUZZING) --seconds $(FUZZ_SECONDS) $(if $(FUZZ_RUNS),--runs $(FUZZ_RUNS)) --examples $(FUZZ_EXAMPLES)

fuzz-check: $(VENV)/.installed
	$(BIN)/python -m scripts.fuzz codec device --quick --seconds 5 $(if $(FUZZ_CXX),--compiler $(FUZZ_CXX))

gpu-check:
	$(PYTHON) -m scripts.gpu_check --out "$(GPU_OUT)" $(GPU)

$(VENV)/.torch:
	@echo "[1/4] making a virtual environment in $(VENV), with pip, setuptools and ninja: half a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel ninja
	@echo "[2/4] installing $(TORCH) and numpy: a minute for the CPU build (200 MB), longer for a CUDA build (3 GB;"
	@echo "      make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes the CPU build)"
	@$(BIN)/python -m pip install --quiet "$(TORCH)" numpy
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	@echo "[3/4] compiling the C++ codec, installing the plugin with megatron-core and tools: two minutes"
	@$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[cli,megatron,dev]"
	@touch $@

$(OLDER): | $(VENV)/.torch
	rm -rf $@.part
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part "megatron-core==$(MEGATRON)"
	mv $@.part $@

# A folder of its own beside the environment, which the demo need not wait for and no other release is in the way of.
# With what it imports, less torch, numpy and pydantic, which are installed; DS_BUILD_OPS=0: it compiles nothing now.
$(DEEPSPEED_SITE): | $(VENV)/.torch
	rm -rf $@.part
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --target $@.part \
		"deepspeed==$(DEEPSPEED)" einops hjson msgpack ninja packaging psutil py-cpuinfo tqdm
	mv $@.part $@

# accelerate without what it requires: torch is installed, and transformers brings the rest.
$(HF_SITE): | $(VENV)/.torch
	rm -rf $@.part
	$(BIN)/python -m pip install --quiet --target $@.part "transformers==$(TRANSFORMERS)"
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part "accelerate==$(ACCELERATE)"
	mv $@.part $@

# accelerate, lightning and torchtitan without what they require: torch is installed, the others bring the rest.
$(PROGRAMS_SITE): | $(VENV)/.torch
	rm -rf $@.part
	$(BIN)/python -m pip install --quiet --target $@.part \
		"transformers==$(TRANSFORMERS)" "datasets==$(DATASETS)" "evaluate==$(EVALUATE)" \
		tyro tensorboard tomli einops pillow expecttest
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part \
		"accelerate==$(ACCELERATE)" "lightning==$(LIGHTNING)" torchmetrics lightning-utilities \
		"torchtitan==$(TORCHTITAN)" torchdata triton
	mv $@.part $@

clean:
	rm -rf $(VENV) build dist *.egg-info flash_allreduce_plugin/_C*.so flash_allreduce_plugin/_cuda.so
