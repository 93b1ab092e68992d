"""The bound of a comparison follows from what was summed."""

import re
from pathlib import Path

import pytest
import torch
from close import assert_close


def test_two_orders_of_adding_are_close():
    x = torch.randn(8, 4096)
    assert_close(x.cumsum(1)[:, -1], x.flip(1).cumsum(1)[:, -1], terms=4096)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_bound_grows_with_the_values(size):
    wanted = torch.tensor([size, 0.0])
    assert_close(wanted + 200 * 2**-23 * size, wanted)
    with pytest.raises(AssertionError, match=r"^2 of 2 elements are off"):
        assert_close(wanted + 300 * 2**-23 * size, wanted)


def test_a_sum_that_cancels_has_the_bound_of_its_terms():
    terms = torch.tensor([1000.0, 0.1, -1000.0])
    found, wanted = terms.sum(), torch.tensor(0.1)
    assert_close(found, wanted, terms=3, summed=terms.abs().sum())
    with pytest.raises(AssertionError, match=r"Element 0 is 0\.099\d+, expected 0\.1\d+: they"):
        assert_close(found, wanted, terms=3)


def test_each_element_can_have_its_own_bound():
    wanted = torch.tensor([1000.0, 0.1])
    got = wanted + 1e-5
    assert_close(got, wanted)
    with pytest.raises(AssertionError, match=r"^1 of 2 .*Element 1 .*allowed is 4\.77e-08"):
        assert_close(got, wanted, terms=4, summed=wanted.abs())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_no_number_is_off(value):
    with pytest.raises(AssertionError, match=r"^1 of 1 elements are off"):
        assert_close(torch.tensor([value]), torch.ones(1))


def test_equal_infinities_are_close():
    assert_close(torch.tensor([torch.inf, 1.0]), torch.tensor([torch.inf, 1.0]), summed=1)


@pytest.mark.parametrize("other", [torch.ones(2).double(), torch.ones(2, 1)])
def test_another_dtype_or_shape_is_off(other):
    with pytest.raises(AssertionError):
        assert_close(torch.ones(2), other)


def test_a_bound_that_proves_nothing_is_refused():
    with pytest.raises(AssertionError, match="the bound proves nothing"):
        assert_close(torch.ones(2).bfloat16(), torch.ones(2).bfloat16())


def test_no_test_compares_with_another_tolerance():
    other = re.compile(r"torch\.(allclose|testing\.assert_close)\((?!.*atol=0[,)])")
    files = Path(__file__).parent.rglob("*.py")
    assert [f.name for f in files if other.search(f.read_text("utf-8"))] == []


def test_integers_must_be_equal():
    assert_close(torch.tensor([1, 2]), torch.tensor([1, 2]))
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1, 2]), torch.tensor([1, 3]))
