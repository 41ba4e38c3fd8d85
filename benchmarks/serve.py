"""Latency and throughput of a server over real HTTP: `python -m benchmarks.serve --model DIR`.

With --url it measures a server that runs already. For each concurrency: TTFT (request sent to first
token), TPOT (first to last token, divided by the tokens in between) and tokens per second of the
whole run; medians over requests. The client speaks plain HTTP over sockets and looks into no event
but the last, since it shares the machine with the server. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

DONE = b"data: [DONE]"


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
    """Stream one completion; RuntimeError with the server's words if it refuses."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    start = time.perf_counter()
    times = []
    event = b""
    try:
        if b" 200 " not in await reader.readline():
            raise RuntimeError((await reader.read()).decode(errors="replace"))
        while line := await reader.readline():
            if line.startswith(DONE):
                break
            if line.startswith(b"data: "):
                times.append(time.perf_counter() - start)
                event = line
    finally:
        writer.close()
    tokens = json.loads(event[len("data: ") :])["usage"]["completion_tokens"]
    return Answer(times[0], times[-2], tokens)  # the last event is the usage


async def level(url: str, concurrency: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians of `options.rounds` requests of each of `concurrency` clients."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    source = random.Random(concurrency)

    def body() -> dict[str, object]:
        return {
            "prompt": [source.randrange(options.vocabulary) for _ in range(options.prompt_tokens)],
            "max_tokens": options.tokens,
            "temperature": 0,
            "ignore_eos": True,
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
    }


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The URL of a server: the one given, or one that is started, awaited and ended."""
    if options.url:
        yield options.url
        return
    url = f"http://127.0.0.1:{options.port}"
    arguments = ["--model", options.model, "--port", str(options.port), *options.server_arguments]
    process = subprocess.Popen([sys.executable, "-m", "k3jax.serve", *arguments])
    try:
        deadline = time.monotonic() + options.patience
        while not ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready; exit status {process.poll()}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def ready(url: str) -> bool:
    """Whether a server serves at `url`."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def main() -> None:
    """Measure, print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--model", default="checkpoints/k3-tiny")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--patience", type=float, default=600.0, help="seconds until ready")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="to generate")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument("--vocabulary", type=int, default=400, help="prompts are of ids below it")
    parser.add_argument("server_arguments", nargs="*", help="after --, for k3jax.serve")
    options = parser.parse_args()
    results = []
    with server(options) as url:
        print(f"{'clients':>8} {'TTFT ms':>9} {'TPOT ms':>9} {'tokens/s':>9}")
        for concurrency in options.concurrency:
            found = asyncio.run(level(url, concurrency, options))
            results.append(found)
            print("{:8.0f} {:9.2f} {:9.2f} {:9.1f}".format(*found.values()), flush=True)
    settings = {"prompt_tokens": options.prompt_tokens, "tokens": options.tokens}
    print(json.dumps({"benchmark": "serve", **settings, "results": results}))


if __name__ == "__main__":
    main()
