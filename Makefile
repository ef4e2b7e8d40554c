# Everything sets itself up: `make demo` and `make test` need git, make, python >= 3.10 and, for GPU code, nvcc.
#
#   make demo     the main job on a shipped scan            make test     the test suite (ARGS="-k maps" adds to pytest)
#                                                         make quick    its fast part, on two cores
#   make lint     ruff, mypy, layers                              make format   ruff and clang-format, in place
#   make build    the extension, in place                   make bench    benchmarks of this machine's GPU
#   make docs     README's and docs' tables from            make site     web pages of docs/ and the API's reference, into build/site
#                 benchmarks/results, into which RAW="a.json b.json" puts what benchmarks/*.py measured
#   make runtime  libvoxmma (engines without Python) and its example, for CPUs, in build/runtime-cpu
#   make wheel    wheels for any torch, into dist (PYTHONS: interpreters, one wheel each)
#   make clean    build files (not the environment)
#
# Variables: PYTHON (interpreter for a new environment), VENV (environment to use; an active one by default, else .venv),
# TORCH (requirement for an environment without torch; the default is the newest that installs quickly, a CPU wheel's
# version), and those of setup.py. A new environment sees the torch of PYTHON, if there is one.
PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
TORCH ?= torch==2.13.0
ARGS ?=
PYTHONS ?= $(PYTHON)

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
DEPS := $(VENV)/.voxmma-deps
BUILT := $(VENV)/.voxmma-built
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py python/voxmma/_binding.py

.PHONY: demo test quick lint format build runtime bench docs site wheel clean

demo: $(BUILT)
	@$(PY) -c "import importlib.metadata as m; print('torch', m.version('torch'), 'of', m.distribution('torch').locate_file(''))"
	$(PY) -m voxmma demo $(ARGS)

test: $(BUILT)
	$(PY) -m pytest $(ARGS)

# With bytecode kept: pytest compiles every test file anew without, 6 s in each process.
quick: $(BUILT)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n 2 --dist worksteal $(ARGS)

lint: $(BUILT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(BUILT)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(shell find csrc runtime examples/cpp tests/runtime -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.c')

build: $(BUILT)

runtime: $(DEPS)
	$(VENV)/bin/cmake -S runtime -B build/runtime-cpu -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja -DVOXMMA_EXAMPLES=ON
	$(VENV)/bin/cmake --build build/runtime-cpu

bench: $(BUILT)
	$(PY) -m voxmma bench $(ARGS)

docs: $(BUILT)
	$(if $(RAW),$(PY) benchmarks/collect.py $(RAW))
	$(PY) benchmarks/readme_tables.py

site: $(BUILT)
	$(PIP) install -q --no-build-isolation -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

wheel:
	$(PYTHON) wheels/build.py $(PYTHONS)

clean:
	rm -rf build python/*.egg-info python/voxmma/_C.*.so $(BUILT)

# torch is installed only where there is none. CUTLASS' headers are setup.py's business, and wanted only with nvcc.
$(DEPS): Makefile
	test -x $(PY) || $(PYTHON) -m venv $$($(PYTHON) -c "import torch" 2>/dev/null && echo --system-site-packages) $(VENV)
	$(PY) -c "import torch" 2>/dev/null || { echo "no torch here: installing $(TORCH)"; $(PIP) install -q "$(TORCH)"; }
	$(PIP) install -q "setuptools>=77" wheel cmake ninja
	touch $@

# Built in place first, because pip hides the compiler's progress; pip then finds nothing left to compile.
$(BUILT): $(DEPS) $(SOURCES) pyproject.toml
	$(PY) setup.py -q build_ext --inplace
	$(PIP) install -q --no-build-isolation -e ".[dev]"
	touch $@
