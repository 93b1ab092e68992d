"""How many bytes a request takes, and how many the driver is asked for."""

MIB = 2**20
GRANULE_BYTES = 512  # every block is a multiple
SMALL_BYTES = 1 * MIB  # the largest request of the small pool; what a large block may waste
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB  # unless the settings say otherwise
LARGE_REQUEST_BYTES = 10 * MIB  # from here, a segment of its own
SEGMENT_GRANULE_BYTES = 2 * MIB
POWERS = range(16)  # of two MiB: the sizes that have roundup divisions of their own


def block_bytes(requested_bytes: int, divisions: int | tuple[int, ...] | None = None) -> int:
    """What a request takes at least: it may get more if the rest is too small to split off."""
    if isinstance(divisions, tuple):
        power = requested_bytes.bit_length() - MIB.bit_length()
        divisions = divisions[max(0, min(power, POWERS[-1]))]
    if divisions and divisions > 1 and requested_bytes > GRANULE_BYTES * divisions:
        return _next_division(requested_bytes, divisions)
    return max(GRANULE_BYTES, round_up(requested_bytes, GRANULE_BYTES))


def _next_division(requested_bytes: int, divisions: int) -> int:
    """The space from a power of two to the next is cut into so many steps: the next of them."""
    power_of_two = 1 << (requested_bytes.bit_length() - 1)
    return round_up(requested_bytes, power_of_two // divisions)


def segment_bytes(block_bytes: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """What the driver is asked for when a block finds no room."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < LARGE_REQUEST_BYTES:
        return large_segment_bytes
    return round_up(block_bytes, SEGMENT_GRANULE_BYTES)


def round_up(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step
