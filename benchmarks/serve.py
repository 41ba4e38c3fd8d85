"""Latency and throughput of a server over real HTTP: `python -m benchmarks.serve --model DIR`.

With --url it measures a server that runs already. For each concurrency: TTFT (request sent to first
token), TPOT (first to last token, divided by the tokens in between), tokens and requests per second
of the whole run; medians over requests. Prompts are random ids, or with --prompt-characters pieces
of a source file, for servers that take text alone; answers may then end early. The client speaks
plain HTTP over sockets and looks into no event but the last, since it shares the machine with the
server. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.progress import Progress, add_limit

DONE = b"data: [DONE]"
END_SECONDS = 30.0  # for a server to end by itself


@dataclass(frozen=True)
class Answer:
    """One request's times in seconds, and its tokens."""

    first: float  # after the request was sent
    last: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Seconds from token to token."""
        return (self.last - self.first) / max(self.tokens - 1, 1)


async def ask(host: str, port: int, body: dict[str, object]) -> Answer:
    """Stream one completion; RuntimeError with the server's words if it refuses or breaks off."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    start = time.perf_counter()
    times = []
    event = b""
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            _, _, said = (await reader.read()).partition(b"\r\n\r\n")
            raise RuntimeError((status.strip() + b" " + said).decode(errors="replace"))
        while line := await reader.readline():
            if line.startswith(DONE):
                break
            if line.startswith(b"data: "):
                times.append(time.perf_counter() - start)
                event = line
    finally:
        writer.close()
    last = json.loads(event[len("data: ") :] or b"{}")
    if not last.get("usage") or len(times) < 2:
        raise RuntimeError(f"the stream ended with {event.decode(errors='replace').strip()!r}")
    return Answer(times[0], times[-2], last["usage"]["completion_tokens"])


async def level(url: str, concurrency: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians of `options.rounds` requests of each of `concurrency` clients."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    source = random.Random(f"{concurrency} {options.seed}")
    texts = inspect.getsource(argparse)

    def prompt() -> str | list[int]:
        if options.prompt_characters is None:
            return [source.randrange(options.vocabulary) for _ in range(options.prompt_tokens)]
        start = source.randrange(len(texts) - options.prompt_characters)
        return texts[start : start + options.prompt_characters]

    def body() -> dict[str, object]:
        return {
            "prompt": prompt(),
            "max_tokens": options.tokens,
            "temperature": 0,
            "ignore_eos": options.prompt_characters is None,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def client() -> list[Answer]:
        return [await ask(host, port, body()) for _ in range(options.rounds)]

    await ask(host, port, body())
    start = time.perf_counter()
    rounds = await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.perf_counter() - start
    answers = [answer for found in rounds for answer in found]
    return {
        "concurrency": concurrency,
        "ttft_ms": statistics.median(answer.first for answer in answers) * 1e3,
        "tpot_ms": statistics.median(answer.per_token for answer in answers) * 1e3,
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "requests_per_second": len(answers) / seconds,
    }


@contextlib.contextmanager
def running(command: Sequence[str], url: str, path: str, patience: float) -> Iterator[None]:
    """A server that is started, awaited until `path` is there, and ended."""
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + patience
        while not ready(f"{url}{path}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready; exit status {process.poll()}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"the server did not end within {END_SECONDS:g} s, and is killed", flush=True)
            process.kill()
            process.wait()


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The URL of a server: the one given, or one that is started for the measurement."""
    if options.url:
        yield options.url
        return
    url = f"http://127.0.0.1:{options.port}"
    arguments = ["--model", options.model, "--port", str(options.port), *options.server_arguments]
    command = [sys.executable, "-m", "k3jax.serve", *arguments]
    with running(command, url, "/ready", options.patience):
        yield url


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """What `server` is told: which one, or how to start it."""
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--model", default="checkpoints/k3-tiny")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--patience", type=float, default=600.0, help="seconds until ready")
    parser.add_argument("server_arguments", nargs="*", help="after --, for k3jax.serve")


def ready(url: str) -> bool:
    """Whether a server answers at `url` that it serves."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def main() -> int:
    """Measure, print a table, then one line of JSON; 1 if a concurrency was not measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_server_flags(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--prompt-characters", type=int, help="text prompts of this length")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--tokens", type=int, default=128, help="to generate")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument("--vocabulary", type=int, default=400, help="prompts are of ids below it")
    add_limit(parser)
    options = parser.parse_args()
    results, progress = [], Progress(options.minutes)
    with server(options) as url:
        print(f"{'clients':>8} {'TTFT ms':>9} {'TPOT ms':>9} {'tokens/s':>9} {'requests/s':>10}")
        for concurrency in options.concurrency:
            name = f"{concurrency} clients"
            if not progress.in_time(name):
                continue
            with progress.case(name):
                found = asyncio.run(level(url, concurrency, options))
                results.append(found)
                row = "{:8.0f} {:9.2f} {:9.2f} {:9.1f} {:10.2f}".format(*found.values())
                print(row, flush=True)
    settings = {"prompt_tokens": options.prompt_tokens, "tokens": options.tokens}
    record = {**settings, **progress.record(), "results": results}
    print(json.dumps({"benchmark": "serve", **record}))
    return progress.status


if __name__ == "__main__":
    sys.exit(main())
