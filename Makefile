# What CI runs, by the same names. PYTHON is an environment with flsv[dev]; `make install` makes one in .venv.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python)
export OMP_NUM_THREADS ?= 1
# pip would compile all of torch, a minute for each environment. What a test imports is compiled then, and kept.
export PIP_COMPILE ?= 0
unexport PYTHONDONTWRITEBYTECODE

UV = $(PYTHON) -m uv pip

.PHONY: help install check lint workflows format types layers size test test-part collected slow coverage notebooks docs readme lowest conformance libraries wheel-test release constraints networks flower flower-oldest nvflare cuda device emulated ci

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: ## a virtual environment in .venv with all that is needed
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs]'

check: lint types layers workflows ## all that needs no test

lint: ## style and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: ## format, and mend what can be mended
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# `pipx run zizmor --offline .github` looks for weaknesses in them, too.
workflows: ## the hosted workflows and other files in .github, and CITATION.cff, against their schemas
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/wish.yml
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

types: ## mypy
	$(PYTHON) -m mypy

layers: ## who may import whom
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

size: ## tokens of each room and wing
	$(PYTHON) tools/house.py

# Two at a time, and a file's tests one after the other: they share what is made once.
test: ## the tests and doctests but the slow ones
	$(PYTHON) -m pytest -n 2 --dist loadfile

# PART is a file of flsv without .py, or a class. Only files that are called so or name it are collected, and what is
# checked of all parts.
WITHOUT_LINES = $(subst _,,$(PART))
PART_FILES = $(shell find flsv -name "*$(PART)*.py"; grep -rliE "$(PART)|$(WITHOUT_LINES)" tests --include=test_*.py)
test-part: ## what concerns one part, slow tests too, in about a minute: make test-part PART=fedexp
	$(PYTHON) -m pytest -m "slow or not slow" -k "$(PART) or $(WITHOUT_LINES)" $(PART_FILES) tests/testing

cuda: ## all that a person with a GPU is asked for: numbers against the CPU's, and what fits cost
	$(PYTHON) -m pytest -m cuda tests/device
	$(PYTHON) tools/costs.py round/lenet round/lenet100 coalitions/lenet8 --accelerator gpu

# torch knows one such device in a process, which g++ compiles at its first import.
ON_EMULATED = tests/testing/test_parts.py \
  tests/retraining/test_retrain.py tests/federation/test_resume.py tests/compat/test_trainer.py tests/games/test_coalition.py \
  tests/sampling tests/valuation
device: ## federations on an emulated accelerator beside the CPU's
	@if command -v g++ > /dev/null; then FLSV_EMULATED=1 PYTHONPATH=tests $(PYTHON) -m pytest tests/device; \
	else echo "skipped: g++ compiles the emulated accelerator, and is not here"; fi

emulated: device ## the same, and a part of the tests with each Trainer on the emulated accelerator
	@if command -v g++ > /dev/null; then \
	  FLSV_EMULATED=1 PYTHONPATH=tests $(PYTHON) -m pytest -p device.on_emulated $(ON_EMULATED); fi

# Workers begin at the same time, and each would compile torch, flsv and the tests for itself: two thirds of what it takes
# until its first test.
collected: ## the tests, collected, so that what they import is compiled
	@output=$$($(PYTHON) -m pytest -q --collect-only 2>&1) || { echo "$$output" | tail -n 60; exit 1; }

SLOW ?= slow
ROWS ?=
# Three at a time on two cores: slow tests wait for processes, ranks and clocks. No doctest is slow.
slow: ## the slow tests
	$(PYTHON) -m pytest -n 3 --dist loadfile --durations=40 -m "$(SLOW)" $(ROWS) tests

# Branches and coverage slow tests down, so it is measured on the fast ones, and reported only: not part of ci.
coverage: ## lines reached by the fast tests, as a report
	$(PYTHON) -m pytest -q --cov=flsv --cov-report=term:skip-covered \
	  tests/functional tests/metrics tests/aggregation tests/server tests/round tests/sampling \
	  tests/federation/test_federated_loop.py tests/federation/test_lightning_features.py

notebooks: ## the lessons of docs/notebooks, run, with what they print and draw
	$(PYTHON) tools/docs_render.py

docs: ## the site, into site/; warnings are errors
	$(PYTHON) -m mkdocs build --quiet

.venv-lowest/made: pyproject.toml
	rm -rf .venv-lowest
	python3 -m venv .venv-lowest
	$(UV) install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e '.[test]'
	touch $@

lowest: .venv-lowest/made ## a small part of the tests with the lowest versions of pyproject.toml, in an environment of its own
	PYTHON=.venv-lowest/bin/python tools/every_command.sh .venv-lowest/runs
	.venv-lowest/bin/python -m pytest -q tests/functional tests/metrics/test_coalition_value.py \
	  tests/federation/test_federated_loop.py tests/federation/test_lightning_features.py \
	  tests/cli tests/compat tests/tables tests/vmap/test_row_training.py

conformance: ## values and errors against shapiq, dp-accounting and POT, in an environment of their own
	rm -rf .venv-conformance
	python3 -m venv .venv-conformance
	.venv-conformance/bin/python -m pip install --quiet --disable-pip-version-check -e '.[conformance]'
	.venv-conformance/bin/python -m pytest tests/conformance

