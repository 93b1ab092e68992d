"""A remark names the mistake that was made, and a message shows how two values differ."""

import re

import pytest
from edited import verdict_on

from memlab.course.exercises import WRONG


def test_a_clamped_code_is_not_called_a_cut_off_fraction():
    verdict = verdict_on("7.1", ("clamp(0, levels)", "clamp(0, levels - 1)"))
    assert verdict.status == WRONG
    assert "cut off" not in verdict.text


# (exercise, edit): the answer differs from the right one in late digits only
NEAR = [
    ("12.3", ("unit] += shard", "unit] += shard.float()")),
    (
        "13.1",
        (
            "peer.receive() + pieces[coming]",
            "(peer.receive().float() + pieces[coming].float()).to(whole.dtype)",
        ),
    ),
    ("15.1", (".real.max())", ".real.max().round(3))")),
]


@pytest.mark.parametrize(
    ("id_", "edit"), NEAR, ids=lambda value: value if isinstance(value, str) else ""
)
def test_two_numbers_that_differ_look_different(id_, edit):
    text = verdict_on(id_, edit).text
    found = re.search(r"(?:gave|is|width) (\S+|\[.*?\]); wanted (\S+|\[.*?\])\.(?: |$)", text)
    assert found, text
    assert found[1] != found[2]
