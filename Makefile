# Everything here needs only Python >= 3.11 with venv and pip.
PYTHON ?= python3
BIN := .venv/bin

SCALE ?= 0.01

# Without bytecode, each of the many interpreters that the tests start would compile the library again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo flights test lint coverage bridges nanoarrow bench docs wheel image check-tag clean

demo: .venv/demo.stamp
	$(BIN)/python -m examples.tpch --scale $(SCALE) $(ARGS)

flights: .venv/demo.stamp
	$(BIN)/python -m examples.flights.demo $(ARGS)

test: .venv/dev.stamp
	# The archive has one core. The others have the second, and take as long together.
	$(MAKE) --jobs 2 --output-sync .venv/spark.jsa lint .venv/collected.stamp
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Print which lines the tests run, and write pages to build/coverage/html. This takes longer than `make test`.
coverage: .venv/dev.stamp .venv/coverage.stamp .venv/spark.jsa
	rm -rf build/coverage
	mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover

# The libraries that datasets are bridged to are large, so the environment of `make test` is without them.
bridges: .venv/dev.stamp .venv/bridges.stamp
	$(BIN)/python -m pytest tests/adapters tests/test_docstrings.py -k adapters $(ARGS)

# The example that reads into nanoarrow, whose C sources are in its source distribution. Needs a C compiler.
nanoarrow: .venv/dev.stamp build/nanoarrow/PKG-INFO
	$(BIN)/python -m pytest tests/porter/test_nanoarrow.py $(ARGS)

build/nanoarrow/PKG-INFO:
	rm -rf build/nanoarrow
	mkdir -p build/nanoarrow
	$(BIN)/python -m pip download --quiet --no-deps --no-binary nanoarrow --dest build/nanoarrow nanoarrow
	tar xzf build/nanoarrow/nanoarrow-*.tar.gz -C build/nanoarrow --strip-components=1
	touch $@

bench: .venv/dev.stamp .venv/bench.stamp
	$(BIN)/python -m benchmarks $(ARGS)

docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(ARGS)
	@echo "open build/site/index.html, or for the search: $(PYTHON) -m http.server --directory build/site"

# Build both distributions in build/dist, and try the wheel in a fresh environment of each Python of this machine.
wheel: .venv/release.stamp
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist
	$(BIN)/python tests/wheel.py build/dist/*.whl

# Build the container image twice, compare both, and try it. Needs podman; ARGS=BASE names another base.
image:
	$(PYTHON) tests/image.py $(ARGS)

# A release is built from its tag, and the files that name it have been changed: make check-tag TAG=v1.2.3
check-tag:
	grep -qxF "version: $${TAG#v}" CITATION.cff
	grep -qxF "fallback-version = \"$${TAG#v}\"" pyproject.toml
	test -f build/dist/dissociated-$${TAG#v}.tar.gz

# Created once for a virtual environment, in 40 s of processor time. Each of the dozen Java processes of a test run
# then starts in 6 s less.
.venv/spark.jsa: .venv/dev.stamp
	cd tests && ../$(BIN)/python -m spark.archive ../$@

# Compile the tests once, in 15 s of processor time: otherwise each of the four workers of a first run would do so. An
# error is ignored here, because the test run reports it.
.venv/collected.stamp: .venv/dev.stamp
	-$(BIN)/python -m pytest --collect-only --quiet --quiet > /dev/null
	touch $@

# Python compiles each module that is imported. pip would compile three times as many, on one core, in 24 s.
.venv/%.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv build dist