libraries: ## modules of fifteen public libraries against loops by hand, in an environment of their own
	rm -rf .venv-libraries
	python3 -m venv .venv-libraries
	.venv-libraries/bin/python -m pip install --quiet --disable-pip-version-check -e '.[libraries]'
	.venv-libraries/bin/python -m pytest tests/compat/test_kinds.py -m long

.venv-release/made: pyproject.toml
	rm -rf .venv-release
	python3 -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check build twine check-wheel-contents
	touch $@

# Not part of ci: installing torch into one more environment takes minutes.
DIST = .venv-wheel/dist
wheel-test: .venv-release/made ## sdist and wheel, checked; the wheel, installed elsewhere with hard dependencies alone: every command
	rm -rf .venv-wheel $(DIST)
	python3 -m venv .venv-wheel
	.venv-release/bin/python -m build --outdir $(DIST)
	.venv-release/bin/python -m twine check --strict $(DIST)/*
	.venv-release/bin/check-wheel-contents $(DIST)/*.whl
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check $(DIST)/*.whl
	.venv-wheel/bin/python -m pip check --disable-pip-version-check
	.venv-wheel/bin/python -I tools/installed_wheel.py
	env -u PYTHONPATH PYTHON=.venv-wheel/bin/python tools/every_command.sh .venv-wheel/runs

release: .venv-release/made ## all of a release up to the upload, into dist/: RELEASING.md
	$(PYTHON) tools/release.py $(TAG)
	$(MAKE) wheel-test DIST=dist

constraints: ## constraints.txt: the versions that flsv[dev,docs] has today
	$(UV) compile --quiet --upgrade --no-annotate --custom-compile-command "make constraints" --output-file constraints.txt \
	  --extra dev --extra docs pyproject.toml

FLOWER_ENVIRONMENT = rm -rf .venv-flower && python3 -m venv .venv-flower \
	&& .venv-flower/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,flower]'

# What README's two commands install, by pip, as a user does. CI's other environment finds torch here, which is larger than
# all else together. The versions of its own packages are chosen together, those that Flower's pins allow.
README_START = $$(grep '^pip install .* && flsv' README.md)
README_TESTS = $$(grep '^pip install .* && pytest' README.md)
.venv-readme/made readme: export PATH := $(CURDIR)/.venv-readme/bin:$(PATH)
.venv-readme/made: pyproject.toml README.md
	rm -rf .venv-readme
	python3 -m venv .venv-readme
	command="$(README_START)"; bash -ec "$${command%% &&*}"
	command="$(README_TESTS)"; bash -ec "$${command%% &&*}"
	touch $@

.venv-ci/made: .venv-readme/made
	rm -rf .venv-ci
	python3 -m venv .venv-ci
	printf 'torch\ntorchvision\n' > .venv-ci/of-readme.txt
	.venv-ci/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.13'
	ls -d $(CURDIR)/.venv-readme/lib/python*/site-packages > "$$(ls -d .venv-ci/lib/python*/site-packages)/readme.pth"
	UV_CONSTRAINT="$(PIP_CONSTRAINT)" .venv-ci/bin/python -m uv pip install --quiet --python .venv-ci/bin/python \
	  --excludes .venv-ci/of-readme.txt -e '.[dev,docs,flower,nvflare]' 'flwr[simulation]'
	touch $@

NVFLARE ?= nvflare
nvflare: .venv-ci/made ## the tests of NVIDIA FLARE, in CI's environment
	.venv-ci/bin/python -m pytest -m "$(NVFLARE)" tests/sites/nvflare

FLOWER ?= flower
flower: .venv-ci/made ## the tests of Flower, in CI's environment, which has its pins
	.venv-ci/bin/python -m pytest -n 2 --dist loadfile -m "$(FLOWER)" tests/sites/flower tests/outside/test_flower.py tests/sites/test_template.py

# A target without prerequisites, which make begins first: their tests mostly wait for each other.
networks: ## flower and nvflare
	$(MAKE) flower
	$(MAKE) nvflare

# Not part of ci: two minutes, mostly of installing.
flower-oldest: ## a real deployment on the oldest release of Flower that flsv allows
	$(FLOWER_ENVIRONMENT) 'flwr==1.41.0'
	.venv-flower/bin/python -m pytest -m flower tests/sites/flower/test_deployment.py

# A module that only `dev` installs would be found here and nowhere else.
readme: .venv-readme/made ## README's two commands as they stand, in an environment of their own: the quickstart, the tests
	bash -ec "$(README_START)"
	bash -ec "$(README_TESTS)"

# A part with the seconds that it takes.
timed-%:
	@begin=$$(date +%s); $(MAKE) --no-print-directory $* && echo "== $*: $$(($$(date +%s) - begin)) s"

# The slow tests take longest, so they begin first, and all else is run beside them: a core is idle at the end only. A slow
# test builds the site.
# The hosted workflow runs all slow tests, `lowest`, `flower-oldest` and all of `emulated` besides, on machines of their own.
# Of tests that are marked by_turn each fifth row runs, after the next commit the next ones. The number of commits walks
# through all of them; a commit's hash would leave some of them out for long.
TURN ?= $(shell git rev-list --count HEAD 2> /dev/null || echo 0)
ci: lint collected ## all of it
	$(MAKE) --jobs=2 --output-sync=target $(addprefix timed-,slow networks readme device types layers workflows) \
	  SLOW="slow and not long" ROWS="--turn $(TURN)" NVFLARE="nvflare and not long" FLOWER="flower and not long"
