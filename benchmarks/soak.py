"""Mixed traffic over HTTP, and what is held after it: `python -m benchmarks.soak --minutes 60`.

With --url it soaks a server that runs already. Clients stream and fold completions, chats and
responses, with and without grammars and tools, leave in the middle, read slowly, send half a
request, or a wrong one. Now and then all of them pause, and once the server is idle /metrics says
what it holds: slots, pages, tasks and open files must be what they were at the first pause, and
memory may grow by --growth MiB from the second one on. A client that gets a wrong answer rests
until the next pause. The status is 1 if something does not hold. The last line is JSON.

A server that is started here gives large buffers back as soon as they are free. Otherwise glibc
keeps those of a step on a CPU, tens of MB, once for each thread that ever ran one: resident memory
then steps up for as long as there is another such thread, and says nothing of what is held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serve import add_server_flags, server

# glibc maps what is larger by itself and, with the threshold given, never raises it.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # bytes
SETTLE_SECONDS = 60.0  # at a pause, for what the clients left behind to end
LOOK_SECONDS = 0.5  # between two looks at a server that settles
IDLE = ("slots_in_use", "pages_in_use", "waiting")
HELD = ("tasks", "open_files_front", "open_files_engine")
MEMORY = ("memory_bytes_front", "memory_bytes_engine")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
WRONG: list[tuple[str, bytes, int]] = [
    ("/v1/completions", b"\xff\xfe", 400),
    ("/v1/completions", b"[" * 50_000, 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": 1000000000}', 400),
    ("/v1/completions", b'{"prompt": "x", "guided_regex": "(a"}', 400),
    ("/v1/responses", b'{"input": "x", "model": "another"}', 404),
    ("/v1/nothing", b"{}", 404),
]
Sampled = dict[str, float]


class Client:
    """Sends one request at a time over connections of its own; RuntimeError for a wrong answer."""

    def __init__(self, url: str, seed: int) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.random = random.Random(seed)
        self.kinds: list[Callable[[], Awaitable[None]]] = [
            self.completion, self.chat, self.responses, self.form, self.tool, self.choices,
            self.leave, self.read_slowly, self.send_half, self.send_wrong,
        ]  # fmt: skip
        first = seed % len(self.kinds)
        self.turns = itertools.cycle(self.kinds[first:] + self.kinds[:first])

    async def run(self, counts: Counter[str], until: float) -> None:
        """Send requests of all kinds in turn until the clock says `until`."""
        while time.monotonic() < until:
            kind = next(self.turns)
            await kind()
            counts[kind.__name__] += 1

    def body(self, **fields: Any) -> dict[str, Any]:
        """What requests have in common: how to sample, and how much."""
        wish = self.random.choice([{"temperature": 0}, {"seed": self.random.randrange(2**31)}])
        return {"max_tokens": self.random.randint(1, 24), **wish, **fields}

    def text(self) -> str:
        return "".join(self.random.choices("abc de", k=self.random.randint(1, 40)))

    async def completion(self) -> None:
        more = self.random.choice([{}, {"logprobs": 2}, {"stop": ["e"]}, {"ignore_eos": True}])
        await self.answered("/v1/completions", self.body(prompt=self.text(), **more))

    async def choices(self) -> None:
        await self.answered("/v1/completions", self.body(prompt=[self.text(), self.text()], n=2))

    async def chat(self, **more: Any) -> None:
        messages = [{"role": "user", "content": self.text()}]
        await self.answered("/v1/chat/completions", self.body(messages=messages, **more))

    async def responses(self) -> None:
        body = self.body(input=self.text())
        body["max_output_tokens"] = body.pop("max_tokens")
        body.pop("seed", None)
        await self.answered("/v1/responses", body)

    async def form(self) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        await self.chat(response_format=schema)

    async def tool(self) -> None:
        await self.chat(tools=[TOOL], tool_choice="required")

    async def leave(self) -> None:
        """Go in the middle of a stream, or before its first event."""
        body = self.body(prompt=self.text(), stream=True, ignore_eos=True) | {"max_tokens": 100}
        async with self.connection("/v1/completions", json.dumps(body).encode()) as reader:
            for _ in range(self.random.randint(0, 12)):
                await reader.readline()

    async def read_slowly(self) -> None:
        body = self.body(prompt=self.text(), stream=True, logprobs=5)
        async with self.connection("/v1/completions", json.dumps(body).encode()) as reader:
            while await reader.read(400):
                await asyncio.sleep(0.02)

    async def send_half(self) -> None:
        async with self.connection("/v1/completions", b'{"prompt": ', missing=50):
            await asyncio.sleep(self.random.random() / 10)

    async def send_wrong(self) -> None:
        route, content, status = self.random.choice(WRONG)
        async with self.connection(route, content) as reader:
            await self.expect(reader, status)

    async def answered(self, route: str, body: dict[str, Any]) -> None:
        """Send a good request, which must be answered to its end, streamed or whole."""
        body["stream"] = self.random.random() < 0.5
        async with self.connection(route, json.dumps(body).encode()) as reader:
            await self.expect(reader, 200)
            said = (await reader.read()).decode()
        if body["stream"]:
            end = "response.completed" if "responses" in route else "data: [DONE]"
            end = "response.incomplete" if "response.incomplete" in said else end
        else:
            end = '"usage":'
        if end not in said or '"error":{' in said:
            raise RuntimeError(f"{route} {json.dumps(body)} was answered {said[-1000:]}")

    async def expect(self, reader: asyncio.StreamReader, status: int) -> None:
        line = await reader.readline()
        if line.split()[1:2] != [str(status).encode()]:
            said = line + await reader.read(2000)
            raise RuntimeError(f"{status} was expected, but came {said.decode(errors='replace')}")

    @contextlib.asynccontextmanager
    async def connection(self, route: str, content: bytes, missing: int = 0) -> Any:
        """A connection on which a request was sent, but for its last `missing` bytes."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        try:
            length = len(content) + missing
            head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Connection: close\r\nContent-Length: {length}\r\n\r\n"
            writer.write(head.encode() + content)
            yield reader
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def sample(url: str) -> Sampled:
    """What /metrics says, by name without the prefix and with a label's value behind it."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = re.findall(r'^k3jax_(\w+)(?:\{process="(\w+)"\})? ([0-9.e+]+)$', text, re.MULTILINE)
    return {"_".join(filter(None, found[:2])): float(found[2]) for found in found}


async def settle(url: str, samples: list[Sampled], growth: float) -> Sampled:
    """What an idle server holds, if it can be without a complaint.

    It is the second of two such looks in a row: a step of requests that were given up has its
    buffers for a moment longer than those their slots.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    fine = 0
    while True:
        found = await asyncio.to_thread(sample, url)
        fine = 0 if complaints([*samples, found], growth) else fine + 1
        if fine == 2 or time.monotonic() > deadline:
            return found
        await asyncio.sleep(LOOK_SECONDS)


