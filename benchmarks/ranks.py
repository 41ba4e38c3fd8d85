"""Is a model over several GPUs right, does it stop together: `python -m benchmarks.ranks --tp N`.

Without GPUs, N devices of the CPU do. Each part has processes of its own, which end in time:
text: the greedy text of N ranks by layer kernels is that of one rank on the stock path, with drafts
    and without, in float32;
fault: of one process for each rank, all stop at one and the same step for a fault of the last one;
kill: and all end, with a message, when the last one is killed;
soak: after many steps of mixed traffic nothing was compiled, grew or is missing.
Of a part that fails, the end of all that its processes said is shown. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.progress import Progress, add_limit

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
CHILD = TESTS / "decode" / "parts.py"
STEPPING = "steps are run"  # the first rank says so
END_SECONDS = 30  # for all processes to end after one was killed
TAIL = 8000  # characters of a log that are shown


class Children:
    """The processes of one part, and their logs; of several each sees one device."""

    def __init__(self, folder: Path, part: str, options: argparse.Namespace, count: int) -> None:
        self.deadline = time.monotonic() + options.seconds
        self.logs = [folder / str(number) for number in range(count)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        command = [sys.executable, CHILD, part, options.tp, options.steps, address]
        paths = [ROOT, TESTS / "model", os.environ.get("PYTHONPATH", "")]
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(options.tp))))
        flags = os.environ.get("XLA_FLAGS", "")
        flags += f" --xla_force_host_platform_device_count={options.tp // count}"
        self.processes = []
        for number, path in enumerate(self.logs):
            environment = os.environ | {
                "XLA_FLAGS": flags,
                "CUDA_VISIBLE_DEVICES": seen.split(",")[number] if count > 1 else seen,
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "PYTHONUNBUFFERED": "1",
            }
            own = [str(word) for word in (*command, number)]
            with path.open("w") as log:
                self.processes.append(
                    subprocess.Popen(own, stdout=log, stderr=log, cwd=ROOT, env=environment)
                )

    def said(self) -> list[str]:
        return [path.read_text(errors="replace") for path in self.logs]

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Wait; RuntimeError once the time is over."""
        while not done():
            if time.monotonic() > self.deadline:
                statuses = [process.poll() for process in self.processes]
                raise RuntimeError(f"out of time until {what}, exit statuses {statuses}")
            time.sleep(0.05)

    def ended(self) -> list[int]:
        """The exit status of each, once all have ended."""
        self.until(lambda: all(p.poll() is not None for p in self.processes), "all ended")
        return [process.wait() for process in self.processes]


@contextlib.contextmanager
def started(part: str, options: argparse.Namespace, count: int) -> Iterator[Children]:
    """Children that are gone afterwards; what they said is shown if anything fails."""
    with tempfile.TemporaryDirectory() as folder:
        children = Children(Path(folder), part, options, count)
        try:
            yield children
        except Exception:
            for number, text in enumerate(children.said()):
                print(f"---- {part}: process {number} said at last\n{text[-TAIL:]}", flush=True)
            raise
        finally:
            for process in children.processes:
                process.kill()
                process.wait()


def alone(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process on all devices, whose last line is what it found."""
    with started(part, options, 1) as children:
        if any(statuses := children.ended()):
            raise RuntimeError(f"exit status {statuses[0]}")
        return json.loads(children.said()[0].splitlines()[-1])


def fault(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """All ranks say that they stop, and word for word the same."""
    with started(part, options, options.tp) as ranks:
        statuses = ranks.ended()
        stops = [set(re.findall(r"all ranks stop at step \d+: .*", text)) for text in ranks.said()]
        common = set.intersection(*stops)
        if statuses != [1] * options.tp or len(common) != 1 or len(set.union(*stops)) != 1:
            raise RuntimeError(f"exit statuses {statuses}, stops {stops}")
        return {"stop": common.pop()}


def kill(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """After one was killed the others say something and end."""
    with started(part, options, options.tp) as ranks:
        ranks.until(lambda: STEPPING in ranks.said()[0] or any_ended(ranks), STEPPING)
        before, begin = ranks.said(), time.monotonic()
        ranks.processes[-1].kill()
        ranks.deadline = begin + END_SECONDS
        statuses, seconds = ranks.ended(), time.monotonic() - begin
        pairs = zip(ranks.said()[:-1], before, strict=False)
        ends = [text[len(earlier) :].strip().splitlines()[-1:] for text, earlier in pairs]
        if statuses[-1] != -signal.SIGKILL or not all(statuses) or not all(ends):
            raise RuntimeError(f"exit statuses {statuses}, messages {ends}")
        return {"seconds": seconds, "statuses": statuses, "ends": ends}


def any_ended(ranks: Children) -> bool:
    return any(process.poll() is not None for process in ranks.processes)


PARTS = {"text": alone, "fault": fault, "kill": kill, "soak": alone}


def main() -> int:
    """Run what the command line selects; 1 if a part failed or was left out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--tp", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--steps", type=int, default=2000, help="of the soak")
    parser.add_argument("--seconds", type=float, default=240.0, help="most that a part may take")
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    add_limit(parser)
    options = parser.parse_args()
    progress, found, begin = Progress(options.minutes), {}, time.monotonic()
    for part in options.part:
        if progress.in_time(part):
            with progress.case(part):
                found[part] = PARTS[part](part, options)
                seconds = time.monotonic() - begin
                print(f"{part} holds, {seconds:.0f} s from the start: {found[part]}", flush=True)
    header = {"benchmark": "ranks", "tp": options.tp, "flags": os.environ.get("XLA_FLAGS")}
    print(json.dumps({**header, **progress.record(), **found}))
    return progress.status


if __name__ == "__main__":
    sys.exit(main())
