# hvdtrain: set-up, tests and the first run. `make help` lists the targets.
#
#   FRAMEWORKS="torch tensorflow"   which to install; either alone works
#   PYTHON=python3.11               the interpreter for the virtual environment (3.10 or later)
#   VENV=.venv                      where that environment lies
#   DEVICE=cpu|cuda                 detected: cuda where an NVIDIA GPU answers
#   CAPABILITIES=80,90              GPUs that Horovod is built for where there are none (images); with DEVICE=cuda
#   WITH="dev trackers"             what beside the trainer (files of requirements/); WITH= for neither
#   WHEELHOUSE=DIR                  wheels for machines without a network: wheelhouse fills it, setup asks no index then
#   TORCH_CPU_INDEX=URL             where torch's CPU wheels are sought if pip's own indexes lack them

FRAMEWORKS ?= torch tensorflow
VENV ?= .venv
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
WITH ?= dev trackers
NP ?= 4

# A name on PATH may be a shim without an interpreter behind it, so each candidate has to run.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
DEVICE ?= $(shell { nvidia-smi -L 2>/dev/null | grep -q GPU || [ -d /proc/driver/nvidia/gpus ]; } && echo cuda || echo cpu)

PY := $(VENV)/bin/python
comma := ,
empty :=
space := $(empty) $(empty)
CHOSEN := $(sort $(FRAMEWORKS))
UNKNOWN := $(filter-out torch tensorflow,$(CHOSEN))
KIND := $(subst $(space),-,$(strip $(CHOSEN)))-$(DEVICE)$(if $(filter dev,$(WITH)),,-lean)
PINNED := $(VENV)/.pinned-$(KIND)
STAMP := $(VENV)/.installed-$(KIND)
PINS := base mpi horovod $(WITH) $(addsuffix -$(DEVICE),$(CHOSEN))
PIN_FILES := $(PINS:%=requirements/%.txt)
# Models of others (docs/how-to/models.md), each without the packages it asks for: keras-hub's tensorflow-text would bring
# TensorFlow's own package beside tensorflow-cpu. What they need is pinned in the file or comes with the rest. A folder
# of wheels does not have them.
ZOO_FILES := $(if $(WHEELHOUSE),,$(if $(filter dev,$(WITH)),requirements/zoo.txt \
	$(patsubst %,requirements/zoo-%-$(DEVICE).txt,$(filter torch,$(CHOSEN)))))
PIP := $(PY) -m pip --disable-pip-version-check
QUICK := --timeout 15 --retries 1
FROM := $(if $(WHEELHOUSE),--no-index --find-links "$(abspath $(WHEELHOUSE))")
HOUSE = $(or $(WHEELHOUSE),runs/wheelhouse)

# Open MPI refuses root unless it is told twice. Only as root, and only for the programs started from here.
ifeq ($(shell id -u),0)
AS_ROOT := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
endif
HOROVODRUN := PATH="$(abspath $(VENV))/bin:$$PATH" $(AS_ROOT) $(VENV)/bin/horovodrun -np $(NP) -H localhost:$(NP) $(abspath $(VENV))/bin/python -m hvdtrain

.PHONY: help quickstart setup test check lint docs clean check-tools check-house packages wheelhouse gpu-check gpu-wheels
.DEFAULT_GOAL := help

help:
	@echo 'make quickstart   set everything up, then train digits on $(NP) ranks: first PyTorch, then TensorFlow'
	@echo 'make setup        the set-up alone: $(VENV), frameworks, MPI, Horovod (a second time: seconds)'
	@echo 'make wheelhouse   fill WHEELHOUSE=DIR with all wheels, Horovod'\''s too; elsewhere make setup WHEELHOUSE=DIR needs no network'
	@echo 'make test         every test, in one process and under MPI'
	@echo 'make check        lint and the fast tests, in under 3 minutes on 2 cores'
	@echo 'make lint         ruff, mypy, and import-linter (imports go downward only)'
	@echo 'make docs         the documentation as a site in build/site, from the files alone: open build/site/index.html'
	@echo 'make gpu-check    check this machine'\''s GPU from the source tree; what is not installed comes from WHEELS=FOLDER'
	@echo 'make gpu-wheels   fill WHEELS=FOLDER for a machine without a network'
	@echo 'make clean        remove $(VENV) and what tests and tools left (the wheel cache stays)'
	@echo 'variables: FRAMEWORKS="$(FRAMEWORKS)" PYTHON=$(PYTHON) DEVICE=$(DEVICE) VENV=$(VENV) NP=$(NP)'

quickstart: setup
ifneq ($(filter torch,$(CHOSEN)),)
	$(HOROVODRUN)
endif
ifneq ($(filter tensorflow,$(CHOSEN)),)
	$(HOROVODRUN) train --model tf_models.cnn:build
endif

check-tools:
ifneq ($(UNKNOWN),)
	@echo 'error: FRAMEWORKS holds "$(UNKNOWN)"; expected torch, tensorflow or both' >&2; exit 1
endif
ifeq ($(CHOSEN),)
	@echo 'error: FRAMEWORKS is empty; expected torch, tensorflow or both' >&2; exit 1
endif
ifeq ($(strip $(PYTHON)),)
	@echo 'error: CPython 3.10 or later is missing; install the package python3 (Debian, Ubuntu) or python3.11 (Fedora, RHEL), or name one: make PYTHON=/path/to/python3' >&2; exit 1
else
	@"$(PYTHON)" -m hvdtrain.commands.build_horovod.tools $(if $(WHEELHOUSE),--wheels)
endif

