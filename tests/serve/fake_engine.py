"""An engine of a few lines: it says what the prompt tells it to.

A prompt that holds `script({...})` is answered with the script's ids; others with "ok". A script
with `gate` waits until the gate is open.
"""

import asyncio
import json
import re
from pathlib import Path

from k3jax.request import Delta, Stats, TokenLogprob
from k3jax.serve.link import Abort, Add, Deltas, Ready, ReadyInfo, Trace, Traced
from k3jax.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parent.parent.parent / "checkpoints" / "k3-tiny"
TOKENIZER = Tokenizer.from_directory(CHECKPOINT)
SIGNS = {
    "⟨": TOKENIZER.control("<|open|>"),
    "⟩": TOKENIZER.control("<|close|>"),
    "§": TOKENIZER.control("<|sep|>"),
    "■": TOKENIZER.control("<|end_of_msg|>"),
}
END = SIGNS["■"]
INFO = ReadyInfo(model="k3-tiny", vocab_size=512, max_context=4000, slots=4, pages=100, guided=True)


def ids_of(text):
    """Ids of a text in which one sign stands for each control token: ⟨think§ is a tag."""
    ids = []
    for letter in text:
        ids += [SIGNS[letter]] if letter in SIGNS else TOKENIZER.encode(letter)
    return ids


def script(text, **options):
    """A prompt that makes the engine say a text; `group` ids a delta, `delay` seconds between."""
    return "script(" + json.dumps({"say": ids_of(text), **options}) + ")"


def logprob_of(token, count):
    return TokenLogprob(token, -0.5, [((token + n) % 512, -0.5 - n) for n in range(count)])


def answer(request):
    """The script of a request and the deltas that it gives."""
    prompt = TOKENIZER.decode(request.prompt_ids)
    found = re.findall(r"script\((\{.*?\})\)", prompt)
    told = json.loads(found[-1]) if found else {"say": ids_of("ok■")}
    params = request.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (END, 509))}
    limit = params.max_tokens
    ids = told["say"] + ([120] * limit if params.ignore_eos else [END])
    place = next((n for n, token in enumerate(ids) if token in stops), len(ids))
    stop = ids[place] if place < min(limit, len(ids)) else None
    known = len(request.generated)
    assert request.generated == ids[:known]
    ids = ids[known : min(place, limit)]
    group = told.get("group", 1)
    groups = [ids[start : start + group] for start in range(0, len(ids), group)]
    groups += [[]] if stop is not None or not groups else []  # the stop token has a step of its own
    scored = stop is not None and params.logprobs is not None
    deltas, generated = [], known
    for number, part in enumerate(groups):
        last = number == len(groups) - 1
        generated += len(part) + (last and stop is not None)
        deltas.append(
            Delta(
                request_id=request.request_id,
                token_ids=part,
                logprobs=None
                if params.logprobs is None
                else [logprob_of(token, params.logprobs) for token in part],
                prompt_logprobs=None
                if params.prompt_logprobs is None or number
                else [None]
                + [logprob_of(t, params.prompt_logprobs) for t in request.prompt_ids[1:]],
                finish_reason=("stop" if stop is not None else "length") if last else None,
                stop_token=stop if last else None,
                stop_logprob=logprob_of(stop, params.logprobs) if last and scored else None,
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=told.get("cached", 0),
                completion_tokens=generated,
            )
        )
    if "error" in told:
        deltas[-1] = Delta(
            request_id=request.request_id, finish_reason="error", error=told["error"]
        )
    return told, deltas


def stats(running=0):
    return Stats(
        waiting=0,
        running=running,
        slots_in_use=running,
        slots=4,
        pages_in_use=2 * running,
        pages=100,
        prompt_tokens=0,
        generated_tokens=0,
        preemptions=0,
        prefix_queries=8,
        prefix_hits=2,
        finished={},
        steps={"stock/backend": 7, "stock/prefill": 2},
    )


class FakeLink:
    """An engine in the front's own event loop."""

    def __init__(self):
        self.client = None
        self.requests = {}
        self.aborted = []
        self.traces = []
        self.gate = asyncio.Event()
        self._tasks = {}

    def start(self, client):
        self.client = client
        client.handle(Ready(INFO))

    def send(self, message):
        if isinstance(message, Add):
            request = message.request
            self.requests[request.request_id] = request
            task = asyncio.get_running_loop().create_task(self._answer(request))
            self._tasks[request.request_id] = task
        elif isinstance(message, Trace):
            self.traces.append(message)
            if message.steps < 100:
                self.client.handle(Traced("no room" if message.steps == 99 else None))
        elif isinstance(message, Abort):
            self.aborted.append(message.request_id)
            self._tasks[message.request_id].cancel()

    async def _answer(self, request):
        told, deltas = answer(request)
        if "gate" in told:
            await self.gate.wait()
        for delta in deltas:
            await asyncio.sleep(told.get("delay", 0))
            self.client.handle(Deltas([delta], stats(1)))
