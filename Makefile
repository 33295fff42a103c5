# make run     train the default run on this machine
# make check   what a change must pass: format, lint, types, fast tests (import order is one), under a minute
# make test    make check, then the slow tests; of long lists of drawn cases those that show every trait once
# make exhaustive [PART=1/1]   the rest of those lists, or a part of its files; for a change to layouts or checkpoints
# make durations [MARKS=exhaustive]   measure again which tests are slow (tests/durations.txt), with nothing else running
# make gpu     tests on a CUDA device: with python3 where that has torch (no install, PYTHONPATH=src), else .venv
# make cluster tests on a real Slurm of several hosts on this machine; needs root and Debian, installs what is missing
# make chaos [TIMES=20] [FIRST=0]   each fault at so many random moments, of seeds from FIRST on, and the table of what
#              came of it (docs/faults.md)
# make docs    build the site of the documentation into site/, which a browser opens without a server
# make bench   measure the loop against a hand-written one
# make bench-planner [ROWS=file]   predict published runs and print how far off the planner was

# make dist [EXTRAS=[torch]]   wheel and sdist in dist/, checked, and the bill of materials of what is installed with them
#              (docs/release.md)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests that are kept compiled are collected in half the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test exhaustive durations check gpu cluster chaos docs bench bench-planner dist clean

ROWS ?= tests/data/planner/rows.csv

run: $(READY)
	$(BIN)/shardway train examples/default.toml

# The fast tests run in two processes, each with files that take as long (tests/durations.txt). The slow ones wait for
# much of their time: three processes keep two cores busy, each with the next file that is left.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
FAST := -m "not slow and not exhaustive" --hypothesis-profile brief
SLOW := -m "slow and not exhaustive" -o console_output_style=count --share="$$SIDE_BY_SIDE"

check: $(READY)
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && echo "format, lint: ok"
	@tools/side_by_side.sh '$(BIN)/mypy' '$(PYTEST) $(FAST) --part 1/2' '$(PYTEST) $(FAST) --part 2/2'

test: check
	@tools/side_by_side.sh '$(PYTEST) $(SLOW)' '$(PYTEST) $(SLOW)' '$(PYTEST) $(SLOW)'

PART ?= 1/1

exhaustive: $(READY)
	$(PYTEST) -m exhaustive --part $(PART)

MARKS ?= not exhaustive

durations: $(READY)
	$(PYTEST) -m "$(MARKS)" --write-durations

gpu:
	@if $(PYTHON) -c "import torch, pytest" 2>/dev/null; then PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -rs; \
	else $(MAKE) --no-print-directory $(READY) && $(BIN)/python -m pytest tests/gpu -rs; fi

cluster: $(READY)
	@if tests/cluster/able.sh; then tests/cluster/install.sh; fi
	SHARDWAY_CLUSTER=1 $(BIN)/python -m pytest tests/cluster -m "not exhaustive" -rs

TIMES ?= 20
FIRST ?= 0

chaos: $(READY)
	@notes=$$(mktemp -u) && trap 'rm -f "$$notes"' EXIT && \
	SHARDWAY_CHAOS_TIMES=$(TIMES) SHARDWAY_CHAOS_FIRST=$(FIRST) SHARDWAY_CHAOS_NOTES="$$notes" $(BIN)/python -m pytest tests/chaos; \
	code=$$?; $(BIN)/python tests/chaos/table.py "$$notes"; exit $$code

docs: $(READY)
	$(BIN)/python tools/docs_site/build.py site

bench: $(READY)
	$(BIN)/python bench/loop_overhead.py

EXTRAS ?=

dist:
	tools/dist.sh "$(PYTHON)" "$(EXTRAS)"

bench-planner: $(READY)
	@found=$$(mktemp) && trap 'rm -f "$$found"' EXIT && \
	$(BIN)/python bench/planner/predict.py "$(ROWS)" "$$found" && \
	$(BIN)/python bench/planner/score.py "$(ROWS)" "$$found"

# pip compiles one file after another; here all cores do, beside the second package. Some files of packages are of no Python.
$(READY): pyproject.toml constraints.txt tools/make_venv.sh
	tools/make_venv.sh $(PYTHON) $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@tools/side_by_side.sh 'DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation -c constraints.txt deepspeed' '$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true'
	@touch $@

clean:
	rm -rf $(VENV) .dist-tools dist
