# make replay: set up and decode a real trace.  make test: set up and test.  Both start from nothing but Python 3.11 and gcc.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRACE ?= examples/traces/azure_llm_2023_conv_sample.csv
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

# Without a GPU the constraints pin what is installed. They leave NVRTC open: where pip finds only torch's CUDA build (PyPI on Linux),
# that pins an NVRTC of its own. With a GPU, torch and CuPy come as the platform has them.
ifeq ($(GPU),yes)
EXTRAS := test,dev,bench,cu13
CONSTRAINTS :=
else
EXTRAS := test,dev,bench
CONSTRAINTS := -c constraints.txt
endif

.PHONY: venv replay test lint gpu cubins fuzz fuzz-inputs mutate soak

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable ".[$(EXTRAS)]"
	touch $@

replay: venv
	$(BIN)/zos replay $(TRACE)

test: venv
	$(BIN)/python -m pytest -q

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# On the GPU machine as it is: its own python3, nothing installed.
gpu:
	$(PYTHON) -m tests.gpu

# Kernels compiled ahead, for a wheel that needs no compiler: make cubins, then build the wheel.
cubins: venv
	$(BIN)/python -m device_kernels.cubins

# Calls in any order against the oracle, fresh examples each time; EXAMPLES of them, some 25 a second.
EXAMPLES ?= 2000
fuzz: venv
	ZOS_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q tests/test_state_machine.py

# Traces, profiles, stored states and arguments of any kind, for so many seconds.
SECONDS ?= 3600
fuzz-inputs: venv
	ZOS_FUZZ_SECONDS=$(SECONDS) $(BIN)/python -m pytest -q tests/test_outside_*.py

# One change at a time in the ring's arithmetic; none may survive its tests. Some three minutes.
mutate: venv
	$(BIN)/python -m tests.mutate

# A loop under churn: ten million rows on the CPU, nine minutes on a GPU. SOAK="--json FILE" keeps what was found.
soak: venv
	$(BIN)/python -m tests.soak $(SOAK)
