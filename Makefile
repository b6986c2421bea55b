.PHONY: help demo test test-slow test-core fuzz golden docs docs-serve lint house house-write format bench vllm vllm-stop test-vllm test-litellm bench-vllm bench-quality bench-agents bench-workflows bench-hostile bench-bills bench-states bench-states-vllm bench-calls bench-query-engines bench-estimates bench-never-a-loss bench-distributed bench-workers bench-pools soak clean notebooks notebooks-write release-check test-lowest

PYTHON ?= python3
VENV := .venv
DATA = $(or $(CTXREUSE_DATA),.cache/stand-in-data)
BIN := $(VENV)/bin
PORT ?= 8000
MODEL ?= smollm2-135m-instruct
SECONDS ?= 60
HOURS ?= 2
VLLM := $(BIN)/python tools/vllm_server.py
# Python keeps what it compiled, whatever it is told elsewhere: tests start it often
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
CORE_TESTS := $(addprefix tests/,adapters cache context memory planning policy sharing words)
# a server of the user's own is used as it is
START_ENGINE = test -n "$$CTXREUSE_BASE_URL" || $(VLLM) start --model $(MODEL) --port $(PORT)
PUBLIC_DATA = $(BIN)/python benchmarks/public_data
ENGINE_BENCH = $(PUBLIC_DATA) bench jsonl --base-url "$(ENGINE_URL)" --part policies --answer-tokens 1 \
	--policy "papers' order, online" --policy "ctxreuse, online"
