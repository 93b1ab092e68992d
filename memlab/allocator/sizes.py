"""Compute the size of a block for a request, and of a segment for a block."""

MIB = 2**20
GRANULE_BYTES = 512  # blocks are multiples of this
SMALL_BYTES = 1 * MIB  # the largest small request, and the most that a large block may waste
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB  # default
LARGE_REQUEST_BYTES = 10 * MIB  # requests from this size get their own segment
SEGMENT_GRANULE_BYTES = 2 * MIB
POWERS = range(16)  # powers of two, in MiB, with their own roundup divisions


def block_bytes(requested_bytes: int, divisions: int | tuple[int, ...] | None = None) -> int:
    """Return the smallest block for a request. A rest too small to split may enlarge it."""
    if isinstance(divisions, tuple):
        power = requested_bytes.bit_length() - MIB.bit_length()
        divisions = divisions[max(0, min(power, POWERS[-1]))]
    if divisions and divisions > 1 and requested_bytes > GRANULE_BYTES * divisions:
        return _next_division(requested_bytes, divisions)
    return max(GRANULE_BYTES, round_up(requested_bytes, GRANULE_BYTES))


def _next_division(requested_bytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal steps between two powers of two."""
    power_of_two = 1 << (requested_bytes.bit_length() - 1)
    return round_up(requested_bytes, power_of_two // divisions)


def segment_bytes(block_bytes: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Return the size of a new segment for a block."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < LARGE_REQUEST_BYTES:
        return large_segment_bytes
    return round_up(block_bytes, SEGMENT_GRANULE_BYTES)


def round_up(size: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-size // step) * step
