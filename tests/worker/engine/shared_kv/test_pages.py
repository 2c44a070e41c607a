"""Pages are taken and freed without moving others, and little is held that nobody uses."""

import random

import pytest
from headwater.worker.engine.shared_kv.pages import MAX_SLABS, MIN_SLAB_PAGES, PageTable
from headwater.worker.engine.shared_kv.shapes import bucket


def places(rows):
    return [(page.slab, page.index) for pages in rows for page in pages]


def test_taking_pages_moves_none() -> None:
    """Pages that rows have stay where they are while others take many more."""
    table = PageTable()
    rows = [table.take(num) for num in (3, 20, 1, 40)]
    before = places(rows)

    rows += [table.take(num) for num in (1, 7, 30, 200)]

    assert places(rows)[: len(before)] == before
    assert len(set(places(rows))) == table.num_used == 302
    assert table.version == 0


def test_free_pages_are_taken_before_a_slab_is_added() -> None:
    """What a row gives back is the next one's."""
    table = PageTable()
    first, _ = table.take(30), table.take(2)
    table.give_back(first)

    table.take(30)

    assert len(table.slabs) == 2
    assert table.num_free <= MIN_SLAB_PAGES


def test_a_slab_without_pages_in_use_is_dropped() -> None:
    """Nothing is held for nobody."""
    table = PageTable()
    table.give_back(table.take(30))
    assert table.slabs == []


@pytest.mark.parametrize("seed", range(10))
def test_tidied_tables_hold_a_quarter_more_than_is_used_in_few_slabs(seed) -> None:
    """Rows come, grow and go at random; each page belongs to one row all the time."""
    rng = random.Random(seed)
    table, rows = PageTable(), []
    num_taken = num_moved = 0
    sizes: set[int] = set()
    for _ in range(150):
        if rows and rng.random() < 0.3:
            table.give_back(rows.pop(rng.randrange(len(rows))))
        elif rows and rng.random() < 0.5:
            rng.choice(rows).extend(table.take(1))
            num_taken += 1
        else:
            rows.append(table.take(rng.choice([1, 2, 5, 40])))
            num_taken += len(rows[-1])
        num_moved += sum(move.target.num_used for move in table.tidy())

        assert table.num_used == sum(map(len, rows))
        assert table.num_free <= max(MIN_SLAB_PAGES, table.num_used // 4)
        assert len(table.slabs) <= MAX_SLABS
        sizes |= {len(slab.pages) for slab in table.slabs}
        assert len(set(places(rows))) == table.num_used
        for slab, index in places(rows):
            assert slab in table.slabs
            assert slab.pages[index] is not None
    # Eight sizes at most for each power of two: a graph cache holds few shapes.
    assert all(size == bucket(size) for size in sizes)
    # Amortized: what is copied is a small multiple of what was written.
    assert num_moved <= 5 * num_taken


def test_sizes_are_rounded_up_by_less_than_an_eighth_to_few() -> None:
    """Up to a thousand pages come in 64 sizes."""
    rounded = [bucket(num) for num in range(1, 1025)]

    assert all(num <= size < 1.125 * num for num, size in enumerate(rounded, start=1))
    assert len(set(rounded)) <= 64
    assert rounded == sorted(rounded)
