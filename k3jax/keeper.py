"""When a running request leaves a prefix for others: at ends of prompts, of turns, and of chunks.

All of these are places where the device knows the state anyway. No step is cut short for one, but
a prompt's chunk ends where the prompt leaves an earlier one (see `Sequence.branch`).
"""

from __future__ import annotations

from collections.abc import Callable

from k3jax.decode.config import DecodeConfig
from k3jax.prefix import PrefixCache, key_of
from k3jax.scheduler import Chunk, Sequence

SPACINGS = 8  # a prompt as long as the context leaves so many prefixes before its end


class Keeper:
    """Puts prefixes of running sequences into a PrefixCache, and their snapshots into the pool."""

    def __init__(
        self,
        prefixes: PrefixCache,
        save: Callable[[int, int, int], None],
        decode_config: DecodeConfig,
    ) -> None:
        """`save(slot, position, number)` takes a snapshot, after all steps dispatched so far."""
        self.prefixes, self.allocator, self.save = prefixes, prefixes.allocator, save
        longest = max(tokens for _, tokens in decode_config.prefill_buckets)
        self.spacing = max(longest, decode_config.max_context // SPACINGS)
        self.lag = min(1, decode_config.lookahead)

    def chunks(self, chunks: list[Chunk], step: int) -> None:
        """Keep the prefixes that the chunks in `step`, just dispatched, have completed.

        Those are whole prompts, what prompts have in common, and now and then a part of a long one.
        """
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.end
            telling = end == sequence.branch or (chunk.final and end == sequence.prompt_length)
            if telling or end - sequence.saved >= self.spacing:
                self._keep(sequence, sequence.tokens[:end], step, cold=not telling)

    def turn(
        self, sequence: Sequence, stop: int | None, device: tuple[int, int], step: int
    ) -> None:
        """Keep what a turn that has ended said, with its stop token if the caches have it.

        `device` is (tokens that the device has emitted, rows among them that it has pending), as
        the latest step read of the sequence left them; `step` is the latest dispatched.
        """
        tokens = sequence.tokens if stop is None else [*sequence.tokens, stop]
        running = sequence.steps_in_flight > 0
        known = last_position(len(tokens), *device, running=running, lag=self.lag)
        if sequence.slot and known is not None and known > sequence.saved:
            self._keep(sequence, tokens[:known], step)

    def _keep(
        self, sequence: Sequence, tokens: list[int], step: int, *, cold: bool = False
    ) -> None:
        """Keep what a sequence knows of these tokens; less than a page is not worth it."""
        count = len(tokens)
        if count < self.allocator.page_size:
            return
        sequence.saved = count
        pages = sequence.pages[: self.allocator.pages_for(count)]
        key, owner = key_of(tokens), sequence.request_id
        number = self.prefixes.save(key, pages, owner, step, cold=cold)
        if number is not None:
            self.save(sequence.slot, count, number)


def last_position(known: int, emitted: int, pending: int, *, running: bool, lag: int) -> int | None:
    """How many of a turn's tokens a snapshot can know at its end, if there is one at all.

    `known` tokens are the turn's, `emitted` those that the device knows, the last of them not yet
    in its caches. It can go back behind the `pending` rows of the latest step, or, if a further
    step of the request is `running`, only to where that one began, or behind its first row. A draft
    model reads one token ahead: by `lag` it goes back less far.
    """
    high = emitted if running else emitted - 1
    low = emitted - 1 if running else emitted - 1 - pending
    ahead = lag if running or pending else 0
    position = min(high, known)
    return position if position >= low + ahead else None
