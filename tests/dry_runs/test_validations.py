"""Unknown values pass conditions that would raise an exception."""

import pytest
import torch
from torch import distributions

import memlab


class Boxes:
    def __init__(self, corners):
        self.corners = corners

    @property
    def are_ordered(self):
        return bool((self.corners[:, 2:] >= self.corners[:, :2]).all())


def is_positive(x):
    return (x > 0).all()


def lies_in_unit_interval(x):
    return bool((x > 0).all()) and not (x > 1).any()


def is_invalid(x):
    return not lies_in_unit_interval(x)


def condition(x):
    if not is_positive(x):
        raise ValueError


def negation(x):
    if (x < 0).any():
        raise ValueError


def disjunction(x):
    if x.dim() > 5 or (x < 0).any() or not (x < 1).all():
        raise ValueError


def conjunction(x):
    if x.dim() == 2 and not (x > 0).all():
        raise ValueError


def other_branch(x):
    if (x > 0).all():
        checked = True
    else:
        checked = False
        raise ValueError
    return checked


def early_return(x):
    if (x > 0).all():
        return x
    raise ValueError


def variable(x):
    valid = bool((x > 0).all())
    for _ in range(3):
        x = x * 2
    if not valid:
        raise ValueError


def variable_of_a_tensor(x):
    valid = (x > 0).all()
    if not valid:
        raise ValueError


def item(x):
    if (x > 0).all().item() is not True and not (x > 0).all().item():
        raise ValueError


def message(x):
    if not (x > 0).all():
        rows = [str(row) for row in range(3) if row > 1]
        raise ValueError(f"rows {', '.join(rows)}" if rows else "no rows")


def assertion(x):
    assert (x > 0).all(), f"got {x}"


def assertion_of_each(x):
    assert all((row > 0).all() for row in x)
    assert not any((row < 0).any() for row in x)


def returned(x):
    if not lies_in_unit_interval(x):
        raise ValueError


def returned_twice(x):
    if is_invalid(x):
        raise ValueError


def property_of_an_object(x):
    if not Boxes(x).are_ordered:
        raise ValueError("boxes1 must be in [x0, y0, x1, y1] (corner) format")


def loop(x):
    while not (x > 0).all():
        raise ValueError


# An `if` whose jump needs more than one byte.
_SOURCE = f"""
def far_jump(x):
    if bool((x > 0).all()):
        {"x = x * 1; " * 60}
    else:
        raise ValueError
"""
exec(_SOURCE)

CHECKS = (
    far_jump,  # noqa: F821 - defined by _SOURCE
    condition,
    negation,
    disjunction,
    conjunction,
    other_branch,
    early_return,
    variable,
    variable_of_a_tensor,
    item,
    message,
    assertion,
    assertion_of_each,
    returned,
    returned_twice,
    property_of_an_object,
    loop,
    lambda x: torch._assert((x > 0).all(), "negative"),
    lambda x: distributions.Categorical(logits=x).log_prob(torch.zeros(5)),
    lambda x: distributions.Categorical(probs=x).sample(),
    lambda x: distributions.Normal(x, x.exp()).log_prob(x),
    lambda x: distributions.Bernoulli(x).log_prob(x.round()),
    lambda x: distributions.Beta(x, x).rsample(),
    lambda x: distributions.Dirichlet(x).log_prob(x),
)
CHECKS_IN_OPERATORS = (  # fake operators do not raise, even for known values
    lambda x: torch._assert_async((x > 0).all()),
    lambda x: distributions.MultivariateNormal(x[0], covariance_matrix=x.mT @ x),
)


@pytest.mark.few(12)
@pytest.mark.parametrize("check", [*CHECKS, *CHECKS_IN_OPERATORS])
def test_unknown_values_are_valid(check):
    with memlab.dry_run():
        check(torch.randn(5, 4))


@pytest.mark.few(6)
@pytest.mark.parametrize("check", CHECKS)
def test_known_values_are_checked(check):
    """They pass or fail as in a real run."""

    def fails(x):
        try:
            check(x)
        except (ValueError, AssertionError, RuntimeError) as error:
            return type(error)
        return None

    for value in (0.2, -7.0):
        wanted = fails(torch.full((5, 4), value))
        with memlab.dry_run():
            assert fails(torch.full((5, 4), value)) == wanted


def goes_on(x):
    return 1 if (x > 0).all() else 2


def warns(x):
    seen = 0
    if not (x > 0).all():
        seen = 1
    return seen


def raises_in_either_case(x):
    try:
        if (x > 0).all():
            raise ValueError
        raise TypeError
    except TypeError:
        return 3


def raises_later_perhaps(x):
    if (x > 0).all():
        if x.dim() == 9:
            raise ValueError
        return 4
    return 5


@pytest.mark.parametrize(
    ("branch", "wanted"),
    [(goes_on, 2), (warns, 1), (raises_in_either_case, 3), (raises_later_perhaps, 5)],
)
def test_other_conditions_are_false(branch, wanted):
    with memlab.dry_run():
        assert branch(torch.randn(5, 4)) == wanted
