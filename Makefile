# What people type: `make demo` and `make test` need python3 (3.10 or later) and make; the rest is fetched.
# Everything else: `make help`.

PYTHON ?= python3
VENV ?= .venv
WORKER ?= simulated
BIN := $(VENV)/bin
INSTALL := -m pip install --quiet --disable-pip-version-check --progress-bar off
PIP := $(BIN)/python $(INSTALL)
# What the benchmark compares with has an environment of its own: its requirements are no business of ours.
PEERS := $(VENV)-peers
DEMO := $(BIN)/python -m miles_router.testing.demo $(if $(KEEP),--keep)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

say = printf '\n==> %s\n' "$(1)"
# Install a Debian package where we may; fail where we may not. RUNLEVEL=1: a service that comes with it is not started.
apt = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && printf '==> apt-get install %s\n' "$(1)" \
	&& export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 && apt-get -qq update && apt-get -qq install -y $(1) >/dev/null; }

# Tests start hundreds of interpreters; without bytecode each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE
# How many processes run tests: `auto` is one for each core, and two for those that wait.
JOBS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(JOBS)
# What each change is tried with on routers of several processes; `make processes` has all.
CHOSEN := tests/e2e/test_forwarding.py tests/faults/test_membership.py -k "hop_by_hop or expects or spelled or drain"

.PHONY: help demo docs test processes nightly heavy fuzz soak unit coverage install lint types imports wheel sglang vllm tokenizers agents clients bench placement npm train

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F '\t' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: $(VENV)/.installed ## rollouts with exact tokens over two workers; WORKER=sglang or vllm takes two real ones, KEEP=1 stays up
	@$(MAKE) --no-print-directory demo-$(WORKER)

test: install sglang tokenizers agents nginx chromium strace ## what a change must pass, in minutes; CI runs it: the source, the tests, short proofs on real SGLang
	@$(call say,tests and checks of the source)
	@$(PYTEST)
	@$(call say,some of them on routers of two processes)
	@$(PYTEST) --processes 2 $(CHOSEN)

processes: install tokenizers agents ## tests that look at a router from outside, on routers of two processes
	@$(call say,tests on routers of two processes)
	@$(PYTEST) --processes 2 -m "not sglang and not static and not clients" tests/e2e tests/faults tests/property

nightly: processes chromium ## the tests without SGLang with many more and always other random cases, and `make processes`
	@$(call say,tests with many random cases)
	@$(PYTEST) --tier nightly -m "not sglang and not static"

heavy: install sglang vllm tokenizers agents clients nginx $(PEERS)/.installed ## storms, the proofs on real SGLang at full length, agents of others
	@$(call say,storms and long proofs)
	@$(PYTEST) --tier heavy -m "sglang or storm or clients"

fuzz: install ## bytes and bodies made up for an hour, held against oracles; FUZZ='--seconds 60'
	@$(BIN)/python -m tests.fuzz --seconds 3600 $(FUZZ)

soak: install ## half an hour of everything at once: nothing may grow, every token is exact; SOAK='--minutes 5'
	@$(BIN)/python -m tests.soak $(SOAK)

unit: install tokenizers agents chromium ## the tests that need no SGLang
	@$(PYTEST) -m "not sglang" tests

train: install ## a small model learns through the router: real SGLang, GRPO, no GPU; TRAIN='--engine vllm --steps 30'
	@$(BIN)/python -m tests.training $(TRAIN)

coverage: install tokenizers agents chromium ## which branches the tests without SGLang take, in the processes that they start too
	@$(call say,tests under coverage)
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -n $(JOBS) -m "not sglang and not static" tests
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

install: $(VENV)/.installed-dev ## the virtual environment with the package and its development tools

