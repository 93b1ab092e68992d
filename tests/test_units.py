"""Formatting bytes is accurate to the last digit; parsing them is exact."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.units import BINARY_UNITS, DECIMAL_UNITS, format_bytes, parse_bytes

WRITTEN = {
    0: "0 B",
    1: "1 B",
    1023: "1023 B",
    1024: "1.00 KiB",
    1536: "1.50 KiB",
    6 * 2**20: "6.00 MiB",
    24 * 10**9: "22.35 GiB",  # a seller's "24 GB" in GiB
    2**30: "1.00 GiB",
    3 * 2**40: "3.00 TiB",
    5000 * 2**40: "5000.00 TiB",
    -1536: "-1.50 KiB",
}
READ = {
    "0": 0,
    "512": 512,
    "512 B": 512,
    "6 MiB": 6_291_456,
    "24GB": 24_000_000_000,
    "24GiB": 25_769_803_776,
    "1.5 KiB": 1536,
    "5.7GB": 5_700_000_000,
    "2. kB": 2000,
    "2KB": 2000,
    " 1 TiB ": 1_099_511_627_776,
    "1_000 MB": 1_000_000_000,
    "24gb": 24_000_000_000,
    "24gib": 25_769_803_776,
}
UNREADABLE = (
    *("", " ", "six MiB", "6 XB", "6 MiB 2", "-1", "-1 MiB", "1e9", "nan", ".5 GiB"),
    *(
        "9" * 41 + " GB",
        "9" * 5000,
        "1.2.3 GB",
        "_1 GB",
        "٣ GB",
        "1.5",
        "1.0 B",
        -1,
        True,
        False,
        6.0,
        None,
        b"6 MiB",
    ),
)


@pytest.mark.parametrize(("count", "text"), WRITTEN.items())
def test_bytes_are_formatted_in_the_largest_fitting_binary_unit(count, text):
    assert format_bytes(count) == text


@given(st.integers(min_value=1024, max_value=2**60))
def test_formatting_rounds_to_the_nearest_hundredth(count):
    number, unit = format_bytes(count).split()
    assert abs(Fraction(number) * BINARY_UNITS[unit] - count) <= Fraction(BINARY_UNITS[unit], 200)


@given(st.integers(min_value=1, max_value=2**60))
def test_negative_bytes_have_a_minus_sign(count):
    assert format_bytes(-count) == "-" + format_bytes(count)


@pytest.mark.parametrize(("text", "count"), READ.items())
def test_a_number_with_a_unit_is_parsed_as_bytes(text, count):
    assert parse_bytes(text) == count


@given(
    st.integers(min_value=0, max_value=2**80),
    st.sampled_from([("", 1), ("B", 1), *BINARY_UNITS.items(), *DECIMAL_UNITS.items()]),
)
def test_integers_with_a_unit_are_parsed_exactly(number, unit):
    name, factor = unit
    assert parse_bytes(f"{number} {name}") == number * factor


@given(st.integers(min_value=0, max_value=10**9), st.sampled_from(sorted(BINARY_UNITS)))
def test_a_fraction_of_a_unit_is_rounded_to_the_nearest_byte(thousandths, unit):
    exact = Fraction(thousandths, 1000) * BINARY_UNITS[unit]
    read = parse_bytes(f"{thousandths // 1000}.{thousandths % 1000:03} {unit}")
    assert abs(read - exact) <= Fraction(1, 2)


@given(st.integers(min_value=0))
def test_an_int_is_a_number_of_bytes(count):
    assert parse_bytes(count) == count


@pytest.mark.parametrize("quantity", UNREADABLE, ids=repr)
def test_anything_else_is_an_error_with_a_remedy(quantity):
    with pytest.raises(ValueError, match="give a number and a unit, such as '6 MiB'") as error:
        parse_bytes(quantity)
    assert str(error.value).startswith(f"got {quantity!r} as a number of bytes")
