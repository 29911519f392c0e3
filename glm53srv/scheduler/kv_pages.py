"""Which sequence owns which page of the paged cache."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


class PagePool:
    """The pages [0, num_pages): each is free or has one owner, a sequence id. Owned by Scheduler.

    The lowest free page is taken: engines need memory only up to the highest page in use.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._owners: list[int | None] = [None] * num_pages
        self._free = list(range(num_pages))  # a heap

    @property
    def num_pages(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Count the pages that hold num_tokens tokens."""
        return -(-num_tokens // self._page_tokens)

    def take(self, owner: int, count: int) -> tuple[int, ...]:
        """Give `count` free pages to an owner; the caller has checked num_free."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} are free"
        page_ids = tuple(heapq.heappop(self._free) for _ in range(count))
        for page_id in page_ids:
            self._owners[page_id] = owner
        return page_ids

    def give_back(self, owner: int, page_ids: tuple[int, ...]) -> None:
        """Free pages of an owner. A page that is not the owner's is our own error."""
        for page_id in page_ids:
            assert self._owners[page_id] == owner, f"page {page_id} is not sequence {owner}'s"
            self._owners[page_id] = None
            heapq.heappush(self._free, page_id)

    def check_integrity(self, pages_by_owner: Mapping[int, tuple[int, ...]]) -> None:
        """Raise AssertionError unless every page is free once or held once, by these owners and no others."""
        held: dict[int, int] = {}
        for owner, page_ids in pages_by_owner.items():
            for page_id in page_ids:
                if page_id in held:
                    raise AssertionError(f"page {page_id} is held twice, by {held[page_id]} and {owner}")
                held[page_id] = owner
        for page_id, known_owner in enumerate(self._owners):
            if held.get(page_id) != known_owner:
                raise AssertionError(
                    f"page {page_id} is {known_owner}'s here, {held.get(page_id)}'s elsewhere"
                )
        if sorted(self._free) != [page for page, owner in enumerate(self._owners) if owner is None]:
            raise AssertionError("the free list does not match the owners")
