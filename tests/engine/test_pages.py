"""The page allocator: all or none, no page twice, errors that change nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.pages import PageAllocator


def test_allocates_all_or_none():
    pages = PageAllocator(pages=6, page_size=4)
    first = pages.allocate(3)
    assert len(set(first)) == 3
    assert 0 not in first
    assert pages.allocate(3) is None
    assert pages.free == 2
    assert pages.allocate(0) == []
    assert len(pages.allocate(2)) == 2
    assert pages.in_use == pages.capacity == 5


def test_pages_for_rounds_up():
    pages = PageAllocator(pages=2, page_size=4)
    assert [pages.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("wrong", [[0], [9], [-1], [4], [1, 1]], ids=str)
def test_a_wrong_release_changes_nothing(wrong):
    pages = PageAllocator(pages=5, page_size=1)
    assert pages.allocate(3) == [1, 2, 3]
    with pytest.raises(ValueError, match="not given out"):
        pages.release([2, *wrong])
    assert pages.in_use == 3


def test_sizes_out_of_range():
    with pytest.raises(ValueError, match="got 1"):
        PageAllocator(pages=1, page_size=4)
    with pytest.raises(ValueError, match="page_size"):
        PageAllocator(pages=4, page_size=0)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(pages=4, page_size=1).allocate(-1)


@given(st.lists(st.integers(-4, 9), max_size=60))
def test_no_page_has_two_owners(sizes):
    """Positive numbers allocate, negative ones release an earlier allocation."""
    pages = PageAllocator(pages=20, page_size=2)
    owned = []
    for size in sizes:
        if size >= 0:
            got = pages.allocate(size)
            if got is not None:
                owned.append(got)
        elif owned:
            pages.release(owned.pop(size % len(owned)))
        flat = [page for group in owned for page in group]
        assert len(set(flat)) == len(flat) == pages.in_use
        assert all(0 < page < 20 for page in flat)
    for group in owned:
        pages.release(group)
    assert pages.in_use == 0
