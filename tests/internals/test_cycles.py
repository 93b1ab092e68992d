"""Pausing the cyclic garbage collector."""

import gc

import pytest

from memlab.internals.cycles import no_cycle_collection


def test_the_collector_is_off_inside_and_on_afterwards():
    with no_cycle_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_is_on_again_after_an_exception():
    with pytest.raises(ZeroDivisionError), no_cycle_collection():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_disabled_collector_stays_off():
    with no_cycle_collection():
        with no_cycle_collection():
            pass
        assert not gc.isenabled()
