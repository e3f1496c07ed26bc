# Everything runs in $(VENV), which is made from constraints.txt the first time that a target needs it.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 3

.DELETE_ON_ERROR:
.PHONY: help train installed test test-all lint check check-slow check-live mutations gpu-compiler check-gpu check-on-gpu chaos docs bench

help:
	@echo "make train       train the recipes on 8 fake devices: a GPT in three dimensions, digits, house prices; results in runs/train/"
	@echo "make installed   make $(VENV) with all that the other targets need"
	@echo "make test        run the tests: each property once, at most 600 CPU seconds"
	@echo "make test-all    run all tests but those of check-slow: a change lands when they pass"
	@echo "make docs        build the guide and the reference: site/index.html"
	@echo "make lint        formatting, lint, types, import contracts"
	@echo "make check       lint, docs, test-all: what has to pass before a change lands"
	@echo "make check-slow  run the tests that make test-all leaves out, every mesh, schedule and setting: 40 minutes on 2 cores"
	@echo "make check-live  compare models with transformers and PyTorch themselves, which it installs (several GB)"
	@echo "make mutations   break the package in one place after another, by tests/mutations.txt: make test must notice each"
	@echo "make check-gpu   compile steps for GPUs that are not here, and count what they would do; installs CUDA's compiler (0.8 GB)"
	@echo "make gpu-compiler  install only that compiler, as make check-gpu does first"
	@echo "make check-on-gpu  check what this machine's GPU computes, with \$$(PYTHON), which needs jaxpar and JAX for the GPU"
	@echo "make chaos       random faults for 20 minutes: runs of two processes that are killed, stopped, out of disk, damaged; SEED=7: again"
	@echo "make bench       run every benchmark (allow 25 minutes on 2 quiet cores) and render benchmarks/RESULTS.md; SMOKE=1: only try them"
	@echo "PYTHON=...       the interpreter that $(VENV) is made from, 3.11 or newer (now: $(PYTHON))"
	@echo "WORKERS=...      how many processes run the tests (now: $(WORKERS))"
	@echo "VENV=...         the folder of the virtual environment (now: $(VENV))"

# What is installed, each part by a stamp of its own: what training takes, the tests, and lint, types, docs and Node.
STAMPS := $(VENV)/for-training $(VENV)/for-tests $(VENV)/installed
$(VENV)/for-training: EXTRA := train
$(VENV)/for-tests: EXTRA := test
$(VENV)/installed: EXTRA := dev

$(STAMPS): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "'$(PYTHON)' was not found. Install Python 3.11 or newer, or name one: make PYTHON=python3.12 test" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "jaxpar needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1 | head -1). Name another: make PYTHON=python3.12 test" >&2; exit 1; }
	@rm -f $@
	@$(PYTHON) -m venv $(VENV) || { echo "could not make $(VENV) with '$(PYTHON) -m venv'. Where Python comes in parts, install its venv part too (python3-venv)." >&2; exit 1; }
	@$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRA)]' || { echo "could not install jaxpar[$(EXTRA)] into $(VENV): see pip's message above, then run make again." >&2; exit 1; }
	@touch $(if $(filter dev,$(EXTRA)),$(STAMPS),$@) # dev has all

train: $(VENV)/for-training
	@# A checkpoint of the last step, which serve and export read.
	$(BIN)/python recipes/gpt.py --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2 --schedule zb-h1 --checkpoint-every 300 --out-dir runs/train/gpt --overwrite
	$(BIN)/python recipes/house_prices.py --fake-devices 8 --mesh.data 8 --out-dir runs/train/house_prices --overwrite
	$(BIN)/python recipes/digits.py --fake-devices 8 --mesh.data 4 --mesh.tensor 2 --checkpoint-every 300 --out-dir runs/train/digits --overwrite
	@echo "Serve one of them, then send it a request from another terminal:"
	@echo
	@echo "  $(BIN)/jaxpar serve runs/train/gpt"
	@echo "  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{\"model\": \"gpt\", \"prompt\": \"def \", \"max_tokens\": 48}'"
	@echo
	@echo "  $(BIN)/jaxpar serve runs/train/house_prices"
	@echo "  curl http://127.0.0.1:8000/predict -H 'Content-Type: application/json' -d '{\"instances\": [{\"area_ft2\": 1650, \"bedrooms\": 3}]}'"
	@echo
	@echo "  $(BIN)/jaxpar serve runs/train/digits    and open http://127.0.0.1:8000/docs, which has a request to try"

# A file's fixtures and compiled steps are made once, and the longest files start first (tests/conftest.py). More workers than
# two cores, since tests of processes wait for them.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/for-tests
	$(PYTEST)

test-all: $(VENV)/for-tests
	$(PYTEST) -m "not slow" --durations=20

installed: $(VENV)/installed

lint: $(VENV)/installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

check: lint docs test-all

check-slow: $(VENV)/for-tests
	$(PYTEST) -q -m slow --durations=15

check-live: $(VENV)/for-tests
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[live]'
	$(BIN)/python -m pytest -q -m "not slow" tests/test_huggingface_live.py

mutations: $(VENV)/for-tests
	$(BIN)/python -m tests.support.mutate

gpu-compiler: $(VENV)/for-tests
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[gpu-compile]'

check-gpu: gpu-compiler
	@# The machine code is neither run nor measured; leaving it unoptimized takes a fifth of the time off with JAX 0.11.
	JAX_PLATFORMS=cpu XLA_FLAGS="$$($(BIN)/python -c 'from jaxpar.compile_only import with_compiler_flags; print(with_compiler_flags(""))') --xla_gpu_disable_gpuasm_optimizations=true" \
		$(BIN)/python -m pytest -q --durations=12 tests/test_gpu_program.py

check-on-gpu:
	@# Not with $(VENV), whose JAX has no GPUs.
	$(PYTHON) benchmarks/check_on_gpu.py

chaos: $(VENV)/for-tests
	$(BIN)/python -m tests.support.chaos --seconds 1200 $(if $(SEED),--seed $(SEED))

docs: $(VENV)/installed
	$(BIN)/python -m mkdocs build --strict # not --quiet, which hides warnings from --strict

bench: $(VENV)/installed
	$(BIN)/python benchmarks/run.py $(if $(SMOKE),--smoke)
