# Everything, set-up included: `make demo`, `make test` and `make docs`.
PYTHON ?= python3
export PYTHON
BIN := .venv/bin
INPUTS := pyproject.toml constraints.txt tools/setup.sh

.PHONY: demo test lint docs clean

demo: .venv/demo-ready  ## train a small GPT twice, with standard attention and with tilewise
	$(BIN)/tilewise demo

test: .venv/test-ready lint  ## linters, types, import contracts, tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not gpu"

lint: .venv/test-ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: .venv/docs-ready  ## the documentation, into out/site
	$(BIN)/mkdocs build --strict

.venv/demo-ready: $(INPUTS)
	tools/setup.sh bench
	@touch $@

.venv/test-ready: $(INPUTS)
	tools/setup.sh test,triton,bench,dev,docs
	@touch $@

.venv/docs-ready: $(INPUTS)
	tools/setup.sh docs
	@touch $@

clean:
	rm -rf .venv out
