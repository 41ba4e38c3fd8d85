"""The HTTP routes: OpenAI's completions and chat, and what an operator asks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from k3jax import chat as chat_format
from k3jax.request import Request as EngineRequest
from k3jax.request import SamplingParams
from k3jax.serve import chat, completions, errors, replies
from k3jax.serve.client import EngineClient, Generation
from k3jax.serve.errors import ApiError, bad_request
from k3jax.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    tools_as_given,
)
from k3jax.serve.sse import EventStream, unless_disconnected
from k3jax.serve.stream import Choice, Form, Head, stream_chunks
from k3jax.tokenizer import Tokenizer

CLIENT_GONE = 499  # what others log for a client that did not wait; nobody reads it


@dataclass(frozen=True)
class Served:
    """What an app serves: a model by name, through an engine."""

    name: str
    tokenizer: Tokenizer
    client: EngineClient
    created: int = field(default_factory=lambda: int(time.time()))


def create_app(served: Served) -> FastAPI:
    """The ASGI application of one model."""
    app = FastAPI(title="k3jax", docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)
    generate, operate = Generate(served), Operate(served)
    app.post("/v1/completions")(generate.completions)
    app.post("/v1/chat/completions")(generate.chat)
    app.post("/tokenize")(generate.tokenize)
    app.post("/detokenize")(generate.detokenize)
    app.get("/v1/models")(operate.models)
    app.get("/v1/models/{name:path}")(operate.model)
    app.get("/health")(operate.health)
    app.get("/ready")(operate.ready)
    app.get("/metrics")(operate.metrics)
    return app


class Generate:
    """The routes that read or write text."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._tokenizer = served.tokenizer
        self._client = served.client
        self._end_ids = frozenset(chat_format.end_ids(served.tokenizer))

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """POST /v1/completions."""
        self._check(body)
        count = body.n or 1
        self._client.check_room(count * len(body.prompts))  # before millions of them are read
        prompts = [await self._prompt(prompt) for prompt in body.prompts]
        requests: list[EngineRequest] = []
        choices: list[completions.CompletionChoice] = []
        for prompt in prompts:
            room = self._room(prompt, body, "prompt")
            for number in range(count):
                params = body.sampling(number, max(1, room))
                if body.echo and body.logprobs is not None:
                    params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
                requests.append(_engine_request(prompt, params))
                choices.append(
                    completions.CompletionChoice(self._tokenizer, body, len(choices), prompt)
                )
        return await self._answer(body, http, requests, choices, completions)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """POST /v1/chat/completions."""
        self._check(body)
        tools = tools_as_given(body.tools)
        declared = tools or any(message.tools for message in body.messages)
        options = chat_format.ChatOptions(
            thinking=body.thinks,
            thinking_effort=body.effort,
            tool_choice=str(body.tool_choice) if declared else None,
        )
        prompt = await self._conversation(body.messages, tools, options)
        count = body.n or 1
        room = self._room(prompt, body, "messages")
        requests = [_engine_request(prompt, body.sampling(n, room)) for n in range(count)]
        choices = [
            chat.ChatChoice(self._tokenizer, body, number, self._end_ids) for number in range(count)
        ]
        return await self._answer(body, http, requests, choices, chat)

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """POST /tokenize: the ids of a text or of a conversation's prompt."""
        self._check_model(body.model)
        if body.messages is not None:
            options = chat_format.ChatOptions(thinking_effort=chat_format.EFFORTS[-1])
            tools = tools_as_given(body.tools)
            ids = await self._conversation(body.messages, tools, options)
        else:
            ids = await asyncio.to_thread(self._tokenizer.encode, body.prompt or "")
        info = self._client.info
        return JSONResponse(
            {"count": len(ids), "max_model_len": info and info.max_context, "tokens": ids}
        )

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """POST /detokenize: the text of ids, control tokens by name."""
        self._check_model(body.model)
        self._check_ids(body.tokens, "tokens")
        return JSONResponse({"prompt": self._tokenizer.decode(body.tokens)})

    def _check(self, body: GenerationRequest) -> None:
        """Everything that can be said of a request before its prompt is encoded."""
        self._check_model(body.model)
        body.check()
        self._check_ids(body.stop_token_ids or (), "stop_token_ids")
        self._check_ids([int(token) for token in body.logit_bias or ()], "logit_bias")
        self._client.ready_info()

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.name:
            raise ApiError(
                404,
                f"there is no model {name!r} here, only {self._served.name!r}",
                param="model",
                code="model_not_found",
            )

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        size = self._tokenizer.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise bad_request(f"{param}: token id {wrong} is not in [0, {size})", param)

    async def _prompt(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a completion's prompt; an empty text is the beginning of a text."""
        if not isinstance(prompt, str):
            self._check_ids(prompt, "prompt")
            return prompt
        ids = await asyncio.to_thread(self._tokenizer.encode, prompt)
        return ids or ([] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id])

    async def _conversation(
        self, messages: Sequence[Any], tools: list[dict[str, Any]], options: chat_format.ChatOptions
    ) -> list[int]:
        """Token ids of a conversation's prompt."""

        def encode() -> list[int]:
            said = [message.rendered() for message in messages]
            segments = chat_format.render(said, tools, options)
            return chat_format.encode(self._tokenizer, segments)

        try:
            return await asyncio.to_thread(encode)
        except ValueError as error:
            raise bad_request(str(error), "messages") from error

    def _room(self, prompt: list[int], body: GenerationRequest, param: str) -> int:
        """The tokens that a request may generate; ApiError if the context is too small."""
        context = self._client.ready_info().max_context
        room = context - len(prompt)
        if not prompt or room < 1:
            raise bad_request(
                f"the prompt has {len(prompt)} tokens; 1 to {context - 1} fit the context",
                param,
                "context_length_exceeded",
            )
        limit = body.token_limit
        asked = body.max_tokens is not None or isinstance(body, ChatRequest)
        if limit is not None and limit > room and asked:
            raise bad_request(
                f"{limit} tokens were asked for, but after a prompt of {len(prompt)} only {room} "
                f"fit the context of {context}",
                param,
                "context_length_exceeded",
            )
        room = room if limit is None else min(limit, room)
        if (body.min_tokens or 0) > max(1, room):
            raise bad_request(f"only {room} tokens can be generated", "min_tokens")
        return room

    async def _answer(
        self,
        body: GenerationRequest,
        http: Request,
        requests: list[EngineRequest],
        choices: Sequence[Choice[Any]],
        form: Form,
    ) -> Response:
        """Start one engine request a choice; their stream, or the reply that it folds to."""
        generation = self._client.start(requests)
        name = f"{form.ID_PREFIX}-{secrets.token_hex(12)}"
        head = Head(name, int(time.time()), self._served.name)
        chunks = stream_chunks(
            generation,
            choices,
            partial(form.make_chunk, head),
            include_usage=body.include_usage or not body.stream,
            choices_per_prompt=body.n or 1,
        )
        if body.stream:
            return EventStream(generation, chunks)
        return await _whole(form.fold(head, chunks, len(choices)), generation, http)


