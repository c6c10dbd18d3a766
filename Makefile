# `make up` starts everything on this machine; `make test` runs what continuous integration runs; `make` alone prints this list.
.DEFAULT_GOAL := help
.PHONY: help up test test-engines check docs wheel clean

# Passed on to the command, for example: make up ARGS="--port 9000"; make test ARGS="-k flight"
ARGS ?=

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

# `exec`, so that a signal to make reaches tidegate itself and nothing stands between.
up: ## install what is missing, start database, engine, embedder and gateway, print a key and a curl line
	@scripts/setup.sh
	@exec .venv/bin/tidegate up $(ARGS)

test: ## install what is missing and run everything that continuous integration runs
	@scripts/setup.sh test
	@scripts/test.sh $(ARGS)

test-engines: ## run the engine contract against a real vLLM and a real Triton; the first time it fetches 4 GB
	@scripts/setup.sh test
	@scripts/test-engines.sh $(ARGS)

check: ## the quick half of `make test`: lint, types, import rules
	@scripts/setup.sh test
	@scripts/test.sh --no-pytest

docs: ## write the pages that come from the code anew: references and the lists of ARCHITECTURE.md
	@scripts/setup.sh
	@.venv/bin/python scripts/reference.py
	@.venv/bin/python scripts/architecture.py

wheel: ## build dist/tidegate-*.whl and the source archive
	@scripts/setup.sh test
	@.venv/bin/python -m build --no-isolation

clean: ## remove the environment and caches; the data folder stays
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
