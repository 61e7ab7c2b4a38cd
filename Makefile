# make demo | alarm | test | bench | lint | fmt | generate | servers | clean; each creates .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of this torch is enough for everything here; PyPI's default would bring gigabytes of CUDA on Linux.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
SCENARIO ?= frozen-layer

.PHONY: demo alarm test bench lint fmt generate servers clean
.DELETE_ON_ERROR:

$(VENV)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: $(VENV)/installed  ## train the demo and look inside
	$(BIN)/otel-train demo $(DEMO_ARGS)

alarm: $(VENV)/installed servers  ## train a broken demo, watched by a real Prometheus and Alertmanager
	PATH="$(CURDIR)/.servers/current/usr/bin:$$PATH" $(BIN)/otel-train demo --stack --scenario $(SCENARIO) $(DEMO_ARGS)

servers:  ## unpack Prometheus 3.5 and 2.42, Alertmanager and Docker Compose
	scripts/get-servers.sh .servers

test: $(VENV)/installed servers  ## all tests
	$(BIN)/pytest $(PYTEST_ARGS)

bench: $(VENV)/installed  ## what monitoring costs, in half an hour; writes tests/bench/results and README's table
	$(BIN)/python -m tests.bench --out tests/bench/results --readme README.md $(BENCH_ARGS)

lint: $(VENV)/installed  ## style, types, import contracts, generated files
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/otel-train generate --check

fmt: $(VENV)/installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

generate: $(VENV)/installed
	$(BIN)/otel-train generate

clean:
	rm -rf $(VENV) .servers build dist
