"""A process that stands in for the engine child: it speaks the link and answers scripts.

Of a script with `until` all but the first delta waits for a file of that name.
"""

import os
import sys
import time

import msgspec
from fake_engine import INFO, answer, stats

from k3jax.serve.link import Abort, Add, Deltas, EngineEnd, Fatal, Progress, Ready, WorkerSettings


def main():
    settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings)
    end = EngineEnd(settings)
    end.send(Progress(f"fake worker loads {settings.model} for {settings.decode_backend}"))
    time.sleep(settings.page_size / 100 if settings.page_size else 0)  # page_size: how slowly
    if settings.max_context == 13:
        end.send(Fatal("ValueError: max_context 13 is unlucky"))
        end.close()
        return 1
    end.send(Ready(INFO))
    due = []  # (time, file or None, delta)
    while True:
        for message in end.receive(0.005):
            if isinstance(message, Add):
                told, deltas = answer(message.request)
                if "die" in told:
                    return told["die"]
                if "fail_stop" in told:
                    end.send(Fatal("rank 0 has health word 0x1", kernels=True))
                    end.close()
                    return 1
                now, delay = time.monotonic(), told.get("delay", 0)
                for number, delta in enumerate(deltas):
                    due.append((now + number * delay, number and told.get("until"), delta))
            elif isinstance(message, Abort):
                due = [entry for entry in due if entry[-1].request_id != message.request_id]
            else:
                end.close()
                return 0
        now = time.monotonic()
        there = {file for _, file, _ in due if not file or os.path.exists(file)}
        ready = [delta for when, file, delta in due if when <= now and file in there]
        due = [entry for entry in due if entry[0] > now or entry[1] not in there]
        if ready:
            end.send(Deltas(ready, stats(1)))


if __name__ == "__main__":
    sys.exit(main())
