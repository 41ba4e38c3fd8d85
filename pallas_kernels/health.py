"""Bits of the health word: u32, sticky, each one fatal for the whole job."""

from __future__ import annotations

BIT_WAIT = 1  # a wait inside a kernel gave up
BIT_SLOT = 2  # a slot number beyond the cache
BIT_PAGE = 4  # a page id, or a length, beyond the page pool or table
BIT_PLAN = 8  # the step plan violated its own assumptions
BIT_DIVERGED = 16  # ranks chose different experts
BIT_EXPERT = 32  # an expert id that is neither in the bank nor -1
