# `make serve` and `make test` do all of their set-up: a virtual environment in .venv with the
# versions of requirements.lock. GPU=rocm or GPU=cuda adds that platform's JAX plugin.
PYTHON ?= python3
GPU ?=
ARGS ?=
EXTRAS = dev$(if $(GPU),$(comma)$(GPU))
comma = ,
READY = .venv/.ready-dev$(if $(GPU),-$(GPU))

.PHONY: serve test notebooks lint lock clean

serve: $(READY)
	.venv/bin/python -m k3jax.serve $(ARGS)

test: $(READY)
	.venv/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

# With the compiler of notebook 6. Later starts take what was compiled from where the server's is.
notebooks: .venv/.ready-notebooks
	JAX_COMPILATION_CACHE_DIR=$(HOME)/.cache/k3jax .venv/bin/jupyter lab notebooks $(ARGS)

.venv/.ready-notebooks: $(READY)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint requirements.lock --editable '.[notebooks,aot]'
	touch $@

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "k3jax needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint requirements.lock --editable '.[$(EXTRAS)]'
	touch $@

# Only for maintainers, after a change of pyproject.toml: resolve every extra on every platform.
# JAX is held to a version that has a ROCm plugin; Python 3.11 ends at JAX 0.10.2.
lock:
	.venv/bin/python -m pip install --quiet uv
	printf "jax==0.10.2; python_version<'3.12'\njax==0.12.0; python_version>='3.12'\n" > .venv/held.txt
	.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --all-extras \
	  --no-header --no-annotate --no-emit-index-url --constraint .venv/held.txt \
	  --output-file requirements.lock pyproject.toml

clean:
	rm -rf .venv build dist
