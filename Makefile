PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install format check test pure demo sim compose-smoke clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("decoupled-diloco needs Python 3.11 or newer; set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

install: $(VENV)/.installed

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
