# Thin: every line is a command a person could type. Serving and testing share .venv.
PYTHON ?= python3
# The demo model where its weights are, else random ones.
DEMO := $(wildcard reference/demo/checkpoint/model.safetensors)
MODEL ?= $(if $(DEMO),reference/demo/checkpoint,.models/random)
# Stock exllamav3's panel, which fits the demo model alone; for others bench.all makes one.
PANEL := $(if $(filter reference/demo/checkpoint,$(MODEL)),$(wildcard reference/demo-exl3-ref-panel.json))
BIN := .venv/bin

# torch's CPU build is not there for every Python.
TRITON_PYTHON ?= $(PYTHON)

# Processes that share the tests, as many as CI's machine has cores. A worker that is done takes over tests of another.
JOBS ?= 2
PYTEST := -m pytest -n $(JOBS) --dist worksteal

.PHONY: serve test test-triton lint types native-test pytest bench bench-short format clean

serve: .venv/.serve $(MODEL)/config.json
	$(BIN)/python -m cffi_build
	$(BIN)/glm53srv serve --model $(MODEL) $(ARGS)

test: lint types native-test pytest

# The GPU's kernels under Triton's interpreter; needs torch, in an environment of its own, and no GPU.
test-triton: .venv-triton/.done
	.venv-triton/bin/python -m cffi_build
	TRITON_INTERPRET=1 .venv-triton/bin/python $(PYTEST) tests/offload_device/gpu tests/engine/cuda \
		tests/bench_model tests/bench/peers tests/bench/cuda $(ARGS)

lint: .venv/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'native/*.c' 'native/*.h')
	$(BIN)/shellcheck .ci/run $$(git ls-files '*.sh')
	$(BIN)/hadolint Dockerfile

types: .venv/.test
	$(BIN)/mypy

native-test: .venv/.test
	$(MAKE) -C native -j$(JOBS) test

pytest: .venv/.test
	$(BIN)/python -m cffi_build
	$(BIN)/python $(PYTEST) -m "not cuda and not slow" $(ARGS)

format: .venv/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(git ls-files 'native/*.c' 'native/*.h')

bench: .venv/.serve
	$(BIN)/python -m bench.kernels

bench-short: .venv/.serve $(MODEL)/config.json
	$(BIN)/python -m cffi_build
	$(BIN)/python -m bench.all --model $(MODEL) --out build/bench --short \
		$(if $(PANEL),--panel $(PANEL)) $(ARGS)

.models/random/config.json: .venv/.serve
	$(BIN)/glm53srv pack random --out .models/random

.venv/.serve: requirements/base.txt scripts/bootstrap.py
	$(PYTHON) scripts/bootstrap.py
	touch $@

.venv/.test: requirements/dev.txt requirements/base.txt scripts/bootstrap.py
	$(PYTHON) scripts/bootstrap.py --dev
	touch $@ .venv/.serve

.venv-triton/.done: requirements/triton.txt scripts/bootstrap.py
	$(TRITON_PYTHON) scripts/bootstrap.py --triton --packages-only
	touch $@

clean:
	rm -rf .venv .venv-triton .models build .mypy_cache .ruff_cache .pytest_cache glm53srv/_kernels*
