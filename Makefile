# Every target builds what it needs in $(VENV); on a fresh machine `make demo` or `make test` is the only command.
#   PYTHON  interpreter that creates the environment
#   TORCH   requirement used when torch is missing in it, e.g. TORCH="torch --index-url <CPU index>"
#   ARGS    extra arguments of the demo or of pytest
#   JOBS    test processes, one thread each; "auto" is one per core, 0 runs the tests in pytest itself
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
ARGS ?=
JOBS ?= auto

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

.PHONY: demo test test-all quality format docs clean

demo: $(VENV)/.demo
	$(PY) examples/demo.py $(ARGS)

test: $(VENV)/.test
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not slow" --durations=15 $(ARGS)

test-all: $(VENV)/.test
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

quality: $(VENV)/.quality
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.quality
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.docs
	$(PY) -m mkdocs build --quiet --strict

$(VENV)/.torch:
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PIP) install $(TORCH)
	@touch $@

$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(PIP) install -e ".[$*]"
	@touch $@

# These need neither torch nor the package, and their requirement is read from pyproject.toml.
$(VENV)/.quality $(VENV)/.docs: $(VENV)/.%: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install $$(sed -n 's/^$* = \["\(.*\)"\]/\1/p' pyproject.toml)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