def complain(text: str, wrong: list[str]) -> None:
    print(f"does not hold: {text}", flush=True)
    wrong.append(text)


async def watched(run: Awaitable[None], wrong: list[str]) -> None:
    """Let a client run until it gets a wrong answer."""
    try:
        await run
    except (RuntimeError, OSError) as error:
        complain(f"{type(error).__name__}: {error}", wrong)


async def soak(
    url: str, options: argparse.Namespace, wrong: list[str]
) -> tuple[list[Sampled], Counter[str]]:
    """A sample at each pause, and how many requests of each kind were answered.

    What went wrong is printed at once and added to `wrong`; without /metrics there is no going on.
    """
    clients = [Client(url, seed) for seed in range(options.clients)]
    counts: Counter[str] = Counter()
    samples: list[Sampled] = []
    begin, seconds = time.monotonic(), 60 * options.minutes
    names = (*MEMORY, *HELD, *IDLE)
    print(f"{'seconds':>8} {'requests':>9} " + " ".join(f"{name:>19}" for name in names))
    for number in range(1, options.pauses + 1):
        until = begin + seconds * number / options.pauses
        await asyncio.gather(*(watched(client.run(counts, until), wrong) for client in clients))
        try:
            samples.append(await settle(url, samples, options.growth))
        except (OSError, KeyError) as error:
            complain(f"/metrics: {error!r}", wrong)
            break
        values = " ".join(f"{samples[-1][name]:19.0f}" for name in names)
        print(f"{time.monotonic() - begin:8.0f} {counts.total():9} {values}", flush=True)
    return samples, counts


def complaints(samples: list[Sampled], growth: float) -> list[str]:
    """What was not given back; memory may grow by `growth` MiB from the second sample on."""
    first, last = samples[0], samples[-1]
    second = samples[:2][-1]  # the first, as long as there is no other
    found = [f"{name} is {last[name]:.0f} while idle" for name in IDLE if last[name]]
    found += [
        f"{name} grew from {first[name]:.0f} to {last[name]:.0f}"
        for name in HELD
        if last[name] > first[name]
    ]
    found += [
        f"{name} grew by {(last[name] - second[name]) / 2**20:.1f} MiB"
        for name in MEMORY
        if last[name] - second[name] > growth * 2**20
    ]
    if last["compilations_total"] != first["compilations_total"]:
        found.append("steps were compiled while serving")
    return found


def main() -> int:
    """Soak, print what is held at each pause, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_server_flags(parser)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--pauses", type=int, default=12, help="to look at what is held")
    parser.add_argument("--growth", type=float, default=16.0, help="MiB that memory may grow by")
    options = parser.parse_args()
    if options.pauses < 2:
        parser.error("--pauses must be 2 or more: what is held is compared from pause to pause")
    os.environ.update(ALLOCATOR)
    wrong: list[str] = []
    with server(options) as url:
        samples, counts = asyncio.run(soak(url, options, wrong))
    for text in complaints(samples, options.growth) if samples else ():
        complain(text, wrong)
    kept = [{name: found[name] for name in (*MEMORY, *HELD, *IDLE)} for found in samples]
    print(json.dumps({"benchmark": "soak", "requests": counts, "samples": kept, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
