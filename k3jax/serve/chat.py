"""Deltas to OpenAI chat messages: reasoning, content and tool calls as the model says them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Collection, Sequence

from msgspec import UNSET, UnsetType

from k3jax.chat import ChatEvent, ChatParser
from k3jax.request import Delta, TokenLogprob
from k3jax.serve import replies
from k3jax.serve.chat_request import ChatRequest
from k3jax.serve.stops import StopMatcher
from k3jax.serve.stream import Head, Tally, UsageField, finite
from k3jax.tokenizer import Tokenizer

ID_PREFIX = "chatcmpl"


class ChatChoice:
    """One answer of a chat, from the deltas of its request; `end_ids` end an answer.

    Stop strings are looked for in the content, not in the reasoning nor in calls.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: ChatRequest, index: int, end_ids: Collection[int]
    ) -> None:
        self.tally = Tally()
        self.finish_reason: replies.FinishReason | None = None
        self._tokenizer = tokenizer
        self._request = request
        self._index = index
        self._end_ids = end_ids
        self._parser = ChatParser(tokenizer, thinking=request.thinks)
        self._matcher = StopMatcher(request.stops)
        self._generated = 0
        self._calls = 0
        self._has_enough_calls = False
        self._begun = False
        self._read = 0  # characters of content that were parsed
        self._shown = 0  # and that were given out
        self._scores: list[tuple[int, TokenLogprob]] = []  # held: offset in the content, score

    def push(self, delta: Delta) -> replies.ChatChunkChoice | None:
        """The piece that a delta brings, if any; sets `finish_reason` with the last."""
        self.tally.add(delta)
        added = _Added()
        for place, token in enumerate(delta.token_ids):
            score = None if delta.logprobs is None else delta.logprobs[place]
            self._push_token(token, score, added)
            if self._matcher.matched is not None or self._has_enough_calls:
                break
        stop_reason: str | int | None = self._matcher.matched
        if stop_reason is not None or self._has_enough_calls:
            self.finish_reason = "stop" if stop_reason is not None else "tool_calls"
            self.tally.completion = self._generated
        elif delta.finish_reason is not None:
            self._finish(delta, added)
            if delta.stop_token in (self._request.stop_token_ids or ()):
                stop_reason = delta.stop_token
        return self._piece(added, stop_reason)

    def _push_token(self, token: int, score: TokenLogprob | None, added: _Added) -> None:
        self._generated += 1
        self.tally.reasoning += self._parser.in_reasoning
        is_content = self._parser.in_content and not self._tokenizer.is_control(token)
        if score is not None and is_content:
            self._scores.append((self._read, score))
        self._add(self._parser.push([token]), added)

    def _finish(self, delta: Delta, added: _Added) -> None:
        """The engine ended the request: the answer is whole if the model said so."""
        ended = delta.stop_token is not None and delta.stop_token in self._end_ids
        if ended and delta.stop_token is not None:
            self._add(self._parser.push([delta.stop_token]), added)
        self._add(self._parser.finish(), added)
        if self._matcher.matched is None:
            added.content += self._matcher.flush()
        if delta.finish_reason == "length":
            self.finish_reason = "length"
        else:
            self.finish_reason = "tool_calls" if ended and self._calls else "stop"

    def _add(self, events: Sequence[ChatEvent], added: _Added) -> None:
        for event in events:
            if event.kind == "reasoning":
                added.reasoning += event.text
            elif event.kind == "content":
                self._read += len(event.text)
                early = self._generated <= (self._request.min_tokens or 0)
                added.content += event.text if early else self._matcher.push(event.text)
            elif event.kind == "call" and self._calls and self._request.calls_once:
                self._has_enough_calls = True
                return
            elif event.kind == "call":
                self._calls += 1
                added.calls.append(
                    replies.ToolCall(
                        index=event.index,
                        id=f"call_{secrets.token_hex(12)}",
                        type="function",
                        function=replies.CalledFunction(name=event.text, arguments=""),
                    )
                )
            elif added.calls and added.calls[-1].index == event.index:
                added.calls[-1].function.arguments += event.text
            else:
                function = replies.CalledFunction(arguments=event.text)
                added.calls.append(replies.ToolCall(index=event.index, function=function))

    def _piece(
        self, added: _Added, stop_reason: str | int | None
    ) -> replies.ChatChunkChoice | None:
        if added.is_empty and self.finish_reason is None:
            return None
        self._shown += len(added.content)
        delta = replies.ChatDelta(
            role=UNSET if self._begun else "assistant",
            reasoning_content=added.reasoning or UNSET,
            reasoning=added.reasoning or UNSET,
            content=added.content or (UNSET if self._begun else ""),
            tool_calls=added.calls or UNSET,
        )
        self._begun = True
        return replies.ChatChunkChoice(
            index=self._index,
            delta=delta,
            logprobs=self._logprobs() if self._request.logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=UNSET if stop_reason is None else stop_reason,
        )

    def _logprobs(self) -> replies.ChatLogprobs:
        """The held scores of the tokens whose text is given out now."""
        everything = self.finish_reason is not None and self._matcher.matched is None
        ready = [score for offset, score in self._scores if everything or offset < self._shown]
        self._scores = self._scores[len(ready) :]
        return replies.ChatLogprobs(content=[self._token_logprobs(score) for score in ready])

    def _token_logprobs(self, score: TokenLogprob) -> replies.TokenLogprobs:
        own = self._named(score.token_id, score.logprob)
        return replies.TokenLogprobs(
            token=own.token,
            logprob=own.logprob,
            bytes=own.bytes,
            top_logprobs=[self._named(token, value) for token, value in score.top],
        )

    def _named(self, token: int, logprob: float) -> replies.TopLogprob:
        content = self._tokenizer.token_bytes(token)
        return replies.TopLogprob(
            token=content.decode("utf-8", "replace"), logprob=finite(logprob), bytes=list(content)
        )


