# make setup      the environment, in .venv (once; again when pyproject.toml or constraints.txt changes)
# make test       what continuous integration runs: lint, types, tests, doctests
# make test-all   the same and the slow proofs
# make test-gpu   prove what holds on the GPUs of this machine, in prove.json and prove.html (docs/gpu.md)
# make demo       see it work
# make reproduce-NAME   measure again what a paper claims and build docs/reproductions/NAME.md, up to 20 minutes;
#                       NAME is top-k, global-qsgd, flexible or decentralized

# A python3.11 that is found may still be a shim that cannot run, so run it.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

REPRODUCTIONS := reproduce-top-k reproduce-global-qsgd reproduce-flexible reproduce-decentralized

.PHONY: setup demo network-tools browser test test-all test-gpu lint format clean $(REPRODUCTIONS)

setup: $(STAMP)
	@:

# torch comes first and pinned, or pip may fetch another one with gigabytes of CUDA. The two variables pin hatchling
# inside the isolated build, which does not see -c (older pip reads the first, newer pip the second).
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "thinwire needs Python 3.11 or newer, and $(PYTHON) is not: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check torch==2.13.0 -e '.[dev]' -c constraints.txt
	@touch $@

# Ten recipes would take longer than the five minutes that a demo may.
demo: setup network-tools
	$(BIN)/thinwire compare --steps 30 --lap 5 --network 100mbit,1ms \
		--recipes ddp,auto,torch-fp16,torch-powersgd:4,two-shot-4,two-shot-1,threshold-k,ar-top-k \
		--json demo.json --report demo.html

$(REPRODUCTIONS): reproduce-%: setup network-tools
	$(BIN)/python -m benchmarks.papers.reproduce $*

# What pip cannot install. Without them the network is paced in the workers, and the browser tests are skipped.
network-tools:
	@$(call apt,ip tc,iproute2)

browser:
	@$(call apt,chromium chromedriver,chromium chromium-driver)

# $(call apt,commands,packages): installs the packages if a command is missing and this may be done.
define apt
missing=; for command in $(1); do command -v $$command >/dev/null || missing=1; done; \
if [ -z "$$missing" ]; then :; \
elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "installing $(2)"; \
	{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(2); } >/dev/null 2>&1 \
		|| echo "skipped: apt-get could not install $(2)"; \
else \
	echo "skipped: $(2) is not installed, and only root can do it: apt-get install $(2)"; \
fi
endef

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread: results repeat, and tests that start several processes do not fight over the cores. Groups of tests run
# side by side (see conftest.py), but not too many: each may start eight processes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder

test: lint network-tools browser
	$(PYTEST)

test-all: lint network-tools browser
	$(PYTEST) -m ""

# What pytest runs on a GPU if there is one: without TRITON_INTERPRET=0 its kernels would run in Triton's interpreter.
GPU_TESTS := tests/kernels tests/lab/prove/test_prove_kernels.py

test-gpu: setup
	$(BIN)/python -m thinwire prove
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(GPU_TESTS); \
	else \
		echo "skipped: the tests for GPUs, because torch sees no CUDA device"; \
	fi

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The environment stays; remove .venv by hand to build it anew.
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . \( -path ./$(VENV) -o -path ./.git \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
