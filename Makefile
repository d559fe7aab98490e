# Every verb of this project, one line each. CI calls the same ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two seconds of processor time each: with the places to die, about ten minutes on two cores.
SEEDS ?= 500
# Of the places to die, each so many-th is tried.
CRASH_POINTS ?= 50
# Worlds of six short runs one after another.
ENDS ?= 50
MINUTES ?= 60
FUZZ_SECONDS ?= 600
CORPORA ?= stdlib
# What failed, what broke, and what was skipped and why: or it would be taken for played.
TOLD = -q -rfEs
# Pure tests take what cores there are.
# What one worker compiled the others need not. Bytecode is kept even where the environment says no: a
# third of the time of collecting is pytest's rewriting of assertions.
KEPT = PYTHONDONTWRITEBYTECODE= JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.pytest_cache/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
PURE = $(KEPT) $(BIN)/pytest $(TOLD) -m "not live and not whole and not long" --ignore=tests/live -n auto --dist worksteal
# Whole stacks of processes: two at a time, since a third one costs more of two cores than it uses.
# What starts one server, or none, is not among them.
ALONE = $(filter-out tests/live/test_nats_%.py tests/live/test_transport_%.py,$(wildcard tests/live/test_*.py))
# The longest first, so that no worker is left with one at the end.
LONGEST = $(patsubst %,tests/live/test_%.py,demo text_to_model attacks)
STACKS = $(LONGEST) $(filter-out $(LONGEST),$(ALONE))
WHOLE = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest $(TOLD) -m "(live or whole) and not long"

.PHONY: runs install format lint check pure stacks beside fuzzed test test-long explore fuzz demo docs pictures sim ends mutants interop sites-test slurm-test upgrade-drill soak quality claims compose-test clean clean-data

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

# What a cluster on this machine needs, and nothing that only developers do.
$(VENV)/.packages: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "decoupled-diloco needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) '.[local]'
	@touch $@

# The arithmetic of merging is compiled now, not in a run. By its folder, since pip takes the project out
# for a moment where it installs the tools meanwhile.
$(VENV)/.runs: $(VENV)/.packages
	PYTHONPATH=shared $(BIN)/python -c 'from diloco_shared.numerics.merge import warm; warm()'
	@touch $@

$(VENV)/.tools: $(VENV)/.packages
	$(PIP) '.[dev]'
	@touch $@

# Compiling and installing take a core each.
$(VENV)/.installed: $(VENV)/.packages
	$(MAKE) -j2 $(VENV)/.runs $(VENV)/.tools
	@touch $@

$(VENV)/.docs: $(VENV)/.runs
	$(PIP) '.[docs]'
	@touch $@

runs: $(VENV)/.runs

install: $(VENV)/.installed

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Style, types and which package may import which; the peers' benches need the peers.
lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -n auto
	$(BIN)/mypy -n auto --exclude 'bench/(claims/|racing/(run_|worker|decoder|ddp)|stepping/torch_)' bench
	MYPYPATH=bench/claims $(BIN)/mypy -n auto bench/claims
	$(BIN)/lint-imports

pure: install
	$(PURE)

stacks: install
	$(WHOLE) --durations 10 -n 2 --dist loadgroup $(STACKS)

# What is played whole in worlds: for the time that processors have left beside stacks, which wait now
# and then. So nobody may expect it to be quick.
WORLDS = tests/sim/whole
beside: install
	$(KEPT) nice -n 19 $(BIN)/pytest $(TOLD) -m "not long" --timeout 900 -n 2 --dist worksteal $(WORLDS)

check: lint pure

# All but stacks is collected once, which takes some seconds on every worker; a fifth of it waits
# for servers and processes, so there are two workers more than cores.
test: lint
	$(KEPT) $(BIN)/pytest $(TOLD) -m "not long" -n 4 --dist worksteal \
		$(addprefix --ignore=,$(STACKS) $(WORLDS)) tests
	$(MAKE) -j3 stacks beside fuzzed

# Other examples of every property, and many more (tests/conftest.py).
explore: install
	HYPOTHESIS_PROFILE=explore $(KEPT) $(BIN)/pytest $(TOLD) -m hypothesis --timeout 3600 \
		--ignore=tests/live -n auto --dist worksteal

# The lane's parser, for a minute and always with the same inputs, so that a change is what breaks it.
fuzzed: install
	@rm -rf build/fuzzed && mkdir -p build/fuzzed
	@! $(BIN)/python -c 'import atheris' 2>/dev/null || nice -n 19 $(BIN)/python tests/fuzz/fuzz_nats_wire.py \
		build/fuzzed -seed=1 -max_total_time=60 -print_final_stats=1 -verbosity=0

# Longer, and with others every time.
fuzz: install
	$(BIN)/python tests/fuzz/fuzz_nats_wire.py diloco-data/fuzz/nats_wire -max_total_time=$(FUZZ_SECONDS)

# What takes minutes each on two cores, and worlds show as well.
test-long: install
	$(BIN)/pytest $(TOLD) -m long -n 2 --dist worksteal tests/live tests/learner tests/sim tests/bench

