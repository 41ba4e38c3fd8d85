"""Constrained decoding on the host: which tokens a grammar allows after what was said so far.

Grammars are llguidance's: the JSON text of a list of Lark grammars and JSON schemas, in which
`<[ID]>` stands for a control token. k3jax.chat.constrain writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from k3jax.tokenizer import Tokenizer

# What one request may ask of a core and of memory. Compiling takes up to a second at these limits,
# quadratic in the size; a mask some 20 ms, which all who run wait for.
GRAMMAR_CHARACTERS = 250_000
LIMITS = LLParserLimits(
    max_grammar_size=40_000,  # symbols
    initial_lexer_fuel=200_000,  # for the regular expressions, 50,000 in a millisecond
    step_lexer_fuel=200_000,  # for a mask, 14,000 in a millisecond
    step_max_items=50_000,  # for a mask, 20,000 in a millisecond
    max_lexer_states=50_000,  # of a request, 2 kB each
)


def grammar_threads() -> ThreadPoolExecutor:
    """Threads for grammars alone: a slow one holds up one of two, and nothing else."""
    return ThreadPoolExecutor(2, thread_name_prefix="grammar")


class Guides:
    """Reads grammars for the ids of one tokenizer; `end_ids` end an answer."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self._words = -(-tokenizer.vocab_size // 32)
        self._vocabulary = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer, sorted(end_ids)[0])),
            n_vocab=tokenizer.vocab_size,
            eos_token=sorted(end_ids),
        )

    def check(self, grammar: str) -> None:
        """Raise ValueError, saying why, unless `grammar` can be followed up to its first choice.

        Like `matcher` it may take a second, for any thread: Python's lock is free meanwhile.
        """
        matcher = self.matcher(grammar)
        matcher.advance(matcher.forced())
        matcher.fill(np.zeros((1, self._words), np.uint32))
        if matcher.error is not None:
            raise ValueError(matcher.error)

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of a text; ValueError if the grammar is wrong or too large."""
        if len(grammar) > GRAMMAR_CHARACTERS:
            raise ValueError(
                f"a grammar has {GRAMMAR_CHARACTERS} characters at most, this one {len(grammar)}"
            )
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)
        return Matcher(matcher, self._words)


def _reason(said: str) -> str:
    """The first line of what llguidance says, and what it finds wrong with a regular expression."""
    first, _, rest = said.partition("\n")
    if not first.endswith(":"):
        return first
    causes = (line for line in rest.splitlines() if line.startswith("error: "))
    return f"{first} {next(causes, '').removeprefix('error: ')}"


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words
        if matcher.is_error():
            raise ValueError(_reason(matcher.get_error()))

    @property
    def is_complete(self) -> bool:
        """Whether what was said is a whole text of the grammar."""
        return self._matcher.is_accepting()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further: it was left, or is too much work."""
        if not self._matcher.is_error():
            return None
        return f"the grammar cannot be followed: {_reason(self._matcher.get_error())}"

    def fill(self, mask: np.ndarray, drafts: Sequence[int] = ()) -> None:
        """Set the bits of the tokens that each row may give, bit i of word w for id 32 w + i.

        `mask` is uint32[T, ceil(V / 32)]; its row 0 is of the next token, row t of the one after t
        `drafts`. Rows after a draft that is not allowed are left as they are. Once the text can
        only end, the end ids alone are allowed.
        """
        if mask.shape[1:] != (self._words,) or mask.dtype != np.uint32:
            wanted = f"uint32[T, {self._words}]"
            raise ValueError(f"a mask must be {wanted}, got {mask.dtype}{list(mask.shape)}")
        said = 0
        for row in range(len(mask)):
            if row:
                if row > len(drafts) or not self._allows(drafts[row - 1]):
                    break
                self._matcher.consume_token(drafts[row - 1])
                said += 1
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            mask[row] = words[: self._words]
        self._matcher.rollback(said)

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model says; empty where it has a choice."""
        return self._matcher.compute_ff_tokens()

    def _allows(self, token: int) -> bool:
        return token >= 0 and self._matcher.validate_tokens([token]) == 1

    def advance(self, tokens: Iterable[int]) -> None:
        """Tokens were said; see `error` for one that the grammar does not allow."""
        for token in tokens:
            self._matcher.consume_token(token)


class _Vocabulary:
    """A tokenizer as llguidance reads one."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        size = tokenizer.vocab_size
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = range(tokenizer.text_size, size)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a text; llguidance passes bytes, whole characters of them."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())
