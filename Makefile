# One place for every command that a person or CI runs. `make demo` and `make test`
# need nothing but Python 3.11+ and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: venv demo test test-long lint typecheck model clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV), which takes a minute or two ..."
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[worker,cpu,embedded,api,test]'
	touch $(STAMP)

model: $(STAMP)
	$(BIN)/headwater model fetch-demo

demo: model
	$(BIN)/headwater demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy sees the packages under their installed names through a folder of links.
typecheck: $(STAMP)
	ops/typing-links
	MYPYPATH=.typing $(BIN)/mypy -p headwater.schemas -p headwater.producer -p headwater.worker

# One process a core, one BLAS thread each; a file's tests stay together, as they share a model.
TEST_PROCESSES := MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 \
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --durations 40

test: lint typecheck model
	$(TEST_PROCESSES) -m "not long"

test-long: model
	$(TEST_PROCESSES) --timeout 3600

clean:
	rm -rf $(VENV) .typing build dist *.egg-info