demo: runs
	$(BIN)/diloco demo

# README's picture, from the committed report of a demo, and the figures of the algorithm.
pictures: runs
	$(BIN)/python site/pictures.py $(REPORT)
	$(BIN)/python site/figures.py

# The site, in build/site; a dead link is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

sim: install
	$(BIN)/python -m diloco_simulator.check --seeds $(SEEDS) $(if $(SEED_FROM),--from $(SEED_FROM),--fresh) \
		--crash-points $(CRASH_POINTS) --keep diloco-data/found --shrink $(if $(JSON),--json $(JSON)) \
		$(if $(FURTHER),--further)

ends: install
	$(BIN)/python -m diloco_simulator.worlds.ends --seeds $(ENDS) $(if $(SEED_FROM),--from $(SEED_FROM),--fresh)

mutants: install
	$(BIN)/python bench/mutants.py $(if $(JSON),--json $(JSON)) $(if $(FURTHER),--further)

# Do our checkpoints compute in transformers what they compute here? In an environment of its own.
INTEROP := .venv-interop
$(INTEROP)/.installed:
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
	@touch $@

interop: install $(INTEROP)/.installed
	rm -rf build/interop && mkdir -p build
	$(BIN)/python tests/interop/write_ours.py build/interop
	$(INTEROP)/bin/python tests/interop/compare.py build/interop

# A hub and two sites on networks of their own; needs root, and with DOCKER=1 an engine and Compose.
sites-test: install
	$(BIN)/python bench/sites.py $(if $(DOCKER),--docker) $(if $(JSON),--json $(JSON))

# Learners as jobs of a Slurm of its own; needs its programs (Debian: slurmctld slurmd slurm-client munge).
slurm-test: install
	$(BIN)/python bench/slurm_drill.py $(if $(JSON),--json $(JSON))

# Release 0.2.0, as it was.
LAST_RELEASE := 2f9ab71f87b6
upgrade-drill: install
	rm -rf build/last-release && mkdir -p build/last-release
	git archive $(LAST_RELEASE) | tar -x -C build/last-release
	$(BIN)/python bench/upgrade.py --old build/last-release $(if $(JSON),--json $(JSON))

soak: install
	$(BIN)/python bench/soak.py --minutes $(MINUTES) $(if $(JSON),--json $(JSON))

quality: install
	$(BIN)/python bench/gaps.py --learners 4 --seeds 0

# The published claims, one script each. Hours where diloco-data/experiments remembers nothing.
claims: install
	$(BIN)/python bench/claims/goodput.py --json docs/results/goodput.json --png docs/results/goodput.png
	$(BIN)/python bench/claims/bandwidth.py --json docs/results/bandwidth.json --png docs/results/bandwidth.png
	$(BIN)/python bench/claims/times_faster.py --json docs/results/times_faster.json
	$(BIN)/python bench/gaps.py --corpora $(CORPORA) --json docs/results/gaps.json
	$(BIN)/python bench/gaps.py --learners 4 --batch 64 --json docs/results/gaps_batch64.json
	$(BIN)/python bench/claims/gaps.py docs/results/gaps.json --png docs/results/gaps.png
	$(BIN)/python bench/claims/quality.py docs/results/gaps.json --png docs/results/quality.png
	$(BIN)/python bench/ablations.py --json docs/results/ablations.json
	$(BIN)/python bench/averaging.py --json docs/results/averaging.json
	$(BIN)/python bench/claims/failures.py --json docs/results/failures.json
	$(BIN)/python bench/claims/failures.py --steps 3000 --seeds 0 1 --json docs/results/failures_3000.json
	$(BIN)/python bench/claims/failures.py --steps 3000 --sequences 16 --json docs/results/failures_16.json
	$(BIN)/python bench/claims/failures.py --steps 3000 --sequences 32 --rate-data-parallel 3.2e-2 \
		--json docs/results/failures_32.json
	$(BIN)/python bench/claims/mixed.py --json docs/results/mixed.json
	$(BIN)/python bench/claims/scavenging.py --json docs/results/scavenging.json
	$(BIN)/python bench/scale.py --json docs/results/scale.json
	$(BIN)/python bench/claims/plan.py --json docs/results/plan.json

# Containers are killed, added, taken away and made anew; needs a Docker engine and Compose.
compose-test: install
	$(BIN)/python bench/containers.py $(if $(JSON),--json $(JSON))

# What was made to build and to test. What runs have left is not among it.
clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# What 'diloco up' keeps, and what experiments remember. Whoever works there holds a lock.
DATA_IS_FREE = import fcntl, glob; [fcntl.flock(open(at), fcntl.LOCK_EX | fcntl.LOCK_NB) for at in glob.glob("diloco-data/**/lock", recursive=True)]
clean-data:
	@$(PYTHON) -c '$(DATA_IS_FREE)' 2>/dev/null || { echo "a process works in diloco-data: end it first (diloco down)"; exit 1; }
	rm -rf diloco-data
