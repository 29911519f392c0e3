"""PagePool."""

from __future__ import annotations

import pytest

from glm53srv.scheduler.kv_pages import PagePool


def test_pages_for_rounds_up() -> None:
    pool = PagePool(4, page_tokens=256)
    assert [pool.pages_for(count) for count in (0, 1, 256, 257)] == [0, 1, 1, 2]


def test_taken_pages_are_distinct_and_come_back() -> None:
    pool = PagePool(5, page_tokens=4)
    first, second = pool.take(7, 2), pool.take(8, 3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check_integrity({7: first, 8: second})
    pool.give_back(7, first)
    assert pool.num_free == 2
    pool.check_integrity({8: second})
    assert pool.take(9, 2) == first


def test_lowest_free_pages_are_taken() -> None:
    pool = PagePool(8, page_tokens=4)
    first, second = pool.take(7, 3), pool.take(8, 3)
    pool.give_back(7, first)
    pool.give_back(8, second[:1])
    assert pool.take(9, 5) == (0, 1, 2, 3, 6)


def test_more_than_free_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="1 are free"):
        PagePool(1, page_tokens=4).take(7, 2)


def test_page_cannot_be_freed_twice_or_by_another() -> None:
    pool = PagePool(2, page_tokens=4)
    pages = pool.take(7, 1)
    with pytest.raises(AssertionError, match="not sequence 8's"):
        pool.give_back(8, pages)
    pool.give_back(7, pages)
    with pytest.raises(AssertionError, match="not sequence 7's"):
        pool.give_back(7, pages)


def test_integrity_check_finds_disagreement() -> None:
    pool = PagePool(3, page_tokens=4)
    pages = pool.take(7, 2)
    with pytest.raises(AssertionError, match="elsewhere"):
        pool.check_integrity({})
    with pytest.raises(AssertionError, match="elsewhere"):
        pool.check_integrity({8: pages})
    with pytest.raises(AssertionError, match="held twice"):
        pool.check_integrity({7: pages, 8: pages[:1]})