ENGINE_URL = $${CTXREUSE_BASE_URL:-http://127.0.0.1:$(PORT)/v1}

help:  ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 17

$(VENV)/base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ctxreuse needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/dev: $(VENV)/base
	$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev --group bench --group docs --group instrumentations
	touch $@

$(VENV)/docs: $(VENV)/base
	$(BIN)/python -m pip install --quiet --group docs
	touch $@

$(VENV)/notebooks: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --group notebooks
	touch $@

demo: $(VENV)/base  ## the main job on built-in data: tables, and a plot in demo-output/
	$(BIN)/ctxreuse demo

test: $(VENV)/dev  ## the tests but for slow ones, with few examples of each property
	$(PYTEST) -m 'not slow' --junitxml .cache/test.xml

test-slow: $(VENV)/dev  ## the slow tests, and many examples of each property; new ones unless CI=1
	$(PYTEST) -m 'slow or hypothesis' --hypothesis-profile many

test-core: $(VENV)/dev  ## those of `test` that need no framework
	$(PYTEST) -m 'not slow' $(CORE_TESTS)

fuzz: $(VENV)/dev  ## hostile inputs of a new seed; from SECONDS=600 on the properties, too; SEED=0
	$(BIN)/python tools/fuzz.py --seconds $(SECONDS) $(SEED:%=--seed %)

golden: $(VENV)/dev  ## whether plans and prompts are as they were; the data in $$CTXREUSE_DATA too
	$(BIN)/python tools/golden.py check

docs: $(VENV)/docs  ## the documentation, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/docs  ## the documentation at http://127.0.0.1:8001, built anew as it is edited
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict --dev-addr 127.0.0.1:8001

lint: $(VENV)/dev  ## formatting, style, types, directions of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

house: $(VENV)/dev  ## the gate: size, layout, names and journeys of the code, each under its ceiling
	$(BIN)/python tools/house.py

house-write: $(VENV)/dev  ## write numbers that got lower down as the new ceilings
	$(BIN)/python tools/house.py --brief --write

format: $(VENV)/dev  ## mend formatting and what of style can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev  ## speed, and hit ratios on the traces in $$CTXREUSE_DATA
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/hit_ratio.py

bench-bills: $(VENV)/dev  ## input bills of hosted caches, online and batch, in several orders
	$(BIN)/python benchmarks/bills.py --orders

bench-states: $(VENV)/dev  ## hit ratios on engines that keep states at junctions, with primes and without
	$(BIN)/python benchmarks/states.py

bench-states-vllm: $(VENV)/dev  ## what a real vLLM with windows reports of that; REQUESTS=200
	$(VLLM) start --model windows --port 8123 --kv-cache-tokens 3000000
	$(BIN)/python benchmarks/states.py --server http://127.0.0.1:8123/v1 --requests $(or $(REQUESTS),200); status=$$?; $(VLLM) stop --port 8123; exit $$status

bench-hostile: $(VENV)/dev  ## time against input size; floods of events, dying engines, forks
	$(BIN)/python benchmarks/input_size.py
	$(BIN)/python benchmarks/hostile_neighbours.py all

vllm: $(VENV)/base  ## a small model on a real vLLM server, without a GPU; PORT=8000 MODEL=qwen2.5-coder-0.5b
	$(VLLM) start --model $(MODEL) --port $(PORT)

vllm-stop: $(VENV)/base  ## stop the servers that `make vllm` started
	$(VLLM) stop

test-vllm: $(VENV)/dev  ## the tests that need a real engine, on servers of their own
	@test -n "$$CTXREUSE_BASE_URL" || $(VLLM) model
	$(BIN)/python -m pytest tests_vllm

bench-calls: $(VENV)/dev  ## how long calls of a wrapped model wait for each other, in tasks and threads
	$(BIN)/python benchmarks/model_calls.py

bench-query-engines: $(VENV)/dev  ## tokens computed for chains and query engines, on the data in $$CTXREUSE_DATA
	$(BIN)/python benchmarks/query_engines.py

bench-estimates: $(VENV)/dev  ## what estimate says of applications, and what an engine counts once they are changed so
	$(BIN)/python benchmarks/estimated_applications.py

bench-never-a-loss: $(VENV)/dev  ## whether any of many programs computes more tokens with ctxreuse than without
	$(BIN)/python benchmarks/never_a_loss.py

bench-distributed: $(VENV)/dev  ## 100,000 requests in partitions on Ray and all at once
	$(BIN)/python benchmarks/distributed.py

soak: SECONDS = 900
soak: $(VENV)/dev  ## a planner under everything at once; times are judged from SECONDS=900 on
	$(BIN)/python benchmarks/soak.py --seconds $(SECONDS)

bench-workers: $(VENV)/dev  ## worker processes that use one engine, alone and with a shared log
	$(BIN)/python benchmarks/workers.py

bench-pools: $(VENV)/dev  ## engine pools of several processes, alone and with a shared log
	$(BIN)/python benchmarks/pool_workers.py

bench-vllm: $(VENV)/dev $(DATA)  ## hit ratios and times to first token on a real engine, on the data in $$CTXREUSE_DATA
	@$(START_ENGINE)
	$(ENGINE_BENCH) --policy "ctxreuse, batch" --data "$(DATA)/xquad" --k 5 --requests 40 -o bench-output/xquad
	$(ENGINE_BENCH) --policy "ctxreuse, batch" --data "$(DATA)/locomo" --k 20 --requests 40 --independent --in-order -o bench-output/locomo
	$(ENGINE_BENCH) --data "$(DATA)/mtrag" --k 5 --requests 24 -o bench-output/mtrag
	$(BIN)/python benchmarks/leader_first.py --base-url "$(ENGINE_URL)"

bench-quality: $(VENV)/dev  ## whether answers stay as good, on a real engine; MODEL=qwen2.5-coder-0.5b HOURS=2
	@$(START_ENGINE)
	$(PUBLIC_DATA) quality --base-url "$(ENGINE_URL)" --hours $(HOURS) -o bench-output/quality \
		--answers benchmarks/answers/$(MODEL).jsonl

# without the public data
.cache/stand-in-data: $(VENV)/dev
	$(BIN)/python benchmarks/stand_in_data.py $@

bench-agents: $(VENV)/dev  ## agents over emulated engines, on the traces in $$CTXREUSE_DATA, and over two real ones
	$(BIN)/python benchmarks/agents.py
	$(BIN)/python benchmarks/agent_loss.py
	@test -n "$$CTXREUSE_BASE_URL" || $(VLLM) start --model $(MODEL) --port $(PORT)
	@test -n "$$CTXREUSE_BASE_URL" || $(VLLM) start --model $(MODEL) --port $$(($(PORT) + 1))
	$(BIN)/python benchmarks/agents_server.py $${CTXREUSE_BASE_URL:-http://127.0.0.1:$(PORT)/v1 http://127.0.0.1:$$(($(PORT) + 1))/v1}

bench-workflows: $(VENV)/dev  ## RAG workflows on a large index, the hot tier, and a real engine
	$(BIN)/python benchmarks/workflow_index.py
	$(BIN)/python benchmarks/workflow_index.py --loads --vectors 1000000 --repeats 2 --requests 40
	$(BIN)/python benchmarks/workflow_tier.py
	@$(START_ENGINE)
	$(BIN)/python benchmarks/workflows_server.py --base-url "$(ENGINE_URL)"

notebooks: $(VENV)/notebooks  ## execute the notebooks
	$(BIN)/python tools/notebooks.py run

notebooks-write: $(VENV)/notebooks  ## execute the notebooks and write what they show into them
	$(BIN)/python tools/notebooks.py write

$(VENV)-litellm/ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --editable '.[litellm]' --group litellm-tests
	touch $@

test-litellm: $(VENV)-litellm/ready  ## the hook in LiteLLM's proxy, in an environment of its own: it wants an older rich
	$(<D)/bin/python -m pytest tests/serving/test_litellm_hook.py

$(VENV)/release: $(VENV)/base
	$(BIN)/python -m pip install --quiet --group release
	touch $@

release-check: $(VENV)/release  ## build, install with each extra alone, use it; then test-lowest; DIST=dist keeps it
	$(BIN)/python tools/release_check.py $(DIST:%=--dist %)
	$(MAKE) test-lowest

test-lowest: $(VENV)/release  ## the test suite with the lowest versions that pyproject.toml allows
	$(BIN)/python tools/lowest_versions.py

clean:  ## remove the environment and everything that was made
	test ! -x .venv-vllm/bin/python || .venv-vllm/bin/python tools/vllm_server.py stop
	rm -rf $(VENV) .venv-vllm $(VENV)-litellm demo-output dist site bench-output .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
