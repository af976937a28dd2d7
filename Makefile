# Two commands: `make run` does the main job on real data, `make test` proves the project. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The index of torch's CPU wheels, or a folder of them (the CUDA build is gigabytes larger): make run TORCH_WHEELS=URL
TORCH_WHEELS ?=
INDEX := $(if $(TORCH_WHEELS),--extra-index-url '$(TORCH_WHEELS)')

# OpenMP's threads wait for work by spinning. Beside other tests' processes on the same cores they keep the processors
# from them: fitting a small model took 40 s instead of 2.
test prove test-torch-oldest: export OMP_WAIT_POLICY := passive
# Hundreds of tests start processes, which would otherwise compile every module of the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check prove test-torch-oldest rehearse bench repetitions docs clean cluster-proof gpu

run: $(READY)
	$(BIN)/pyflyte run workflows/training.py train_and_export

# Two files of tests at a time, in the order of tests/conftest.py, and mypy during the first of them. All are run,
# whatever fails; mypy's output comes last. ARGS="--durations 30" lists the slowest tests.
test: $(READY)
	@failed=0; types=$$(mktemp); \
	nice $(BIN)/mypy >$$types 2>&1 & mypy=$$!; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/python -m pytest -m "not prove" --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS) || failed=1; \
	wait $$mypy || failed=1; \
	cat $$types; rm -f $$types; exit $$failed

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two at a time but for those that compare times. All are run, whatever fails.
prove: $(READY)
	$(BIN)/python -m pytest -m "prove and not alone" --numprocesses 2 --dist worksteal; shared=$$?; \
	$(BIN)/python -m pytest -m "prove and alone"; alone=$$?; \
	$(MAKE) --no-print-directory test-torch-oldest && exit $$((shared + alone))

# The rehearsal of `make gpu` and the tests of models, trainings and exports, with the oldest torch that pyproject.toml
# allows. Its wheel comes from TORCH_INDEX, an index or a folder, or from PyPI (CUDA build: 4 GB with its libraries).
OLDEST := .venv-oldest
TORCH_INDEX ?=
OLDEST_TORCH := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
test-torch-oldest:
	@$(MAKE) --no-print-directory $(OLDEST)/.ready || { echo "not run: no environment with torch $(OLDEST_TORCH)"; exit 2; }
	$(OLDEST)/bin/python -m slipstream gpu-proof --quick --output runs/torch-oldest; checks=$$?; \
	$(OLDEST)/bin/python -m pytest -m "not prove" --numprocesses 2 --dist loadfile tests/models tests/train tests/export \
	&& exit $$checks

# The main workflow of a profile, pod by pod on this machine, with pods that are lost; draws runs/rehearsal.html.
PROFILE ?= a100-spot
rehearse: $(READY)
	$(BIN)/slipstream rehearse $(PROFILE)

# The same promises on your own cluster; ARGS="--project … --domain …", see `slipstream cluster-proof --help`.
cluster-proof: $(READY)
	$(BIN)/slipstream cluster-proof $(PROFILE) --image "$(IMAGE)" $(ARGS)

# On a machine with GPUs, at most 530 s; writes runs/gpu and the README's table. Elsewhere: ARGS=--quick. Where an
# image brings torch and nothing can be fetched: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	$(GPU_PYTHON) -m slipstream gpu-proof --readme README.md $(ARGS)

bench: $(READY)
	$(BIN)/python -m pip install --quiet $(INDEX) --constraint constraints.txt --editable '.[dev,bench]'
	for bench in benchmarks/*.py; do $(BIN)/python $$bench --quick || exit 1; done

# Repetitions of six lines or more, found by pylint; none is wanted.
repetitions: $(READY)
	$(BIN)/python -m pip install --quiet $(INDEX) --constraint constraints.txt --editable '.[dev,bench]'
	$(BIN)/python -m pylint slipstream tasks workflows

# Draws the generated pages again and prints the words of every other page.
docs: $(READY)
	$(BIN)/python -m tests.support.documents

clean:
	rm -rf .slipstream runs .pytest_cache .mypy_cache .ruff_cache *.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Slipstream needs Python 3.11 or newer; try: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(INDEX) --constraint constraints.txt --editable '.[dev]'
	touch $@

$(OLDEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	sed 's/^torch==.*/torch==$(OLDEST_TORCH).*/' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --retries 1 --constraint $(OLDEST)/constraints.txt --editable '.[dev]' \
		$(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)' --find-links '$(TORCH_INDEX)')
	touch $@
