# make train     train a small model on this machine, from an empty directory
# make test      prove every chapter and run the tests, on WORKERS processes
# make test-all  that, an attack on the whole program, and what takes long: every case of each test
# make test-gpu  check every kernel on this machine's GPU, and each PTX instruction with its twin
# make html      build the pages of the book
# Each makes .venv first. Only Python 3.11+ and make are assumed.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
WORKERS ?= 2
# What of the long tests has not begun after so many minutes is skipped, and says so.
MINUTES ?= 600
# Hundreds of programs that tests start import the package: it is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test attack test-long test-all test-gpu book html clean

train: .venv/installed-train
	$(BIN)/nanoeuler train $(if $(wildcard runs/base/step-*),--resume)

PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m nanoeuler.book check
	$(PYTEST)

attack: .venv/installed-test
	$(BIN)/python tests/attack/run.py

test-long: .venv/installed-test
	$(PYTEST) -m long --minutes $(MINUTES)

test-all: test attack test-long

test-gpu: .venv/installed-gpu
	$(BIN)/python tests/bench/gpu.py check

book: .venv/installed-test
	$(BIN)/python -m nanoeuler.book run

html: .venv/installed-test
	$(BIN)/python -m nanoeuler.book html

clean:
	rm -rf .venv build

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "nanoeuler needs Python 3.11 or newer: none was found; install one or run make PYTHON=/its/path"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed-train: pyproject.toml | .venv/bin/python
	@echo "installing the packages that training needs (under a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	@echo "installing the packages that the book and its tests need (two minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[book,test,gpu]'
	@touch $@ .venv/installed-train

.venv/installed-gpu: pyproject.toml | .venv/bin/python
	@echo "installing the packages that kernels and their peers need (some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,gpu,bench]'
	@touch $@
