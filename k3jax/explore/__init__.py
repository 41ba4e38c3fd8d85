"""What a model does inside, as numpy arrays: the helpers of the notebooks.

Most functions read what `LanguageModel.trace` gives. `figures` draws their results and is the only
module that needs matplotlib (the extra `notebooks`).

Shape letters: T tokens, H heads, K key dim, V value dim, E experts, J experts chosen per token,
M residual blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from k3jax.tokenizer import Tokenizer

Trace = Mapping[str, np.ndarray]
"""What `LanguageModel.trace` gives."""


def layers_with(trace: Trace, name: str) -> list[int]:
    """The layers whose part `name` is in the trace, in order; ValueError if none has it."""
    found = [
        key.split(".")[1] for key in trace if key.startswith("layers.") and key.endswith(f".{name}")
    ]
    if not found:
        raise ValueError(f"no layer of this trace has {name!r}")
    return sorted(map(int, found))


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token as a short label: control tokens by name, blanks and odd bytes made visible."""
    texts = []
    for token in ids:
        text = tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")
        texts.append(text.replace("\n", "↵").replace(" ", "␣").replace("\t", "⇥"))
    return texts
