# Everything a developer or a newcomer runs. `make` alone lists it.
PYTHON := .venv/bin/python
ARGS ?=
MACHINES ?=
SEEDS ?= 200

BENCHES := takeover noop step place discover regulator fleet metrics

.DEFAULT_GOAL := help
.PHONY: help setup test-programs setup-bench demo models test check format proto proto-check lock \
	package sim test-unit test-contract test-integration test-faults test-machines test-guest test-rollout \
	guest-arm64 alerts dashboards lint-ansible bench \
	$(BENCHES:%=bench-%) clean

help: ## This list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## /\1\t/' | \
		while IFS="$$(printf '\t')" read -r name what; do printf '  %-18s %s\n' "$$name" "$$what"; done
	@printf '  %-18s %s\n' 'bench-NAME' 'One benchmark: $(BENCHES); ARGS="--quick --peer ray"'

setup: ## Put everything that is needed into .venv, from nothing; fast when it is there
	@tools/setup.sh

setup-bench: ## The same, with the peers that benchmarks compare against
	@tools/setup.sh bench

models: setup ## Fetch the model of the demo and the tests
	@$(PYTHON) -m corefleet.models fetch qwen2.5-coder-0.5b

demo: models ## Start a fleet, run an agent, kill the node that runs it, see it go on
	@.venv/bin/agentctl demo $(ARGS)

test-programs:
	@tools/test_programs.sh

test: models test-programs ## Set up and run all tests
	@$(PYTHON) -m pytest $(ARGS)

check: setup ## Formatting, lint, types, generated code
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@$(PYTHON) -m tools.proto --check
	@.venv/bin/mypy
	@$(MAKE) --no-print-directory lint-ansible

lint-ansible: setup ## Roles and playbooks against ansible-lint's strictest profile
	@cd ansible && PATH="$(CURDIR)/.venv/bin:$$PATH" ansible-lint --offline -q

format: setup ## Format the code and apply the safe fixes
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

proto: setup ## Generate corefleet/rpc from proto/
	@$(PYTHON) -m tools.proto

proto-check: setup ## Say whether corefleet/rpc is what proto/ makes
	@$(PYTHON) -m tools.proto --check

lock: ## Install the newest versions that pyproject.toml allows and write constraints.txt
	@tools/lock.sh

test-unit: setup test-programs ## Pure tests, no servers
	@$(PYTHON) -m pytest tests/unit $(ARGS)

test-contract: setup test-programs ## Each protocol against all of its implementations
	@$(PYTHON) -m pytest tests/contract $(ARGS)

test-integration: models ## Real etcd, NATS and engine on free ports
	@$(PYTHON) -m pytest tests/integration $(ARGS)

test-faults: models ## Real processes killed, frozen and cut off (as root); CI_LONG=1: for 30 s, too
	@$(PYTHON) -m pytest tests/faults $(ARGS)

test-guest: setup test-programs ## A virtual machine with systemd and four NUMA nodes; COREFLEET_GUEST=skip skips
	@$(PYTHON) -m pytest tests/guest $(ARGS)

test-rollout: setup test-programs ## Ansible on a bare virtual machine, to a task that ran; takes many minutes
	@COREFLEET_ROLLOUT=1 $(PYTHON) -m pytest tests/rollout $(ARGS)

package: setup ## Make the archive that hosts are installed from, in dist/
	@$(PYTHON) -m tools.package $(ARGS)

guest-arm64: setup ## Discovery and binding in an emulated aarch64; builds its image for 10 minutes
	@$(PYTHON) -m tools.guest smoke-arm64

sim: setup ## Simulated clusters with faults drawn from seeds; SEEDS=10000 for more
	@$(PYTHON) -m tests.sim --seeds 0-$$(($(SEEDS) - 1)) $(ARGS)

test-machines: setup ## Discovery on recorded machines; MACHINES=DIR for a folder of your own
	@COREFLEET_MACHINES="$(MACHINES)" $(PYTHON) -m pytest tests/machines $(ARGS)

alerts: setup test-programs ## Check and test metrics, rules, alerts and dashboards with promtool
	@$(PYTHON) -m pytest tests/unit/tools/test_alerts.py tests/unit/tools/test_metric_names.py $(ARGS)

dashboards: ## Make the dashboards' files, and draw their pictures from a real run of 75 s
	@tools/setup.sh dashboards
	@$(PYTHON) -m tools.dashboards write
	@$(PYTHON) -m tools.dashboards render $(ARGS)

bench: ## List the benchmarks
	@printf 'make bench-%s\n' $(BENCHES)

$(BENCHES:%=bench-%): bench-%: setup-bench
	@$(PYTHON) -m tools.bench $* $(ARGS)

clean: ## Remove .venv and what tools left behind; the cache of wheels and models stays
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
