"""The routes that read or write text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from k3jax import chat as chat_format
from k3jax.chat.constrain import constrain_message, constrain_text
from k3jax.request import Request as EngineRequest
from k3jax.request import SamplingParams
from k3jax.serve import chat, completions
from k3jax.serve.chat import ChatChoice
from k3jax.serve.chat_request import ChatRequest, TokenizeRequest, tools_as_given
from k3jax.serve.client import Generation
from k3jax.serve.errors import ApiError, bad_request, not_offered
from k3jax.serve.protocol import CompletionRequest, DetokenizeRequest, GenerationRequest
from k3jax.serve.responses import fold_response, response_events
from k3jax.serve.responses_request import ResponsesRequest
from k3jax.serve.served import Served, reply_of
from k3jax.serve.sse import EventStream, events, named_events, unless_disconnected
from k3jax.serve.stream import Choice, Form, Head, stream_chunks


class Generate:
    """The routes that read or write text."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._tokenizer = served.tokenizer
        self._client = served.client
        self._end_ids = frozenset(chat_format.end_ids(served.tokenizer))

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """POST /v1/completions: how texts go on."""
        self._check(body)
        count = body.n or 1
        self._client.check_room(count * len(body.prompts))  # before millions of them are read
        prompts = [await self._prompt(prompt) for prompt in body.prompts]
        grammar = await self._grammar(partial(constrain_text, body.form)) if body.form else None
        requests: list[EngineRequest] = []
        choices: list[completions.CompletionChoice] = []
        for prompt in prompts:
            room = self._room(prompt, body, "prompt")
            for number in range(count):
                params = body.sampling(number, max(1, room), grammar)
                if body.scored is not None:
                    params = msgspec.structs.replace(params, prompt_logprobs=body.scored)
                requests.append(_engine_request(prompt, params))
                choices.append(
                    completions.CompletionChoice(self._tokenizer, body, len(choices), prompt)
                )
        return await self._answer(body, http, requests, choices, completions)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """POST /v1/chat/completions: the next message of a conversation."""
        requests, choices = await self._converse(body)
        return await self._answer(body, http, requests, choices, chat)

    async def responses(self, body: ResponsesRequest, http: Request) -> Response:
        """POST /v1/responses: the same in other words; nothing is stored."""
        conversation = body.as_chat()
        requests, choices = await self._converse(conversation)
        generation = self._client.start(requests)
        head = Head(f"resp_{secrets.token_hex(12)}", int(time.time()), self._served.name)
        chunks = stream_chunks(
            generation, choices, partial(chat.make_chunk, head), include_usage=True
        )
        answer = response_events(body, head, chunks)
        if body.stream:
            return EventStream(generation, named_events(answer))
        return await _whole(fold_response(answer), generation, http)

    async def _converse(self, body: ChatRequest) -> tuple[list[EngineRequest], list[ChatChoice]]:
        """The engine requests of a chat, and what reads their answers."""
        self._check(body)
        prompt = await self._conversation(body)
        count = body.n or 1
        room = self._room(prompt, body, "messages")
        grammar = await self._message_grammar(body)
        requests = [_engine_request(prompt, body.sampling(n, room, grammar)) for n in range(count)]
        choices = [
            ChatChoice(self._tokenizer, body, number, self._end_ids) for number in range(count)
        ]
        return requests, choices

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """POST /tokenize: the ids of a text or of a conversation's prompt."""
        self._check_model(body.model)
        if body.prompt is None:
            ids = await self._conversation(body)
        else:
            ids = await asyncio.to_thread(self._tokenizer.encode, body.prompt)
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
        info = self._client.ready_info()
        if body.is_held and not info.guided:
            raise not_offered("constrained output", "response_format")

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

    async def _conversation(self, body: ChatRequest) -> list[int]:
        """Token ids of a conversation's prompt."""

        def encode() -> list[int]:
            said = [message.rendered() for message in body.messages]
            segments = chat_format.render(said, tools_as_given(body.tools), body.chat_options())
            return chat_format.encode(self._tokenizer, segments)

        try:
            return await asyncio.to_thread(encode)
        except ValueError as error:
            raise bad_request(str(error), "messages") from error

    async def _message_grammar(self, body: ChatRequest) -> str | None:
        """The grammar of a chat's answer, if it is held to one."""
        if not body.is_held:
            return None
        return await self._grammar(
            partial(
                constrain_message,
                self._tokenizer,
                thinking=body.thinks,
                form=body.form,
                calls=body.calls,
            ),
            "response_format" if body.form else "tools",
        )

    async def _grammar(self, write: Callable[[], str], param: str = "response_format") -> str:
        """A grammar that can be followed; ApiError, for `param`, if it cannot."""

        def checked() -> str:
            grammar = write()
            self._served.guides.check(grammar)
            return grammar

        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._served.grammar_threads, checked)
        except (ValueError, RecursionError) as error:
            what = "a tool's parameters" if param == "tools" else "the form"
            raise bad_request(f"{what} cannot be read: {error}", param) from error

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
            return EventStream(generation, events(chunks))
        return await _whole(form.fold(head, chunks, len(choices)), generation, http)


def _engine_request(prompt: list[int], params: SamplingParams) -> EngineRequest:
    return EngineRequest(request_id=secrets.token_hex(12), prompt_ids=prompt, params=params)


async def _whole(
    fold: Coroutine[Any, Any, msgspec.Struct | dict[str, Any]],
    generation: Generation,
    http: Request,
) -> Response:
    """The reply that a stream folds to, unless the client goes before."""
    try:
        return reply_of(await unless_disconnected(fold, http.receive))
    finally:
        generation.close()
