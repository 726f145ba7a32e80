# make run    set up, then every method on the embedded default, side by side
# make test   set up, then lint and all tests
# make paper  every table and figure from the stored runs below RUNS, into OUT, without a model: make paper RUNS=runs
# make setup  only the set-up: .venv with the exact versions of requirements.lock

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# how many test processes; each keeps to one thread
JOBS ?= auto
# make paper: where the runs lie (several folders are fine), and where tables and figures go
RUNS ?= runs
OUT ?= $(firstword $(RUNS))/paper

.PHONY: run test paper lint format setup lock clean

run: setup
	$(BIN)/python run.py experiment=demo

test: setup lint
	$(BIN)/pytest -n $(JOBS)
	MPLBACKEND=agg $(BIN)/pytest --nbmake notebooks

# one thread: the bootstrap's products are too small for more, and crawl where other work shares the cores
paper: setup
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m scripts.make_paper $(RUNS) --out $(OUT)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else "Python 3.11 to 3.13 is needed, this is %d.%d: make setup PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

# after a change of dependencies in pyproject.toml: install them by hand into .venv, then write down what is there
lock:
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip | sed "s/+cpu$$//" > requirements.lock

clean:
	rm -rf .venv
