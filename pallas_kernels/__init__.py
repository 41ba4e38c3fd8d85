"""Pallas kernels and their plain-jnp references for Kimi-K3 and Kimi-Linear."""