class Operate:
    """The routes about the server itself."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._client = served.client

    async def models(self) -> Response:
        """GET /v1/models."""
        return _reply(replies.ModelList(data=[self._card()]))

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        if name != self._served.name:
            raise ApiError(404, f"there is no model {name!r} here", code="model_not_found")
        return _reply(self._card())

    async def health(self) -> Response:
        """GET /health: 200 as long as the engine lives, also while it loads."""
        failed = self._client.state == "failed"
        state = {"status": self._client.state, "detail": self._client.failure}
        return JSONResponse(state, status_code=503 if failed else 200)

    async def ready(self) -> Response:
        """GET /ready: 200 when requests are served, 503 before, after and while draining."""
        state = {"status": self._client.state, "detail": self._client.progress}
        return JSONResponse(state, status_code=200 if self._client.state == "ready" else 503)

    async def metrics(self) -> Response:
        """GET /metrics, in Prometheus' text format."""
        content = self._client.metrics.text()
        return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _card(self) -> replies.ModelCard:
        info = self._client.info
        return replies.ModelCard(
            id=self._served.name,
            created=self._served.created,
            max_model_len=None if info is None else info.max_context,
        )


def _engine_request(prompt: list[int], params: SamplingParams) -> EngineRequest:
    return EngineRequest(request_id=secrets.token_hex(12), prompt_ids=prompt, params=params)


async def _whole(
    fold: Coroutine[Any, Any, msgspec.Struct], generation: Generation, http: Request
) -> Response:
    """The reply that a stream folds to, unless the client goes before."""
    try:
        return _reply(await unless_disconnected(fold, http.receive))
    finally:
        generation.close()


def _reply(reply: msgspec.Struct | None) -> Response:
    if reply is None:
        return Response(status_code=CLIENT_GONE)
    return Response(msgspec.json.encode(reply), media_type="application/json")
