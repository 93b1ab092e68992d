"""Tile kinds against a check of every pair, and against the closed form."""

from itertools import product

import pytest
from quick import together

from memlab.attention import band, tiles

ALIGNMENTS = ("top-left", "bottom-right")
WINDOWS = (None, (0, 0), (3, 1), (None, 2), (5, None))


def sees(i, j, queries, keys, causal, alignment, window):
    """Whether query i sees key j."""
    diagonal = i if alignment == "top-left" else i + keys - queries
    left, right = window or (None, None)
    return (
        not (causal and j > diagonal)
        and (left is None or j >= diagonal - left)
        and (right is None or j <= diagonal + right)
    )


@together("window", WINDOWS)
@together("alignment", ALIGNMENTS)
@together("causal", [False, True])
@together(("queries", "keys"), [(12, 12), (5, 13), (13, 5), (1, 9), (9, 1)])
def test_the_kind_of_each_tile_follows_from_its_pairs(queries, keys, causal, alignment, window):
    for tile in (1, 3, 4, 16):
        plan = tiles(queries, keys, tile, causal=causal, alignment=alignment, window=window)
        pairs = [pair for t in plan for pair in product(t.queries, t.keys)]
        assert sorted(pairs) == list(product(range(queries), range(keys)))
        for t in plan:
            seen = {
                sees(i, j, queries, keys, causal, alignment, window)
                for i, j in product(t.queries, t.keys)
            }
            assert t.kind == {(True,): "full", (False,): "skipped"}.get(tuple(seen), "partial")


@pytest.mark.parametrize("n", [1, 2, 8, 16])
def test_a_causal_mask_leaves_about_half_of_the_tiles(n):
    kinds = [t.kind for t in tiles(n * 64, n * 64, 64, causal=True)]
    assert kinds.count("full") == n * (n - 1) // 2
    assert kinds.count("partial") == n
    assert kinds.count("skipped") == n * (n - 1) // 2


def test_without_a_mask_every_tile_is_full():
    assert [t.kind for t in tiles(100, 70, 32)] == ["full"] * 4 * 3


def test_the_number_of_tiles_in_a_window_is_linear_in_the_length():
    def visited(length):
        plan = tiles(length, length, 64, causal=True, window=(64, 0))
        return sum(t.kind != "skipped" for t in plan)

    assert [visited(64 * n) for n in (1, 2, 4, 8, 16)] == [2 * n - 1 for n in (1, 2, 4, 8, 16)]


def test_tiles_come_in_row_order_and_the_last_ones_are_smaller():
    plan = tiles(5, 3, 2)
    assert [(t.queries, t.keys) for t in plan] == [
        (range(0, 2), range(0, 2)),
        (range(0, 2), range(2, 3)),
        (range(2, 4), range(0, 2)),
        (range(2, 4), range(2, 3)),
        (range(4, 5), range(0, 2)),
        (range(4, 5), range(2, 3)),
    ]


@together("window", WINDOWS)
@together("alignment", ALIGNMENTS)
@together("causal", [False, True])
@together(("queries", "keys"), [(6, 6), (2, 5), (5, 2), (1, 4)])
def test_hides_any_and_has_blind_query_agree_with_all_pairs(
    queries, keys, causal, alignment, window
):
    limits = band(queries, keys, causal=causal, alignment=alignment, window=window)
    seen = [
        [sees(i, j, queries, keys, causal, alignment, window) for j in range(keys)]
        for i in range(queries)
    ]
    assert limits.has_blind_query(queries, keys) == (not all(map(any, seen)))
    assert limits.hides_any(queries, keys) == (not all(map(all, seen)))


def test_an_unknown_alignment_is_an_error():
    with pytest.raises(ValueError, match="got alignment='left'; choose 'top-left' or 'bottom-r"):
        band(4, 4, alignment="left")


@pytest.mark.parametrize("window", [(-1, 0), (3,), (1, 2, 3)])
def test_an_invalid_window_is_an_error(window):
    with pytest.raises(ValueError, match="give how many keys a query sees to its left and right"):
        band(4, 4, window=window)
