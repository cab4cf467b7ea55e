# Everything from a fresh clone: `make demo` shows the main job, `make test` runs the tests. Both make .venv first.
# make PYTHON=python3.12 ... chooses the interpreter; it counts when .venv is made.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# Passed to pip beside the project. The package itself runs on older releases (see pyproject.toml); a new environment
# takes one that has a matching torchvision wheel everywhere.
TORCH ?= torch>=2.14

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: help demo test test-slow lint format types contract package bench clean

help:
	@echo "make demo      the main job on the digits data: install, then about 4 minutes (run folder: runs/digits)"
	@echo "make test      the fast tests          make test-slow  the slow ones"
	@echo "make lint      ruff                    make format     let ruff rewrite"
	@echo "make types     mypy                    make contract   who may import whom (import-linter)"
	@echo "make package   build and check the wheel"
	@echo "make bench     the benchmarks          make clean      remove .venv and what was built (runs/ stays)"

demo: $(VENV)/installed
	$(BIN)/tu-symmetry table recipes/compact_posterior/digits

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -n $(WORKERS)

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -m slow

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

package: $(VENV)/installed-dev
	rm -rf build/wheel build/site
	$(BIN)/python -m pip wheel -qq --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m pip install -qq --no-deps --target build/site build/wheel/*.whl
	cd build/site && test -f tu_symmetry/py.typed && test -f tu_symmetry/recipes/compact_posterior/digits/table.yaml
	cd build/site && ../../$(BIN)/python -S -c "$$IMPORT_CHECK"

# Run in the unpacked wheel without site-packages: whatever the import needed beyond the standard library would fail.
define IMPORT_CHECK
import sys, time
start = time.perf_counter()
import tu_symmetry
seconds = time.perf_counter() - start
print(f"{tu_symmetry.__file__}: version {tu_symmetry.__version__}, imported in {seconds:.3f} s")
sys.exit(seconds > 0.2)
endef
export IMPORT_CHECK

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
	@start=$$SECONDS; $(BIN)/python -m pip install -qq -e . '$(TORCH)' && echo "Installed in $$((SECONDS - start)) s."
	@touch $@

# A name on the PATH is not enough (version managers leave names behind that do not run), so each candidate is run.
# Debian splits ensurepip from Python: there, the interpreter's own pip fills the new environment.
$(BIN)/python:
	@supported='import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; \
	for python in $(or $(PYTHON),python3 python3.12 python3.13 python3.11 python3.10 python); do \
	  if "$$python" -c "$$supported" 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "No supported Python found: $(or $(PYTHON),python3) is missing or is none of 3.10, 3.11, 3.12, 3.13." >&2; \
	  echo "Install one of them (with its venv module), or name one: make PYTHON=/path/to/python3.12 ..." >&2; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version) ($$found)"; \
	if "$$found" -c 'import ensurepip' 2>/dev/null; then \
	  "$$found" -m venv --clear $(VENV); \
	else \
	  "$$found" -m venv --clear --without-pip $(VENV) && "$$found" -m pip --python $(VENV)/bin/python install -qq pip; \
	fi
