# repro · test · check · ui · compare · bench: each target sets up what it needs. `make help` lists all.

# A name or a path; without one locks/setup.sh chooses a Python of the path
PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
ifneq ($(and $(GPU),$(CLUSTER)),)
$(error GPU=1 or CLUSTER=1: a GPU node of a cluster needs both locks, see docs/cluster.md)
endif
LOCK   := locks/$(or $(if $(GPU),cuda),$(if $(CLUSTER),cluster),base).lock

export DVC_NO_ANALYTICS ?= true
export MLFLOW_DISABLE_TELEMETRY ?= true
# uv does not compile bytecode: without bytecode files every process would import for 7 s longer.
unexport PYTHONDONTWRITEBYTECODE

# Modules that have slow tests, so that workers do not import the others.
SLOW = $(sort $(shell grep -rlE --include="test_*.py" "mark\.slow|\bcases\b" tests))

.DEFAULT_GOAL := help
.PHONY: help env lock repro test test-slow nightly check gate docs format audit privacy-audit what-if ui compare bench sync clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-15s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## the environment in .venv, from locks/base.lock; with GPU=1 or CLUSTER=1 from cuda.lock or cluster.lock
	@sh locks/setup.sh "$(PYTHON)" "$(VENV)" "$(LOCK)"

lock: env ## resolve the locks again, from pyproject.toml
	@PATH="$(abspath $(BIN)):$$PATH" sh locks/lock.sh

repro: env ## run the pipeline; stages that are up to date do not run
	@$(BIN)/gradtrail repro

test: env ## the tests, in about four minutes on two cores
	@COMPILE_FAST=1 $(BIN)/python -m pytest -q -n auto --dist loadscope --no-loadscope-reorder

test-slow: env ## the slow tests, in 8 minutes on two cores; `.ci/run` is check, gate, test and these
	@$(BIN)/python -m pytest -q -n auto --dist loadscope --no-loadscope-reorder -m "slow and not nightly" $(SLOW)

nightly: env ## what takes longer: random kills, long histories, many experiments at once
	@bash tests/nightly.sh

check: env ## ruff (lint and format), mypy, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

gate: env ## compare costs of compiled functions with the accepted ones
	@$(BIN)/gradtrail gate

docs: env ## the site of the docs, with search, in .gradtrail/site
	@log=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file deploy/mkdocs.yml 2>&1) || { echo "$$log"; exit 1; }
	@echo "docs: .gradtrail/site; 'python3 -m http.server -d .gradtrail/site' serves it, with search"

format: env ## format the code with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

sync: env ## create the missing MLflow runs of all states, of commits and experiments
	@$(BIN)/gradtrail sync

audit: env ## look for wrong labels: a pipeline of its own, in 3 minutes on two cores (AMD Zen 5)
	@$(BIN)/gradtrail repro pipeline/audit/dvc.yaml

privacy-audit: env ## audit the private training of params.yaml with canaries: a pipeline of its own
	@$(BIN)/gradtrail repro pipeline/privacy_audit/dvc.yaml

what-if: env ## predict what mistakes would be without training examples, and train without them
	@$(BIN)/gradtrail what-if

ui: env ## the MLflow UI; prints the link to the training runs. PORT=5001 chooses another port than 5000
	@$(BIN)/gradtrail ui --port $(or $(PORT),5000)

compare: env ## compare ways of training over seeds: NAME=precision, SEEDS=0,1,2, JOBS=1; without NAME list the entries
	@$(BIN)/gradtrail compare $(NAME) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(JOBS),--jobs $(JOBS))

bench: env ## what everything costs, beside its peers; a table and a JSON file each, in less than three hours
	@$(BIN)/python -m benchmarks.pipeline
	@$(BIN)/python -m benchmarks.training
	@$(BIN)/python -m benchmarks.per_example_gradients
	@$(BIN)/python -m benchmarks.dialects
	@$(BIN)/python -m benchmarks.what_if
	@$(BIN)/python -m benchmarks.private_training
	@$(BIN)/python -m benchmarks.streaming
	@$(BIN)/python -m benchmarks.tracking
	@$(BIN)/python -m benchmarks.many_runs
	@$(BIN)/python -m benchmarks.privacy_audit
	@$(BIN)/python -m benchmarks.serving
	@$(BIN)/python -m benchmarks.serving.predicting

clean: ## remove the environment and all caches, but no results
	@rm -rf $(VENV) .gradtrail .outs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.dvc/*' -prune -exec rm -rf {} +
