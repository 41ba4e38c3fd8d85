"""A process that stands in for the engine child: it speaks the link and answers scripts."""

import sys
import time

import msgspec
from fake_engine import INFO, answer, stats

from k3jax.serve.link import Abort, Add, Deltas, EngineEnd, Fatal, Progress, Ready, WorkerSettings


def main():
    settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings)
    end = EngineEnd(settings)
    end.send(Progress(f"fake worker loads {settings.model}"))
    time.sleep(settings.page_size / 100 if settings.page_size else 0)  # page_size: how slowly
    if settings.max_context == 13:
        end.send(Fatal("ValueError: max_context 13 is unlucky"))
        end.close()
        return 1
    end.send(Ready(INFO))
    due = []  # (time, delta)
    while True:
        for message in end.receive(0.005):
            if isinstance(message, Add):
                told, deltas = answer(message.request)
                now, delay = time.monotonic(), told.get("delay", 0)
                due += [(now + n * delay, delta) for n, delta in enumerate(deltas)]
            elif isinstance(message, Abort):
                due = [entry for entry in due if entry[1].request_id != message.request_id]
            else:
                end.close()
                return 0
        now = time.monotonic()
        ready = [delta for when, delta in due if when <= now]
        due = [entry for entry in due if entry[0] > now]
        if ready:
            end.send(Deltas(ready, stats(1)))


if __name__ == "__main__":
    sys.exit(main())
