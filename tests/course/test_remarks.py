"""A remark names the mistake that was made, and a message shows how two values differ."""

import re

import pytest
from quick import quick

from memlab.course.days import exercise_of
from memlab.course.exercises import WRONG, judge
from memlab.course.solutions import edited

# (exercise, what the answer does, edits). Each fails like a named wrong answer in some cases, but
# makes another mistake.
UNNAMED = [
    ("2.6", "forgets the process", ("= oom.process - oom.unallocated", "= oom.unallocated")),
    ("12.4", "skips the last unit in backward", ("in reversed(units)", "in units[-2::-1]")),
    ("15.3", "solves another system", ("np.linalg.solve(overlaps", "np.linalg.solve(chosen")),
    ("4.2", "clips at max_norm times the scale", ("max_norm)\n", "max_norm * self.scale)\n")),
    (
        "6.3",
        "keeps one output",
        ("        if func in self.chosen:", "        if func in self.chosen and not self.kept:"),
    ),
]


@pytest.mark.parametrize(("id_", "what", "edit"), quick(UNNAMED[:1], UNNAMED))
def test_another_mistake_gets_no_remark(id_, what, edit):
    verdict = judge(exercise_of(id_), edited(id_, edit))
    assert verdict.status == WRONG
    assert not any(wrong.remark in verdict.text for wrong in verdict.exercise.wrong_answers)


# (exercise, edits, text of the message)
TOLD = [
    (
        "4.4",
        ("            weight.grad = None\n", "            weight.grad.zero_()\n"),
        "of zeros in the model",
    ),
    (
        "4.4",
        (".float() / scale", ".float().div(scale).bfloat16().float()"),
        "gives other copies than AdamW",
    ),
    (
        "5.1",
        ("_backward(*inputs)", "_backward(*(x.clone() for x in inputs))"),
        "gives no gradient of x; wanted one.",
    ),
    (
        "5.2",
        ("if slots[index] is None:", "if all(slot is None for slot in slots):"),
        "backward failed, because the unpack hook returned no tensor.",
    ),
    (
        "6.3",
        ("self.is_second and func in self.chosen", "self.is_second and self.kept"),
        "the second run saves other",
    ),
]


@pytest.mark.parametrize(
    ("id_", "edit", "told"), TOLD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_message_says_what_was_seen(id_, edit, told):
    assert told in judge(exercise_of(id_), edited(id_, edit)).text


def test_a_clamped_code_is_not_called_a_cut_off_fraction():
    verdict = judge(exercise_of("7.1"), edited("7.1", ("clamp(0, levels)", "clamp(0, levels - 1)")))
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
    text = judge(exercise_of(id_), edited(id_, edit)).text
    found = re.search(r"(?:gave|is|width) (\S+|\[.*?\]); wanted (\S+|\[.*?\])\.(?: |$)", text)
    assert found, text
    assert found[1] != found[2]
