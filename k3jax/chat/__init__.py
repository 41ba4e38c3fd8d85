"""Kimi-K3's chat format: conversations to prompts, and the model's ids to what it said."""

from k3jax.chat.message import message_of
from k3jax.chat.parse import ChatEvent, ChatParser
from k3jax.chat.render import EFFORTS, ChatOptions, Segment, encode, end_ids, render

__all__ = [
    "EFFORTS",
    "ChatEvent",
    "ChatOptions",
    "ChatParser",
    "Segment",
    "encode",
    "end_ids",
    "message_of",
    "render",
]
