"""Deltas to OpenAI completions: pieces of text with their log probabilities."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from msgspec import UNSET, UnsetType

from k3jax.request import Delta, TokenLogprob
from k3jax.serve import replies
from k3jax.serve.protocol import CompletionRequest
from k3jax.serve.stops import StopMatcher
from k3jax.serve.stream import Head, Tally, UsageField, finite
from k3jax.tokenizer import Detokenizer, Tokenizer

ID_PREFIX = "cmpl"


class CompletionChoice:
    """One text of a completion, from the deltas of its request."""

    def __init__(
        self, tokenizer: Tokenizer, request: CompletionRequest, index: int, prompt_ids: list[int]
    ) -> None:
        self.tally = Tally()
        self.finish_reason: replies.FinishReason | None = None
        self._tokenizer = tokenizer
        self._request = request
        self._index = index
        self._echoed = prompt_ids if request.echo else []
        self._prompt_scores: list[dict[str, replies.PromptToken] | None] | UnsetType = UNSET
        self._show_control = request.skip_special_tokens is False
        self._detokenizer = Detokenizer(tokenizer, show_control=self._show_control)
        self._matcher = StopMatcher(request.stops)
        self._generated = 0
        self._read = 0  # characters that were decoded
        self._shown = 0  # and that were given out
        self._scores: list[tuple[int, int, TokenLogprob | None]] = []  # held: offset, id, score

    def push(self, delta: Delta) -> replies.CompletionChoice | None:
        """The piece that a delta brings, if any; sets `finish_reason` with the last."""
        self.tally.add(delta)
        if delta.prompt_logprobs is not None and self._request.prompt_logprobs is not None:
            self._prompt_scores = [self._prompt_token(score) for score in delta.prompt_logprobs]
        text = self._echo(delta)
        if self._request.max_tokens == 0:  # only the prompt was asked for
            self.finish_reason, self.tally.completion = "length", 0
            return self._piece(text, None)
        text += self._generate(delta)
        stop_reason: str | int | None = self._matcher.matched
        if stop_reason is not None:
            self.finish_reason, self.tally.completion = "stop", self._generated
        elif delta.finish_reason is not None:
            rest = self._detokenizer.finish()
            self._read += len(rest)
            text += self._matcher.push(rest) + self._matcher.flush()
            if delta.stop_token is not None and delta.stop_logprob is not None:
                self._scores.append((self._read, delta.stop_token, delta.stop_logprob))
            self.finish_reason = "stop" if delta.finish_reason == "stop" else "length"
            if delta.stop_token in (self._request.stop_token_ids or ()):
                stop_reason = delta.stop_token
        return self._piece(text, stop_reason)

    def _echo(self, delta: Delta) -> str:
        """The prompt, with the first delta, if it was asked for."""
        if not self._echoed:
            return ""
        echo = Detokenizer(self._tokenizer, show_control=self._show_control)
        scores = delta.prompt_logprobs or [None] * len(self._echoed)
        text = ""
        for token, score in zip(self._echoed, scores, strict=True):
            self._scores.append((len(text), token, score))
            text += echo.push([token])
        text += echo.finish()
        self._read, self._echoed = len(text), []
        return text

    def _generate(self, delta: Delta) -> str:
        """The text that a delta's tokens let through, token by token up to a stop string."""
        shown = []
        for place, token in enumerate(delta.token_ids):
            self._generated += 1
            if delta.logprobs is not None:
                self._scores.append((self._read, token, delta.logprobs[place]))
            text = self._detokenizer.push([token])
            self._read += len(text)
            early = self._generated <= (self._request.min_tokens or 0)
            shown.append(text if early else self._matcher.push(text))
            if self._matcher.matched is not None:
                break
        return "".join(shown)

    def _piece(self, text: str, stop_reason: str | int | None) -> replies.CompletionChoice | None:
        self._shown += len(text)
        logprobs = None if self._request.logprobs is None else self._logprobs()
        scores, self._prompt_scores = self._prompt_scores, UNSET
        said = text or scores is not UNSET or (logprobs and logprobs.tokens)
        if not said and self.finish_reason is None:
            return None
        return replies.CompletionChoice(
            index=self._index,
            text=text,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=UNSET if stop_reason is None else stop_reason,
            prompt_logprobs=scores,
        )

    def _logprobs(self) -> replies.CompletionLogprobs:
        """The held entries of the tokens whose text is given out now."""
        everything = self.finish_reason is not None and self._matcher.matched is None
        ready = [entry for entry in self._scores if everything or entry[0] < self._shown]
        self._scores = self._scores[len(ready) :]
        names = [token_name(self._tokenizer, token) for _, token, _ in ready]
        wanted = self._request.logprobs or 0
        return replies.CompletionLogprobs(
            tokens=names,
            token_logprobs=[None if s is None else finite(s.logprob) for _, _, s in ready],
            top_logprobs=[self._top(score, wanted) for _, _, score in ready] if wanted else None,
            text_offset=[offset for offset, _, _ in ready],
        )

    def _prompt_token(self, score: TokenLogprob | None) -> dict[str, replies.PromptToken] | None:
        """The most probable tokens at a place of the prompt, and the one that stands there."""
        if score is None:
            return None
        best = score.top[: self._request.prompt_logprobs]
        ranked: list[tuple[int, float, int | None]] = [
            (token, value, rank) for rank, (token, value) in enumerate(best, 1)
        ]
        if score.token_id not in [token for token, _, _ in ranked]:
            ranked.append((score.token_id, score.logprob, None))
        return {
            str(token): replies.PromptToken(
                logprob=finite(value), rank=rank, decoded_token=self._tokenizer.decode([token])
            )
            for token, value, rank in ranked
        }

    def _top(self, score: TokenLogprob | None, wanted: int) -> dict[str, float] | None:
        """The most probable tokens; the one that was taken is always among them."""
        if score is None:
            return None
        best = score.top[:wanted]
        top = {token_name(self._tokenizer, token): finite(value) for token, value in best}
        top.setdefault(token_name(self._tokenizer, score.token_id), finite(score.logprob))
        return top


def token_name(tokenizer: Tokenizer, token: int) -> str:
    r"""A token's text, or `bytes:\xe2\x82` where that is no text, as OpenAI writes it."""
    content = tokenizer.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def make_chunk(
    head: Head, choices: list[replies.CompletionChoice], usage: UsageField
) -> replies.Completion:
    """Put a chunk, or the whole reply, together."""
    return replies.Completion(
        id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
    )


async def fold(
    head: Head, chunks: AsyncIterator[replies.Completion], count: int
) -> replies.Completion:
    """The whole reply: what `count` choices said in all their chunks."""
    pieces: list[list[replies.CompletionChoice]] = [[] for _ in range(count)]
    usage: UsageField = UNSET
    async for chunk in chunks:
        usage = chunk.usage
        for piece in chunk.choices:
            pieces[piece.index].append(piece)
    return make_chunk(head, [_join(choice) for choice in pieces], usage)


def _join(pieces: Sequence[replies.CompletionChoice]) -> replies.CompletionChoice:
    """One choice from its pieces; there is at least the last, with the finish reason."""
    scores = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    last = pieces[-1]
    return replies.CompletionChoice(
        index=last.index,
        text="".join(piece.text for piece in pieces),
        logprobs=_join_logprobs(scores) if scores else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=pieces[0].prompt_logprobs,
    )


def _join_logprobs(parts: Sequence[replies.CompletionLogprobs]) -> replies.CompletionLogprobs:
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    return replies.CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[top for part in tops for top in part] if tops else None,
        text_offset=[offset for part in parts for offset in part.text_offset],
    )
