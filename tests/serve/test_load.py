"""Many streams at once: each gets its own text, overload is refused, and nothing is left behind."""

import asyncio
import gc
import json
import time
from collections import Counter
from dataclasses import dataclass

import psutil
import pytest
from fake_engine import script
from real_engine import Engine
from waiting import eventually

from benchmarks.soak import ALLOCATOR
from k3jax.bundled import bundled_model

STREAMS = 500
TEXT = "abcdefghij"
TOKENS, SLOTS = 16, 16  # of a real engine
MORE = 100  # streams that are too many
DELAY = 0.2  # seconds a token
SPREAD = 2.0  # from text to text the slowest takes at most so many times as long as the fastest
JUMP = 100  # places between coming and being served: connections are accepted in no fixed order
PROCESSES = ("front", "engine")
MEMORY = 100 * 2**20  # bytes, of server and clients together, while the streams run
GROWTH = 32 * 2**20  # bytes, of a real front or engine, from one load to the next


@dataclass(frozen=True)
class Outcome:
    """How one stream went: its times are in seconds from its beginning."""

    status: str
    whole: bool
    retry: bytes
    begin: float
    first: float = 0.0
    last: float = 0.0


def scripted(number, **options):
    """(body, text) of a request to the fake engine."""
    say = f"{number:04}{TEXT}"
    return {"prompt": script(f"{say}■", **options), "max_tokens": 40}, say


def counted(number):
    """(body, text that is not known) of a request to a real engine."""
    prompt = [number % 256, *range(number % 20)]
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}, None


async def stream(address, body, say):
    """One streamed completion over a connection of its own."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address)
    body = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    status = (await reader.readline()).split()[1].decode()
    retry = b""
    while (line := await reader.readline()).strip():
        retry = line.strip() if line.lower().startswith(b"retry-after") else retry
    text, first, ended, usage = "", 0.0, False, None
    while status == "200" and not ended:
        line = (await reader.readline()).decode()
        if line.startswith("data: {"):
            first = first or time.perf_counter() - begin
            event = json.loads(line[6:])
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event["usage"] or usage
        ended = line.startswith("data: [DONE]")
    last = time.perf_counter() - begin
    writer.close()
    await writer.wait_closed()
    tokens = usage and usage["completion_tokens"]
    whole = text == say or (say is None and tokens == TOKENS)
    return Outcome(status, whole, retry, begin, first, last)


async def most_memory(used):
    """Keep `used[0]` at the most that this process has had."""
    while True:
        used[0] = max(used[0], psutil.Process().memory_info().rss)
        await asyncio.sleep(0.05)


async def streams(server, asked):
    """The outcomes of so many streams at once."""
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.gather(*(stream((host, int(port)), *each) for each in asked))


async def gated(server, asked, more):
    """The outcomes of streams that run while all are open, and of those that come meanwhile."""
    first = asyncio.create_task(streams(server, asked))
    while server.client.open_requests < len(asked):
        assert not first.done()
        await asyncio.sleep(0.01)
    late = await streams(server, more)
    server.call(server.link.gate.set)
    return await first, late


def measured(running):
    """What a coroutine gives, and the most memory of this process meanwhile."""
    used = [0]

    async def run():
        watch = asyncio.create_task(most_memory(used))
        result = await running
        watch.cancel()
        return result

    return asyncio.run(run()), used[0]


@pytest.fixture
def loaded(make_server):
    return make_server(max_waiting=STREAMS - 4)


def tasks_of(server):
    return len(asyncio.all_tasks(server.loop))


def good(outcomes):
    return all(outcome.status == "200" and outcome.whole for outcome in outcomes)


def test_streams_at_once_then_too_many(loaded, capsys):
    assert loaded.http.get("/ready").status_code == 200
    eventually(lambda: tasks_of(loaded) == 1)  # the server's own: that of the answer has ended
    gc.collect()  # files that an earlier test left to it would hide ones that leak here
    process = psutil.Process()
    files, memory = process.num_fds(), process.memory_info().rss
    asked = [scripted(number, delay=DELAY, gate=True) for number in range(STREAMS)]
    (outcomes, refused), most = measured(gated(loaded, asked, [scripted(0)] * MORE))
    assert good(outcomes)
    assert {outcome.status for outcome in refused} == {"429"}
    assert {outcome.retry.lower() for outcome in refused} == {b"retry-after: 1"}
    first = sorted(outcome.first for outcome in outcomes)
    whole = [outcome.last - outcome.first for outcome in outcomes]
    with capsys.disabled():
        print(
            f"\n{STREAMS} streams: first text after {first[0]:.2f} to {first[-1]:.2f} s, whole "
            f"{min(whole):.2f} to {max(whole):.2f} s later; {(most - memory) / 2**20:.0f} MiB more"
        )
    assert max(whole) < SPREAD * min(whole)
    assert most - memory < MEMORY
    assert good(asyncio.run(streams(loaded, [scripted(number) for number in range(20)])))
    eventually(lambda: loaded.client.open_requests == 0)
    eventually(lambda: tasks_of(loaded) == 1)
    eventually(lambda: process.num_fds() <= files)
    assert process.memory_info().rss - memory < MEMORY


def memory_of(engine):
    """Bytes of front and engine."""
    return [engine.metric(f'k3jax_memory_bytes{{process="{name}"}}') for name in PROCESSES]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_streams_at_once_of_a_real_engine(tmp_path, monkeypatch):
    """Who comes first is served first, and once all places were taken memory grows no more."""
    for name, value in ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    flags = f"--model {bundled_model()} --dtype float32 --max-context 64 --max-waiting "
    flags += str(STREAMS - SLOTS)
    engine = Engine(tmp_path, SLOTS, flags)
    try:
        begin = time.perf_counter()
        outcomes = asyncio.run(streams(engine, [counted(n) for n in range(STREAMS)]))
        seconds = time.perf_counter() - begin
        assert good(outcomes)
        served = sorted(outcomes, key=lambda outcome: outcome.begin + outcome.first)
        order = {id(outcome): place for place, outcome in enumerate(served)}
        lag = max(abs(order[id(outcome)] - place) for place, outcome in enumerate(outcomes))
        first = sorted(outcome.first for outcome in served)
        p50, p99 = (first[int(part * len(first))] for part in (0.5, 0.99))
        print(
            f"\n{STREAMS} streams of {TOKENS} tokens, {SLOTS} at a time, in {seconds:.1f} s: first "
            f"text after {p50:.2f} s (p50), {p99:.2f} s (p99), {lag} places lost or won at most"
        )
        assert lag < JUMP
        before = memory_of(engine)
        outcomes = asyncio.run(streams(engine, [counted(n) for n in range(STREAMS + MORE)]))
        grown = [now - then for now, then in zip(memory_of(engine), before, strict=True)]
        statuses = Counter(outcome.status for outcome in outcomes)
        print(f"{dict(statuses)}; front, engine grew by {[round(b / 2**20, 1) for b in grown]} MiB")
        assert good(outcome for outcome in outcomes if outcome.status == "200")
        assert set(statuses) <= {"200", "429"}
        assert max(grown) < GROWTH
        eventually(lambda: engine.metric("k3jax_slots_in_use") == 0)
        assert engine.metric("k3jax_waiting") == engine.metric("k3jax_pages_in_use") == 0
    finally:
        engine.close()
