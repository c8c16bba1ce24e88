# make run: set up and run the tiny tier. make test: everything that is tested. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
TIER ?= tiny
SEEDS ?= 0
STUDY_SEEDS ?= 0,1,2
BIN := .venv/bin
STAMP := .venv/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help run study test cluster-packages lint format schema docs docs-check plan diff why pin bench dag report dashboard clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

$(STAMP): envs/requirements-cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; install a newer one or run 'make PYTHON=python3.12 ...'" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing the locked packages into .venv (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r envs/requirements-cpu.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

run: $(STAMP) ## install, run the tier with one seed, print the ledger and the report's path
	@$(BIN)/python -m posttrain.run --config tier=$(TIER) 'seeds=[$(SEEDS)]'

study: $(STAMP) ## the same with the seeds that the README's ledger comes from
	@$(BIN)/python -m posttrain.run --config tier=$(TIER) 'seeds=[$(STUDY_SEEDS)]'

test: $(STAMP) ## every test
	@$(BIN)/python -m pytest

cluster-packages: $(STAMP) ## what the tests of SLURM and DeepSpeed need (root, Debian or Ubuntu); without it they are skipped
	@tests/slurm/cluster.sh install
	@rm -rf .deepspeed
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
		--target .deepspeed -r envs/requirements-deepspeed-cpu.txt

lint: $(STAMP) ## ruff, snakefmt, snakemake --lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

format: $(STAMP) ## apply ruff and snakefmt
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow

schema: $(STAMP) ## write configs/schema/*.json for editors
	$(BIN)/python -m posttrain.schema

docs: $(STAMP) ## regenerate the README's ledger, benchmark table and DAG picture from committed files
	$(BIN)/python -m posttrain.docs

docs-check: $(STAMP) ## fail if the README differs from what `make docs` writes
	$(BIN)/python -m posttrain.docs --check

plan: $(STAMP) ## what a tier would cost: make plan TIER=paper
	@$(BIN)/python -m posttrain.plan --tier $(TIER) --seeds=$(SEEDS)

diff: $(STAMP) ## what differs between two manifests or folders of results: make diff A=... B=...
	@$(BIN)/python -m posttrain.diff "$(A)" "$(B)"

why: $(STAMP) ## what would run and the reason of each job: make why TIER=tiny SEEDS=0 [TARGET=pear]
	@$(BIN)/python -m posttrain.why --tier $(TIER) --seeds=$(SEEDS) --target "$(or $(TARGET),all)"

pin: $(STAMP) ## write the commits of a tier's hub models and data sets (needs network)
	@$(BIN)/python -m posttrain.pin --tier $(TIER)

bench: $(STAMP) ## measure benchmarks/results.json again
	$(BIN)/python benchmarks/bench.py

report: $(STAMP) ## Snakemake's own HTML report: results/<tier>/snakemake-report.zip
	$(BIN)/snakemake all --cores 1 --config tier=$(TIER) 'seeds=[$(SEEDS)]' --report results/$(TIER)/snakemake-report.zip

dashboard: $(STAMP) ## curves, scores and cost so far: results/<tier>/report/dashboard.html (WANDB=1: a W&B workspace too)
	@$(BIN)/python -m posttrain.dashboard --tier $(TIER) --seeds=$(SEEDS) $(if $(WANDB),--wandb)

clean: ## delete results of the tier (asks nothing; environments and downloads stay)
	rm -rf results/$(TIER) logs/$(TIER) benchmarks/jobs/$(TIER)
