"""The collector of cycles, kept waiting."""

import gc

import pytest

from memlab.metering.cycles import no_cycle_collection


def test_the_collector_waits_inside_and_goes_on_afterwards():
    with no_cycle_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_goes_on_after_an_exception():
    with pytest.raises(ZeroDivisionError), no_cycle_collection():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    with no_cycle_collection():
        with no_cycle_collection():
            pass
        assert not gc.isenabled()
