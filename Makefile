# Two commands do everything on a fresh machine, set-up included: `make reproduce` and `make test`.
# Extra Hydra overrides go into ARGS: make reproduce ARGS="scale=smoke", make figure FIG=fig08 ARGS="workload=skewed"

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
SUITE  ?= trixie
BIN    := $(VENV)/bin
RUN    := $(BIN)/python
# pip says what it downloads on a terminal, and only errors elsewhere
PIP    := $(BIN)/python -m pip install $$([ -t 2 ] || echo --quiet) --disable-pip-version-check -c constraints.txt
# One test process per core, at most 8 (1 GB each), single-threaded; ARGS="-n 0" runs all in one, e.g. for a debugger.
PARALLEL := -n $(shell cores=$$(nproc); echo $$((cores < 8 ? cores : 8))) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup reproduce figure figures report record record-all reliability smoke notebooks docs test test-slow test-gpu fresh release lint compare check clean

help: ## Show this list
	@echo "Measure and read"; awk -F ':.* ## ' '/^[a-z-]+:.* ## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Develop and record"; awk -F ':.* ### ' '/^[a-z-]+:.* ### / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Stamp files: set-up runs again only when pyproject.toml or constraints.txt changes.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "punica needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": call make with PYTHON=/path/to/python3.11")'
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed: on Debian and Ubuntu install python3-venv"; exit 1; }
	@touch $@

# The packages of this checkout are found from any folder, also with PYTHONSAFEPATH and by a notebook's kernel.
$(VENV)/.path: $(VENV)/.created
	@$(RUN) -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "punica-checkout.pth").write_text(f"{pathlib.Path.cwd()}\n")'
	@touch $@

$(VENV)/.experiments: $(VENV)/.created pyproject.toml constraints.txt | $(VENV)/.path
	@echo "Installing punica and the packages of the experiments (with CUDA 2.9 GB to download, most of it torch; docs/index.md has a smaller way)"
	@$(PIP) -e '.[experiments]'
	@touch $@

$(VENV)/.dev: $(VENV)/.experiments
	@echo "Installing the packages of tests, notebooks and docs"
	@$(PIP) -e '.[dev,notebooks,cluster,docs]'
	@touch $@

setup: $(VENV)/.dev ## Create .venv and install everything, pinned by constraints.txt

reproduce: $(VENV)/.experiments ## Measure every figure on this machine, compare with the paper, draw, judge
	@$(RUN) -m experiments.commands.reproduce $(ARGS)

figure: $(VENV)/.experiments ## Measure and draw one figure: make figure FIG=8, or FIG=ext_moe
	@test -n "$(FIG)" || { echo "Say which figure: make figure FIG=8, or FIG=ext_moe"; exit 2; }
	@$(RUN) -m experiments.commands.reproduce 'figures=[$(FIG)]' $(ARGS)

figures: $(VENV)/.experiments ## Draw the figures again from recorded rows (results/), no measuring
	@$(RUN) -m experiments.commands.figures $(ARGS)

report: $(VENV)/.experiments ## Judge the paper's claims, write report.html: make report ARGS=source=recorded
	@$(RUN) -m experiments.commands.report $(ARGS)

record: $(VENV)/.experiments ### Copy this machine's rows and figures to results/ and figures/, if they are of their commits
	@$(RUN) -m experiments.commands.record $(ARGS)

record-all: $(VENV)/.dev ### Measure all recorded sets, in calls that continue: make record-all HARDWARE=h200 LIMIT=9
	@$(RUN) -m experiments.commands.record_all machine=$(or $(HARDWARE),cpu) limit=$(or $(LIMIT),9) $(ARGS)

reliability: $(VENV)/.dev ### Load, faults, bad input: make reliability ARGS="-k test_faults --size full"
	@$(RUN) -m pytest tests/reliability -m reliability $(ARGS)

smoke: $(VENV)/.experiments ### Run every experiment at the smallest scale (a few minutes)
	@$(RUN) -m experiments.commands.reproduce scale=smoke $(ARGS)

notebooks: $(VENV)/.dev ### Execute the notebooks again on the recorded rows
	@set -e; for source in notebooks/[0-9]*.py; do $(BIN)/jupytext --to ipynb --execute $$source; done

docs: $(VENV)/.dev ### Build the site of docs/ in outputs/site; a broken link or reference is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f docs/site/mkdocs.yml
	@test ! -f outputs/report.html || sed 's|"../docs/\([a-z0-9-]*\).md"|"\1.html"|g' outputs/report.html > outputs/site/report.html
	@echo "outputs/site/index.html"

test: $(VENV)/.dev ### Run the test suite (CPU, under 10 minutes)
	@$(RUN) -m pytest $(PARALLEL) -m "not slow and not gpu and not multi_gpu and not reliability" $(ARGS)

test-slow: $(VENV)/.dev ### Run the slow CPU tests, which `make test` leaves out
	@$(RUN) -m pytest $(PARALLEL) -m "slow and not gpu and not multi_gpu and not reliability" $(ARGS)

test-gpu: $(VENV)/.dev ### Run the GPU tests, on as many GPUs as there are (NVIDIA, compute capability 8.0 or newer)
	@$(RUN) -m pytest -m "(gpu or multi_gpu) and not reliability" $(ARGS)

fresh: ### Test the last commit in a new Debian root (root, debootstrap): make fresh SUITE=trixie
	@.ci/fresh $(SUITE)

release: $(VENV)/.dev ### Archive the last commit, build and check wheel and sdist of punica-lora
	@$(RUN) -m experiments.commands.report source=recorded > /dev/null
	@.ci/release
	@.ci/installed

lint: $(VENV)/.dev ### ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy

compare: $(VENV)/.experiments ## Ratios of two sets of rows: make compare A=results/h200 B=outputs/h200/rows
	@test -n "$(A)" -a -n "$(B)" || { echo "Say which rows: make compare A=results/h200 B=outputs/h200/rows"; exit 2; }
	@$(RUN) -m experiments.commands.compare a=$(A) b=$(B) $(ARGS)

check: $(VENV)/.experiments ## Hold this machine's rows against the expected ranges of its hardware
	@$(RUN) -m experiments.commands.check $(ARGS)

clean: ## Remove the environment and caches; measurements in outputs/ stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
