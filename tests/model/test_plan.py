"""The plan trusts nothing that the host sends."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from k3jax.cache import CacheSizes, Slots
from k3jax.decode.batch import Step, empty_batch
from k3jax.decode.config import DecodeConfig
from k3jax.decode.planner import plan_step
from k3jax.sampling import make_sampling_state
from pallas_kernels import BIT_PLAN, BIT_SLOT

VOCABULARY, PAGE, PAGES, PENDING = 11, 4, 9, 3
SIZES = CacheSizes(slots=5, pages=PAGES, page_size=PAGE, max_pages=3, pending=PENDING)
PREFILL, DECODE = Step("prefill", 2, 6), Step("decode", 3, 2)

plan = jax.jit(
    partial(plan_step, vocabulary=VOCABULARY, page_size=PAGE, pages=PAGES, rows=PENDING),
    static_argnums=0,
)


@pytest.fixture
def slots():
    """Slot 1 holds 7 tokens on two pages, 2 of them pending; slot 2 is new with a page."""
    number = np.zeros(5, np.int32)
    length, accepted, token = number.copy(), number.copy(), number.copy()
    length[1], accepted[1], token[1] = 7, 2, 10
    pages = np.zeros((5, 3), np.int32)
    pages[1, :2], pages[2, 0] = (5, 6), 7
    return Slots(
        length=length,
        accepted=accepted,
        token=token,
        pages=pages,
        prompt_length=number,
        history=np.zeros((5, 0), np.int32),
        drafts=np.tile(np.array([[6, 7]], np.int32), (5, 1)),
        sampling=make_sampling_state(5, VOCABULARY),
    )


def decode_batch(updates=((1, 2, 8),), **fields):
    batch = empty_batch(DECODE, SIZES, VOCABULARY)
    batch.slots[1] = 1
    batch.drafts[1] = 4
    batch.page_updates[: len(updates)] = updates
    for name, (index, value) in fields.items():
        getattr(batch, name)[index] = value
    return batch


def test_decode_plan(slots):
    found, after, health = plan(DECODE, slots, decode_batch())
    assert health == 0
    assert found.tokens.tolist()[1] == [10, 4]
    assert found.positions.tolist()[1] == [7, 8]
    assert found.valid.tolist() == [[False, False], [True, True], [False, False]]
    assert found.rows.tolist() == [0, 2, 0]
    assert found.starts.tolist() == [0, 7, 0]
    assert found.accepted.tolist() == [0, 2, 0]
    assert found.fresh.tolist() == [False] * 3
    assert found.write_pages.tolist() == [0, 0, 6, 8, 0, 0]
    assert found.write_offsets.tolist() == [0, 0, 3, 0, 0, 0]
    assert after.pages.tolist()[1] == [5, 6, 8]
    assert not np.asarray(after.pages[0]).any()


def test_without_drafts_of_the_host_those_of_the_slots_run(slots):
    batch = empty_batch(DECODE, replace(SIZES, history=12), VOCABULARY)
    assert batch.drafts is None
    batch.slots[1] = 1
    batch.page_updates[0] = (1, 2, 8)
    found, _, health = plan(DECODE, slots, batch)
    assert health == 0
    assert found.tokens.tolist()[1] == [10, 6]  # this step has room for one of the two


def test_prefill_plan(slots):
    batch = empty_batch(PREFILL, SIZES, VOCABULARY)
    batch.slots[:], batch.rows[:] = (2, 1), (3, 1)
    batch.tokens[:] = 9
    found, _, health = plan(PREFILL, slots, batch)
    assert health == 0
    assert found.fresh.tolist() == [True, False]
    assert found.valid.sum(axis=1).tolist() == [3, 1]
    assert found.write_pages.tolist() == [7, 7, 7, 0, 0, 0, 6, 0, 0, 0, 0, 0]
    assert found.write_offsets.tolist() == [0, 1, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "bit"),
    [
        ({"slots": (0, 5)}, BIT_SLOT),
        ({"slots": (0, -1)}, BIT_SLOT),
        ({"slots": (0, 1)}, BIT_PLAN),  # in the batch twice
        ({"slots": (0, 3)}, BIT_PLAN),  # has no page
        ({"drafts": (1, VOCABULARY)}, BIT_PLAN),
        ({"drafts": (1, -2)}, BIT_PLAN),
        ({"page_updates": (0, (1, 2, PAGES))}, BIT_PLAN),
        ({"page_updates": (0, (1, 2, -1))}, BIT_PLAN),
        ({"page_updates": (0, (1, 3, 8))}, BIT_PLAN),
        ({"page_updates": (0, (5, 0, 8))}, BIT_PLAN),
        ({"page_updates": (0, (0, 0, 8))}, BIT_PLAN),
        ({"page_updates": (0, (0, 0, 0))}, BIT_PLAN),  # the second row lacks a page
    ],
)
def test_a_batch_that_contradicts_the_slots(slots, fields, bit):
    found, after, health = plan(DECODE, slots, decode_batch(**fields))
    assert health == bit
    inside = (np.asarray(found.slots) >= 0) & (np.asarray(found.slots) < 5)
    assert inside.all()
    assert (np.asarray(found.write_pages) < PAGES).all()
    assert not np.asarray(after.pages[0]).any()


def test_a_chunk_beyond_its_bucket_or_table(slots):
    batch = empty_batch(PREFILL, SIZES, VOCABULARY)
    batch.slots[0], batch.rows[0] = 2, 7
    assert plan(PREFILL, slots, batch)[2] == BIT_PLAN
    batch = empty_batch(PREFILL, SIZES, VOCABULARY)
    batch.slots[0], batch.rows[0] = 1, 6  # positions 7 to 12; the table ends at 11
    batch.page_updates[0] = (1, 2, 8)
    assert plan(PREFILL, slots, batch)[2] == BIT_PLAN
    batch.rows[0] = 5
    assert plan(PREFILL, slots, batch)[2] == 0


def test_decode_config_defaults():
    run = DecodeConfig(max_requests=6, num_spec=3, max_context=1000, page_size=64)
    assert run.builds == tuple((q, b) for q in (1, 4) for b in (1, 4, 6))
    assert run.prefill_buckets == ((1, 32), (1, 256), (1, 1000), (4, 256))
    assert (run.slots, run.pending, run.max_pages) == (7, 4, 16)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"dtype": "float16"}, "dtype must be one of bfloat16, float32"),
        ({"num_spec": -1}, "num_spec must be 0 or more"),
        ({"builds": ((2, 1),)}, r"build \(2, 1\) must have 1 to 1 rows"),
        ({"builds": ((1, 1),)}, "no build holds all of max_requests = 16"),
        ({"prefill_buckets": ((1, 0),)}, "tokens of a prefill bucket must be 1 or more"),
        ({"step_timeout": 0}, "step_timeout is in seconds"),
    ],
)
def test_decode_config_refuses(field, message):
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**field)
