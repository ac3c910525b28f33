# The door to the project. Every recipe first makes sure that .venv is there and current.
.PHONY: demo demo-local purge test check lock down clean setup help
CACHE = $(or $(ELASTICMOE_CACHE),$(HOME)/.cache/elasticmoe)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: setup  ## Kubernetes on this machine, the operator, a tiny model served from one resource, a burst; CLUSTER=existing
	@[ "$(CLUSTER)" = existing ] || { cluster/setup && images/build && cluster/up; }
	@. .ci/env && .venv/bin/python -m bench.cluster_demo

demo-local: setup  ## the same burst without Kubernetes: two servers on this machine
	@. .ci/env && .venv/bin/python -m bench.demo

test:  ## everything CI runs: checks, unit and engine tests, both demos, tests on the cluster
	@.ci/run

check:  ## format, lint, types, import contracts and the fast tests, in under a minute
	@.ci/run format lint types imports fast

setup:  ## what demo, test and check need: Debian packages, the shared environment, .venv
	@.ci/setup

LOCK = $$(ls -t $(CACHE)/uv-*/bin/uv | head -n 1) pip compile --quiet --universal --python-version 3.11 \
	--generate-hashes --no-header --no-annotate
lock: setup  ## resolve pyproject.toml into the lock files; add UPGRADE=1 to take newer versions
	@$(LOCK) $(if $(UPGRADE),--upgrade) --group installer -o requirements-uv.txt
	@$(LOCK) $(if $(UPGRADE),--upgrade) pyproject.toml --extra operator --group cpu --group dev -o requirements-cpu.txt

down:  ## remove what the demos left: the cluster, the model, the logs (on an existing cluster: all that the demo made there)
	@if [ "$(CLUSTER)" = existing ]; then . .ci/env && .venv/bin/python -m bench.cluster_demo --remove; else cluster/down; fi
	rm -rf $(CACHE)/models build/demo build/cluster-demo

purge: down  ## down, and the cache folder with all that was built and downloaded
	@images/build --clean
	rm -rf $(CACHE)

clean:  ## remove .venv and every tool's cache; the shared environments stay in the cache folder
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
