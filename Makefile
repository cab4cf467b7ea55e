# Everything from a fresh clone: `make demo` shows the main job, `make test` runs the tests. Both make .venv first.
# make PYTHON=python3.12 ... chooses the interpreter; it counts when .venv is made.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# Passed to pip beside the project. The package itself runs on older releases (see pyproject.toml); a new environment
# takes one that has a matching torchvision wheel everywhere.
TORCH ?= torch>=2.14

# Where `make package` installs what it has built: an environment that holds nothing else.
EMPTY ?= build/empty

# What `make matrix` tests: interpreter and torch, the ends of what pyproject.toml allows and what lies between.
MATRIX ?= python3.11,torch==2.11.* python3.11,torch>=2.14 python3.12,torch>=2.14 python3.13,torch==2.11.* \
          python3.13,torch>=2.14

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: help demo check test test-portable test-slow test-device test-device-slow coverage matrix lint format types contract package docs bench clean

help:
	@echo "make demo      the main job on the digits data: install, then about 4 minutes (run folder: runs/digits)"
	@echo "make check     style, types, contracts and the core's laws, before a commit"
	@echo "make test      the fast tests          make test-slow  the slow ones"
	@echo "make test-portable  the fast tests as on another machine (COMBINATION=threads-4, ...: see tests/portable.py)"
	@echo "make test-device  fast tests on a CUDA device, the machine's own or else a fake one (test-device-slow: slow ones)"
	@echo "make coverage  the fast tests, and which lines they run (build/coverage/index.html)"
	@echo "make matrix    the fast tests on every Python and torch that is supported (hours, several GB each)"
	@echo "make lint      ruff                    make format     let ruff rewrite"
	@echo "make types     mypy                    make contract   who may import whom (import-linter)"
	@echo "make package   build sdist and wheel, and check both in an empty environment"
	@echo "make docs      the documentation site, with its tutorials run (build/docs/index.html)"
	@echo "make bench     the benchmarks          make clean      remove .venv and what was built (runs/ stays)"

demo: $(VENV)/installed
	$(BIN)/tu-symmetry table recipes/compact_posterior/digits

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -n $(WORKERS)

# As on another processor, with other libraries, in another place; COMBINATION names one, else the commit picks it. ROOMS
# names folders of tests; all of them, else.
COMBINATION ?= commit:$(shell git rev-parse HEAD)
test-portable: $(VENV)/installed-dev
	$(BIN)/python tests/portable.py $(COMBINATION) -n $(WORKERS) $(ROOMS)

# Before a commit: style, types, contracts, and the laws of what everything else stands on.
CORE ?= tests/symmetry/test_laws.py tests/symmetry/test_elements.py tests/symmetry/test_ties.py \
        tests/alignment/test_align.py tests/scaling/test_canonical.py tests/laplace/test_evidence.py \
        tests/posterior/test_compact.py tests/metrics/test_networks.py tests/package/test_package.py

check: lint types contract
	$(BIN)/python -m pytest -q -n $(WORKERS) $(CORE)

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -m slow

# Trainers of these suites take the device, and tests that ask for it by the fixture `cuda` run.
DEVICE_SUITES ?= tests/test_device.py tests/device tests/callbacks tests/routines tests/metrics/test_conformance.py \
                 tests/posterior/test_samplers.py

test-device: $(VENV)/installed-dev
	PYTHONPATH=tests:. $(BIN)/python -m pytest -q -n $(WORKERS) -p fake_cuda.plugin $(DEVICE_SUITES)

# The small commands of all other recipes, and rehearsals of those of paper size; hours.
test-device-slow: $(VENV)/installed-dev
	PYTHONPATH=tests:. $(BIN)/python -m pytest -q -m slow -p fake_cuda.plugin tests/device tests/experiments/test_symmetry_aware.py tests/tables/test_rehearsal.py

coverage: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -n $(WORKERS) --cov --cov-report=term:skip-covered --cov-report=html:build/coverage

# One environment for each pair, made anew only where there is none; MATRIX="python3.12,torch==2.12.*" runs one.
matrix:
	@failed=(); \
	for pair in $(foreach pair,$(MATRIX),'$(pair)'); do \
	  python=$${pair%%,*}; torch=$${pair#*,}; folder=build/matrix/$$python-$${torch//[^0-9.]/}; \
	  echo "== $$python, $$torch ($$folder)"; \
	  $(MAKE) --no-print-directory test VENV="$$folder" PYTHON="$$python" TORCH="$$torch" || failed+=("$$pair"); \
	done; \
	if (($${#failed[@]})); then echo "failed: $${failed[*]}" >&2; exit 1; fi

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/installed-dev
	$(BIN)/mypy

contract: $(VENV)/installed-dev
	$(BIN)/lint-imports

# The wheel is built from the sdist. What is installed is run outside the checkout, in an environment that has what
# pyproject.toml declares and nothing else.
package:
	rm -rf build/dist build/empty
	@$(MAKE) --no-print-directory build/tools/bin/python $(EMPTY)/bin/python
	build/tools/bin/python -m pip install -qq build
	build/tools/bin/python -m build --outdir build/dist . > build/package.log || { cat build/package.log; exit 1; }
	$(EMPTY)/bin/python -m pip install -qq build/dist/*.tar.gz '$(TORCH)'
	cd build && ../$(EMPTY)/bin/python -I ../tests/installed_package.py --files > sdist.txt
	$(EMPTY)/bin/python -m pip install -qq --no-deps --force-reinstall build/dist/*.whl
	cd build && ../$(EMPTY)/bin/python -I ../tests/installed_package.py --files > wheel.txt
	diff build/sdist.txt build/wheel.txt
	cd build && ../$(EMPTY)/bin/python -I ../tests/installed_package.py

# Warnings are errors; tutorials are run. Look at it: build/docs/index.html
docs: $(VENV)/installed-dev
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

bench: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing the development tools into $(VENV) (about a minute) ..."
	@$(BIN)/python -m pip install -qq -e '.[dev]' '$(TORCH)'
	@touch $@

$(VENV)/installed: $(BIN)/python pyproject.toml
	@echo "Installing tu_symmetry and PyTorch into $(VENV) (several GB, 3 to 10 minutes, only this once) ..."
	@start=$$SECONDS; $(BIN)/python -m pip install -qq -e '.[recipes]' '$(TORCH)' && echo "Installed in $$((SECONDS - start)) s."
	@touch $@

# A name on the PATH is not enough (version managers leave names behind that do not run), so each candidate is run.
# Debian splits ensurepip from Python: there, the interpreter's own pip fills the new environment.
%/bin/python:
	@supported='import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	for python in $(or $(PYTHON),python3 python3.12 python3.13 python3.11 python); do \
	  if "$$python" -c "$$supported" 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "No supported Python found: $(or $(PYTHON),python3) is missing or is none of 3.11, 3.12, 3.13." >&2; \
	  echo "Install one of them (with its venv module), or name one: make PYTHON=/path/to/python3.12 ..." >&2; \
	  exit 1; \
	fi; \
	echo "Making $* with $$("$$found" --version) ($$found)"; \
	if "$$found" -c 'import ensurepip' 2>/dev/null; then \
	  "$$found" -m venv --clear $*; \
	else \
	  "$$found" -m venv --clear --without-pip $* && "$$found" -m pip --python $*/bin/python install -qq pip; \
	fi
