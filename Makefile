# Two commands: `make demo` trains a real model and shows it; `make test` proves the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Where it is set, as in many images, each process would compile torch, Ray and the rest again: four seconds of each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test together alone test-busy coverage test-versions test-slow test-faults test-deepspeed figures mutants lint wheels setup clean

demo: setup
	@$(BIN)/trireme train experiments/mnist.yaml --again

# What to run by habit, in less than a minute: lint, types, and the tests that start nothing.
check: setup lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "pure and not slow"

# First two at a time, and lint and types on what these leave of two processors; then, with nothing beside it, what trains
# on as many processes as there are processors (tests/test_marks.py), which wait for each other.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 lint together
	@$(MAKE) --no-print-directory alone

together: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder -m "not slow and not alone"

alone: setup
	$(BIN)/python -m pytest -m "not slow and alone"

# The same while two loops keep the processors busy: no test may depend on how fast the machine is.
test-busy: setup
	@for i in 1 2; do sh -c 'while kill -0 '$$$$' 2>&-; do :; done' & done; $(MAKE) test

# The lines that no test reaches without a GPU, folder by folder; half as long again as `make test`: eleven minutes.
coverage: setup
	$(BIN)/python -m pytest --cov --cov-report= --numprocesses 2 --dist loadgroup --no-loadscope-reorder -m "not slow and not alone"
	$(BIN)/python -m pytest --cov --cov-report= --cov-append -m "not slow and alone"
	$(BIN)/coverage report --show-missing --skip-covered

# The main job, parity, resume, pipeline and tracking with the oldest and the newest releases that Trireme was tested
# with, each in an environment of its own under .venv-versions: half an hour or more, and its table.
test-versions: setup
	$(BIN)/python -m tests.versions

# What takes minutes: several hosts in a lab of network namespaces, autoscaling, whole studies. Says what was skipped.
test-slow: setup
	$(BIN)/python -m pytest -m slow --timeout 3600 -rs --ignore tests/faults
	$(MAKE) test-faults

# Runs that are disturbed and ended in ways that nobody planned, two at a time: twenty minutes. SEED= draws when.
test-faults: setup
	$(BIN)/python -m pytest -m slow tests/faults --numprocesses 2 --dist worksteal --timeout 3600 -rs

# The optional DeepSpeed extra, in the same environment; its first test compiles an operator (needs c++).
test-deepspeed: setup
	$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[deepspeed]'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/strategies/test_deepspeed.py --timeout 600

# The tables of experiments/benchmarks/RESULTS.md that need no GPU, measured anew: an hour by itself.
figures: setup
	$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[benchmarks]'
	$(BIN)/python -m experiments.benchmarks figures --measure

# Changes pure functions one place at a time (order, commits, failure policy, degrees, schedules, costs, the planner's
# memory): `mutmut results` lists what no test noticed. An hour.
MUTATED := app.data.order.* app.checkpoint.commit.* app.launchers.failure_policy.* strategies.dims.* strategies.costs.* \
	strategies.pipeline.schedules.* strategies.*.x_cost* strategies.*.x_collectives* strategies.fsdp.x__behaviour* \
	strategies.fsdp.x_*_large* app.planner.memory.*memory_* $(foreach f,pipeline worst_moment,app.planner.activations.*$(f)*) \
	$(foreach f,_read_rank_size _read_unit_sizes,app.planner.estimator.*$(f)*)
mutants: setup
	$(BIN)/python -m pip install -qq --disable-pip-version-check 'mutmut>=3.8,<4'
	PATH="$(CURDIR)/$(BIN):$$PATH" mutmut run --max-children 2 $(foreach m,$(MUTATED),'$(m)')
	PATH="$(CURDIR)/$(BIN):$$PATH" mutmut results

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice $(BIN)/mypy

# For machines without a network: all packages as files in wheels/. There, with the same Python and kind of processor:
# pip install --no-index --find-links wheels 'trireme[examples,s3]'
wheels:
	$(PYTHON) -m pip wheel --wheel-dir wheels --constraint constraints.txt '.[examples,s3]' 'setuptools>=77'

setup: $(VENV)/.installed

# Installs the tested versions (constraints.txt); again only when what is to be installed has changed.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing the tested versions into $(VENV): a minute or two, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 cannot make a virtual environment here: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --upgrade pip || true # resolves faster
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[examples,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info app/*.egg-info
