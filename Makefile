# The daily commands. They need only make, Python 3.11 to 3.13 and a C library.
#
#   make train            install, make the default data set, train the `tiny` recipe on it
#   make demo             the same, and a worker is killed half way: training goes on
#   make test             the whole test suite
#   make check            lint, types and unit tests: the quick one
#   make install          only the virtual environment, .venv
#   make lock             resolve the pinned requirements again
#   make clean            remove what the commands above made, except runs/
#
#   make DEVICE=cuda ...  install and train for CUDA: one process a GPU instead of two on the CPU
#   make DEVICE=cuda gpu-check   whether the trainer works on this machine's GPU, and how fast: eight minutes
#   make PYTHON=... ...   the interpreter to make .venv with; without it the first that fits

DEVICE ?= cpu
PYTHON ?=

ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE=$(DEVICE) is not known: choose DEVICE=cpu or DEVICE=cuda)
endif

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed-$(DEVICE)
DATASET := datasets/tiny
PROCESSES := $(if $(filter cuda,$(DEVICE)),gpu,2)

.PHONY: train demo gpu-check test check lint unit system install lock clean

# One thread a process: on the CPU two processes share two cores (torchrun would choose the same, and say so).
train: $(INSTALLED) $(DATASET)/dataset.json
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(PROCESSES) -m dlrm.train \
		--recipe tiny --set train.device=$(DEVICE)

demo: $(INSTALLED) $(DATASET)/dataset.json
	$(BIN)/python -m examples.recovery_demo --dataset $(DATASET)

gpu-check: $(INSTALLED)
	$(BIN)/python -m experiments.gpu

test: unit system

check: lint unit

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two files of tests at a time: within a file, tests share what is slow to start. Three were slower on 2 cores.
# Not those with most tests go first, as xdist has it, but those that take longest: see tests/conftest.py.
# One thread each: two processes with two threads each wait for one another at every barrier of OpenMP.
# A process of tests that dies ends the run: replaced, it may leave the others waiting for ever.
# Bytecode is kept whatever the shell says, or every run would rewrite the assertions of all tests anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	--max-worker-restart 0

unit: $(INSTALLED)
	$(PYTEST) -m "not system"

system: $(INSTALLED)
	$(PYTEST) -m system tests

install: $(INSTALLED)

lock: $(INSTALLED)
	requirements/lock.sh

clean:
	rm -rf $(VENV) $(DATASET) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp depends on the locks: a changed lock is installed by the next command, whichever it is.
$(INSTALLED): requirements/install.sh requirements/$(DEVICE).lock requirements/cuda.lock requirements/dev.lock
	@DEVICE=$(DEVICE) PYTHON="$(PYTHON)" requirements/install.sh

# dataset.json is written last: a data set whose making was interrupted is made again.
$(DATASET)/dataset.json: | $(INSTALLED)
	$(BIN)/python -m data.synthetic --out $(DATASET)
