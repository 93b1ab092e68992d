"""Small distributions are not checked in a dry run, and keep everything else."""

import pytest
import torch
from torch.distributions import Categorical, Distribution, Normal

import memlab


@pytest.fixture(autouse=True)
def _checks(monkeypatch):
    """torch.compile turns the checks off, for the whole process."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


@pytest.mark.parametrize("rows", [4, 4096])
def test_only_a_large_distribution_is_checked(rows):
    counted = []
    with memlab.dry_run():
        logits = torch.randn(rows, 2)
        with memlab.dry_run.active.observed(lambda func, *_: counted.append(str(func))):
            made = Categorical(logits=logits)
            made.log_prob(made.sample())
    assert ("aten.ge.Scalar" in counted) == (rows == 4096)
    assert made._validate_args


@pytest.mark.parametrize("validate", [None, True, False])
def test_a_distribution_keeps_its_setting(validate):
    with memlab.dry_run():
        made = Normal(torch.randn(3), torch.rand(3), validate_args=validate)
        assert made._validate_args == (validate is not False)


def test_known_invalid_values_are_still_an_error():
    with memlab.dry_run(), pytest.raises(ValueError, match="satisfy the constraint"):
        Normal(torch.zeros(2), torch.tensor([1.0, -1.0]))
