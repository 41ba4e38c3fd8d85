"""Kimi-K3 in JAX: decoder, engine, server."""

__version__ = "0.1.0"
