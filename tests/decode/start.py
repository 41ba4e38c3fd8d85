"""One start of the engine child's model: `python start.py MODEL CACHE`; prints cache misses."""

import sys

import jax

from k3jax.serve.link import WorkerSettings
from k3jax.serve.worker import build


def main(model, cache):
    counts = {"hits": 0, "misses": 0}

    def count(event, **_):
        for kind in counts:
            counts[kind] += event == f"/jax/compilation_cache/cache_{kind}"

    jax.monitoring.register_event_listener(count)
    settings = WorkerSettings(
        address="",
        parent=0,
        model=model,
        compile_cache=cache,
        max_requests=1,
        max_context=32,
    )
    executor, _ = build(settings, lambda text: None)
    print(executor.compilations, counts["hits"], counts["misses"])


if __name__ == "__main__":
    main(*sys.argv[1:])
