"""Classify tiles of the score matrix by the mask.

Saves    skipped tiles: a causal mask leaves n·(n + 1)/2 of n × n tiles.
Costs    nothing: four integers describe a tile, without a tensor.
Source   Dao 2023 (FlashAttention-2), arXiv 2307.08691, section 3.1.

Causal masks and windows are bands along a diagonal: query i sees keys i + low to i + high.

    causal, top-left        high = 0            query 0 sees key 0: torch's `is_causal=True`
    causal, bottom-right    high = Tk - Tq      the last query sees the last key: flash-attn since
                                                2.1, and decoding with a cache
    window (left, right)    extends the band to each side of the diagonal

The difference key - query takes every value between a tile's lower left and upper right corners. A
tile is skipped if none of these values lie in the band, full if all do, and partial otherwise. Only
a partial tile needs a mask.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Alignment = Literal["top-left", "bottom-right"]
Window = tuple[int | None, int | None]  # keys to the left and to the right; None is no limit
Kind = Literal["full", "partial", "skipped"]


class Band(NamedTuple):
    """Query i sees the existing keys from i + low to i + high."""

    low: int
    high: int

    def hides_any(self, queries: int, keys: int) -> bool:
        """Whether the band hides any pair."""
        return _kind(range(queries), range(keys), self) != "full"

    def has_blind_query(self, queries: int, keys: int) -> bool:
        """Whether some query sees no key. It suffices to check the first and the last query."""
        return self.high < 0 or queries - 1 + self.low > keys - 1


class Tile(NamedTuple):
    """A rectangle of the score matrix."""

    queries: range
    keys: range
    kind: Kind

    @property
    def shape(self) -> tuple[int, int, Kind]:
        """The properties that determine the memory of a visit."""
        return len(self.queries), len(self.keys), self.kind


class TileRow(NamedTuple):
    """The tiles for one range of queries."""

    queries: range
    tiles: tuple[Tile, ...]

    @property
    def visited(self) -> tuple[Tile, ...]:
        return tuple(tile for tile in self.tiles if tile.kind != "skipped")

    @property
    def shape(self) -> tuple[int, frozenset[tuple[int, int, Kind]]]:
        """The properties that determine the memory of its visits."""
        return len(self.queries), frozenset(tile.shape for tile in self.visited)

    def one_per_shape(self) -> "TileRow":
        """Keep one tile of each shape."""
        return self._replace(tiles=tuple({tile.shape: tile for tile in self.visited}.values()))


def band(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    alignment: Alignment = "top-left",
    window: Window | None = None,
) -> Band:
    """Return the band for these settings, clipped to the matrix."""
    if alignment not in get_args(Alignment):
        wanted = " or ".join(map(repr, get_args(Alignment)))
        raise ValueError(f"got alignment={alignment!r}; choose {wanted}")
    left, right = _sides(window)
    diagonal = 0 if alignment == "top-left" else keys - queries
    right = 0 if causal else right
    low = -queries if left is None else max(diagonal - left, -queries)
    high = keys if right is None else min(diagonal + right, keys)
    return Band(low, high)


def tiles(
    queries: int,
    keys: int,
    tile: int,
    *,
    causal: bool = False,
    alignment: Alignment = "top-left",
    window: Window | None = None,
) -> list[Tile]:
    """Return all tiles of `queries` × `keys` scores in row order. Tiles at the edge are smaller."""
    limits = band(queries, keys, causal=causal, alignment=alignment, window=window)
    return [tile for row in tile_rows(queries, keys, tile, limits) for tile in row.tiles]


def tile_rows(queries: int, keys: int, tile: int, limits: Band) -> list[TileRow]:
    """Return the tiles grouped by row. Without keys, the rows have no tiles."""
    columns = spans(keys, tile)
    return [
        TileRow(row, tuple(Tile(row, column, _kind(row, column, limits)) for column in columns))
        for row in spans(queries, tile)
    ]


def spans(length: int, size: int) -> list[range]:
    """Split 0 to `length` into ranges of `size`; the last may be smaller."""
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def hidden(queries: range, keys: range, limits: Band, device: torch.device) -> Tensor:
    """Return a bool mask (queries, keys), True for pairs outside the band."""
    corner = keys.start - queries.start  # key - query at row 0, column 0
    pairs = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
    future = pairs.triu(limits.high - corner + 1)
    return future.logical_or_(pairs.tril_(limits.low - corner - 1))


def _kind(queries: range, keys: range, limits: Band) -> Kind:
    least, most = keys.start - (queries.stop - 1), keys.stop - 1 - queries.start
    if most < limits.low or least > limits.high:
        return "skipped"
    return "full" if limits.low <= least and most <= limits.high else "partial"


def _sides(window: Window | None) -> Window:
    if window is None:
        return None, None
    if len(window) != 2 or any(side is not None and side < 0 for side in window):
        raise ValueError(
            f"got window={window!r}; give how many keys a query sees to its left and right, "
            f"such as (128, 0), with None for no limit"
        )
    return window