check-house:
ifneq ($(WHEELHOUSE),)
	@ls "$(WHEELHOUSE)"/*.whl >/dev/null 2>&1 || { echo 'error: WHEELHOUSE=$(WHEELHOUSE) holds no wheels; fill it where there is a network: make wheelhouse WHEELHOUSE=DIR' >&2; exit 1; }
endif

setup: check-tools check-house
	@$(MAKE) --no-print-directory $(STAMP) FRAMEWORKS="$(CHOSEN)" VENV="$(VENV)" DEVICE="$(DEVICE)" PYTHON="$(PYTHON)"
	@$(PY) -m hvdtrain build --frameworks $(CHOSEN) $(if $(filter cpu,$(DEVICE)),--cpu) $(if $(WHEELHOUSE),--wheelhouse "$(WHEELHOUSE)") $(if $(filter cuda,$(DEVICE)),$(if $(CAPABILITIES),--capabilities $(CAPABILITIES)))

# The pins alone, from requirements/ alone: a layer of an image that changes with them only.
packages: check-house $(PINNED)

# Needs a set-up of the same kind here: its Horovod is among the wheels. WHEELHOUSE= here is where to, not where from.
wheelhouse:
	@$(MAKE) --no-print-directory setup WHEELHOUSE=
	@$(PY) -m hvdtrain.commands.build_horovod.wheelhouse "$(HOUSE)" $(PIN_FILES:%=-r %) --frameworks $(CHOSEN) $(if $(filter cpu,$(DEVICE)),--cpu) --extra-index $(TORCH_CPU_INDEX)

# torch's CPU wheels ("+cpu") are not on every index: pip's own are asked first, then PyTorch's. An index that does not
# answer ends in an error within a minute, never in a hang.
$(PINNED): $(PIN_FILES)
	@[ -x $(PY) ] || "$(PYTHON)" -m venv "$(VENV)"
	@echo "installing $(CHOSEN) ($(DEVICE)) into $(VENV); log: $(VENV)/install.log"
	@$(PIP) install $(FROM) $(PIN_FILES:%=-r %) >$(VENV)/install.log 2>&1 \
	|| { [ -z "$(WHEELHOUSE)" ] && echo "some pin is not on pip's own indexes; asking PyTorch's index too" && \
	     $(PIP) install $(QUICK) --extra-index-url $(TORCH_CPU_INDEX) $(PIN_FILES:%=-r %) >>$(VENV)/install.log 2>&1; } \
	|| { tail -n 20 $(VENV)/install.log; \
	     echo "error: the packages of requirements/ could not be installed for $$($(PY) -V); log: $(VENV)/install.log" >&2; exit 1; }
	@touch $@

$(STAMP): $(PINNED) $(ZOO_FILES) setup.cfg
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable . >>$(VENV)/install.log 2>&1 \
	|| { tail -n 20 $(VENV)/install.log; exit 1; }
ifneq ($(ZOO_FILES),)
	@$(PIP) install --no-deps $(ZOO_FILES:%=-r %) >>$(VENV)/install.log 2>&1 \
	|| $(PIP) install $(QUICK) --no-deps --extra-index-url $(TORCH_CPU_INDEX) $(ZOO_FILES:%=-r %) >>$(VENV)/install.log 2>&1 \
	|| { echo "no torchvision for PyTorch on CPUs found: timm is tested with the Python parts of PyPI's, in $(VENV)/zoo"; \
	     $(PIP) install --no-deps -r requirements/zoo.txt >>$(VENV)/install.log 2>&1 \
	     && $(PIP) install --no-deps --upgrade --target $(VENV)/zoo -r requirements/zoo-torch-cuda.txt >>$(VENV)/install.log 2>&1; } \
	|| echo "models of others (docs/how-to/models.md) could not be installed: their tests are skipped; log: $(VENV)/install.log"
endif
	@touch $(STAMP)

test: setup
	@$(PY) tests/run

# The fast tests: tests/unit and tests/laws without those marked slow (setup.cfg).
check: lint
	@$(PY) tests/run --fast

lint: setup
	$(PY) -m ruff check hvdtrain benchmarks tests $(wildcard torch_models tf_models containers)
	$(PY) -m mypy
	PYTHONPATH=. $(VENV)/bin/lint-imports --no-logo

# Nothing is loaded from a network, neither here nor by the pages. --strict: a dead link or anchor is an error.
docs: setup $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict && echo build/site/index.html

$(VENV)/.docs: requirements/docs.txt
	@$(PIP) install --quiet $(FROM) -r $< >>$(VENV)/install.log 2>&1 || { tail -n 20 $(VENV)/install.log; exit 1; }
	@touch $@

# Needs no set-up: any Python starts it, and it looks for one that has PyTorch (PYTHON= names one).
ANY_PYTHON = $(shell command -v "$(PYTHON)" 2>/dev/null || command -v python3)
NAMED = $(if $(filter command environment,$(firstword $(origin PYTHON))),--python "$(PYTHON)")
gpu-check:
	@"$(ANY_PYTHON)" tests/gpu/check.py $(NAMED) $(if $(WHEELS),--wheels "$(WHEELS)") $(if $(ROWS),--rows "$(ROWS)") $(if $(OUT),--out "$(OUT)")

# PYTHONS="3.12,3.11": interpreters of the other machine; MACHINE=aarch64: its processor.
gpu-wheels:
	@"$(if $(wildcard $(PY)),$(PY),$(ANY_PYTHON))" tests/gpu/wheelhouse.py "$(or $(WHEELS),runs/wheels)" $(if $(PYTHONS),--pythons "$(PYTHONS)") $(if $(MACHINE),--machine "$(MACHINE)")

clean:
	rm -rf "$(VENV)" build dist *.egg-info .coverage .coverage.* .mypy_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