class _Added:
    """What one delta adds to a message."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: list[replies.ToolCall] = []

    @property
    def is_empty(self) -> bool:
        return not (self.reasoning or self.content or self.calls)


def make_chunk(
    head: Head, choices: list[replies.ChatChunkChoice], usage: UsageField
) -> replies.ChatChunk:
    """Put a chunk together."""
    return replies.ChatChunk(
        id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
    )


async def fold(
    head: Head, chunks: AsyncIterator[replies.ChatChunk], count: int
) -> replies.ChatCompletion:
    """The whole reply: what `count` choices said in all their chunks."""
    pieces: list[list[replies.ChatChunkChoice]] = [[] for _ in range(count)]
    usage: UsageField = UNSET
    async for chunk in chunks:
        usage = chunk.usage
        for piece in chunk.choices:
            pieces[piece.index].append(piece)
    return replies.ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[_join(choice) for choice in pieces],
        usage=usage,
    )


def _join(pieces: Sequence[replies.ChatChunkChoice]) -> replies.ChatChoice:
    """One answer from its pieces; there is at least the last, with the finish reason."""
    deltas = [piece.delta for piece in pieces]
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(delta.reasoning_content or "" for delta in deltas)
    calls: list[replies.ToolCall] = []
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        if isinstance(call.id, UnsetType):
            calls[-1].function.arguments += call.function.arguments
        else:
            function = replies.CalledFunction(
                name=call.function.name, arguments=call.function.arguments
            )
            calls.append(replies.ToolCall(id=call.id, type="function", function=function))
    scores = [piece.logprobs.content for piece in pieces if piece.logprobs is not None]
    last = pieces[-1]
    return replies.ChatChoice(
        index=last.index,
        message=replies.ChatMessage(
            role="assistant",
            content=content if content or not calls else None,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=replies.ChatLogprobs(content=[s for part in scores for s in part])
        if scores
        else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