wheel: install ## wheel and sdist into dist/, each installed into an empty environment and tried
	@$(call say,the package)
	@rm -rf dist && $(BIN)/python -m build --outdir dist && $(BIN)/python -m twine check --strict dist/*
	@$(PYTEST) tests/packaging

docs: install ## the documentation as a site, in build/site; a broken link fails
	@$(call say,mkdocs)
	@$(BIN)/mkdocs build --quiet --strict

lint: install ## formatting and style
	@$(call say,ruff)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: install ## static types
	@$(call say,mypy)
	@$(BIN)/mypy

imports: install ## who may import whom
	@$(call say,import-linter)
	@$(BIN)/lint-imports

sglang: install npm ## the environment and the models of the real SGLang workers (1.6 GB, cached)
	@$(call say,the SGLang environment)
	@$(BIN)/python tests/sglang/environment.py

vllm: install npm ## the environment and the model of the real vLLM workers (3.4 GB, cached)
	@$(call say,the vLLM environment)
	@$(BIN)/python tests/vllm/environment.py || echo "vLLM could not be installed: nothing is tried on it."

tokenizers: install npm
	@$(BIN)/python -m tests.support.tokenizers >/dev/null

clients: install npm ## an environment for each agent that sessions are tried with (3 GB, cached); CLIENTS='aider' for some
	@$(call say,the environments of agents)
	@$(BIN)/python -m tests.clients.environments $(CLIENTS)

agents: install npm ## agents from npm that tests run (0.8 GB, cached)
	@$(BIN)/python -m tests.support.claude_code >/dev/null
	@$(BIN)/python -m tests.support.codex >/dev/null

bench: install $(PEERS)/.installed bench-tools ## overhead against direct, nginx and three gateways; BENCH='--quick'
	@BENCH_PEERS_PYTHON=$(abspath $(PEERS)/bin/python) $(BIN)/python tests/benchmarks/passthrough.py $(BENCH)

placement: install $(PEERS)/.installed ## one rollout step behind each router and policy, simulated; PLACEMENT='--seeds 1'
	@$(BIN)/python -m tests.benchmarks.placement $(PLACEMENT)

# The parts of the above

.PHONY: demo-simulated demo-sglang demo-vllm bench-tools nginx chromium strace

demo-simulated:
	@$(DEMO)

demo-sglang: npm
	@$(call say,the SGLang environment)
	@set -e; found=$$($(BIN)/python tests/sglang/environment.py); \
	python=$$(echo "$$found" | sed -n 's/^python  *//p'); model=$$(echo "$$found" | sed -n 's/^dense model  *//p'); \
	$(DEMO) --worker sglang --hf-checkpoint "$$model" --worker-command \
	  "'$$python' tests/sglang/launch_worker.py --model-path '$$model' --skip-server-warmup --sleep-on-idle"

demo-vllm: install
	@$(call say,the vLLM environment)
	@set -e; found=$$($(BIN)/python tests/vllm/environment.py); \
	python=$$(echo "$$found" | sed -n 's/^python  *//p'); model=$$(echo "$$found" | sed -n 's/^model  *//p'); \
	$(DEMO) --worker vllm --hf-checkpoint "$$model" --worker-command \
	  "env VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 '$$python' -m vllm.entrypoints.cli.main serve '$$model' \
	  --enable-scale-out --logprobs-mode processed_logprobs --max-model-len 4096 --enforce-eager --seed {number}"

bench-tools:
	@{ command -v nginx && command -v wrk; } >/dev/null || $(call apt,nginx wrk) \
	|| { echo "nginx or wrk is absent: install both (on Debian: apt-get install nginx wrk)."; exit 1; }

nginx:
	@command -v nginx >/dev/null || $(call apt,nginx) || echo "nginx is absent: TLS in front of the router is not tried."

# Tests of pages fail without it: nobody would see that they were left out.
chromium: install
	@$(BIN)/python -m tests.support.browser >/dev/null 2>&1 || $(call apt,--no-install-recommends chromium) || true
	@$(BIN)/python -m tests.support.browser >/dev/null

strace:
	@command -v strace >/dev/null || $(call apt,strace) || echo "strace is absent: the order of syncs is not looked at."

npm:
	@command -v npm >/dev/null || $(call apt,npm) || echo "npm is absent: tokenizers for tests come from it." \
	  "Install it, unless they were fetched before."

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "python3 must be 3.10 or later"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); $(call apt,python3-venv) && $(PYTHON) -m venv $(VENV); }
	@$(PIP) --upgrade pip

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@$(call say,installing miles-router into $(VENV))
	@$(PIP) -e '.[testing,tito]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@$(call say,installing miles-router and its development tools into $(VENV))
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed $@

$(PEERS)/.installed: tests/benchmarks/requirements.txt | $(BIN)/python
	@$(call say,installing what the benchmark compares with into $(PEERS))
	@$(BIN)/python -m venv --clear $(PEERS)
	@while read -r package; do \
	  $(PEERS)/bin/python $(INSTALL) "$$package" || echo "$$package could not be installed: nothing is compared with it."; \
	done < $<
	@touch $@
