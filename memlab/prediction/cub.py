"""Temporary storage of CUB, the CUDA library whose sorts and scans torch calls.

CUB asks for one buffer per call. Its parts are padded to 256 bytes, with 255 more for alignment.
The formulas follow CUB in CUDA 13.0 (CCCL 3.0, cub/device/dispatch): `InvokeOnesweep` in
dispatch_radix_sort.cuh and `AllocationSize` in agent/single_pass_scan_operators.cuh.

    radix sort      copies of the keys and values, because torch keeps its input; none if the keys
                    fit in one digit (8 bits). Also counts per digit and 1 KiB per tile
    segmented sort  copies of the keys and values
    scan            one status word per tile, and 32 more

A tile is the part of the input that a thread block handles. Its size depends on the GPU and on
CUB's version, which changes a sort's temporary storage by about 1 %.

Before compute capability 9.0, keys of 1 or 2 bytes use an older algorithm with a few MiB of counts
per digit. Their number depends on the compiled kernel's registers and is not counted.
"""

from memlab.configs.targets import Target

_DIGIT_BITS = 8
_DIGITS = 2**_DIGIT_BITS
_PADDING, _ALIGNMENT = 256, 255
_PORTION = 2**28  # items that a radix sort handles at once
_SCAN_PADDING_TILES = 32
# With these tiles the formulas equal what CUB of CUDA 13.0 computed for 18 sizes, called without a
# GPU (test_cub_returned_the_same_sizes).
_SORT_TILES = {  # (bytes of a key, bytes of a value): items per tile before 8.0, before 9.0, later
    (8, 8): (2816, 3840, 4608),
    (4, 8): (2816, 3072, 5376),
    (4, 4): (11_776, 6528, 6528),
    (2, 8): (2816, 3840, 5632),
    (1, 8): (2816, 3840, 3456),
}
_SCAN_TILES = {4: (1920, 8), 8: (896, 16)}  # bytes of an item: (items per tile, status bytes)


def radix_sort_bytes(
    count: int, key_bytes: int, value_bytes: int, target: Target, *, bits: int = 0
) -> int:
    """Return the temporary storage of a sort of pairs by the lowest `bits` of the key (0: all)."""
    if count <= (4864 if max(key_bytes, value_bytes) <= 4 else 2304):
        return 1  # one thread block sorts everything
    generation = (target.capability >= (8, 0)) + (target.capability >= (9, 0))
    passes = -(-(bits or 8 * key_bytes) // _DIGIT_BITS)
    copies = (count * key_bytes, count * value_bytes) if passes > 1 else ()
    if key_bytes < 4 and generation < 2:
        return _together(*copies)
    tile = _SORT_TILES.get((key_bytes, value_bytes), _SORT_TILES[8, 8])[generation]
    portions, tiles = -(-count // _PORTION), -(-min(count, _PORTION) // tile)
    counts = portions * passes * _DIGITS * 8
    return _together(counts, tiles * _DIGITS * 4, *copies, portions * passes * 4)


def segmented_sort_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """Return the temporary storage of a sort of pairs within segments."""
    return _together(count * key_bytes, count * value_bytes)


def scan_bytes(count: int, item_bytes: int) -> int:
    """Return the temporary storage of a scan; it is at most 1 KiB off for items below 4 bytes."""
    tile, status_bytes = _SCAN_TILES[8 if item_bytes >= 8 else 4]
    return _together((-(-count // tile) + _SCAN_PADDING_TILES) * status_bytes)


def scan_by_key_bytes(count: int) -> int:
    """Return the temporary storage of a scan of 4-byte items that restarts at each new key."""
    tiles = -(-count // 1024)
    return _together((tiles + _SCAN_PADDING_TILES) * 16, 4 * (tiles + 1))


def _together(*sizes: int) -> int:
    return sum(-(-size // _PADDING) * _PADDING for size in sizes) + _ALIGNMENT
