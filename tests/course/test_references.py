"""Regions of a lesson that show a function of memlab/reference."""

import pytest

from memlab.course.references import with_references
from memlab.course.source import SourceError, lesson_notebook, solution_notebook

REFERENCE = '''
class Mean:
    """A running mean."""

    def add(self, x: float) -> float:
        """The mean with x in it."""
        self.count += 1

        # the mean moves by its share
        self.mean += (x - self.mean) / self.count
        return self.mean


def double(x):
    return 2 * x
'''
SOURCE = '''# %%
class Mean:
    def add(self, x):
        """Of all x so far."""
        self.count += 1
        ### BEGIN SOLUTION memlab.reference.means.Mean.add
        self.mean = 0
        ### END SOLUTION
        ### BEGIN STUB
        # return ...
        ### END STUB


# %%
def double(x):
    ### BEGIN SOLUTION memlab.reference.means.double
    pass
    ### END SOLUTION


# %%
double = exercise("5.1", double)
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "memlab/reference").mkdir(parents=True)
    (tmp_path / "memlab/reference/means.py").write_text(REFERENCE, encoding="utf-8")
    return tmp_path


def code(notebook):
    return [cell["source"] for cell in notebook["cells"]]


def test_a_region_is_filled_with_the_reference_after_the_given_lines(root):
    mean, double, _ = code(solution_notebook(with_references(SOURCE, root)))
    assert mean.split("\n")[2:] == [
        '        """Of all x so far."""',
        "        self.count += 1",
        "",
        "        # the mean moves by its share",
        "        self.mean += (x - self.mean) / self.count",
        "        return self.mean",
    ]
    assert double == "def double(x):\n    return 2 * x"


def test_filling_twice_changes_nothing(root):
    filled = with_references(SOURCE, root)
    assert filled != SOURCE
    assert with_references(filled, root) == filled


def test_the_lesson_has_a_stub_without_the_references_name(root):
    mean, double, _ = code(lesson_notebook(with_references(SOURCE, root)))
    assert mean.endswith("self.count += 1\n        return ...")
    assert double == 'def double(x):\n    raise NotImplementedError("exercise 5.1, about 1 line")'


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("means.double", "medians.double"), "name a function of a module of memlab.reference"),
        (("memlab.reference.means.double", "math.sqrt"), "got 'math.sqrt'; name a function of"),
        (("means.double", "means.triple"), "means.py in memlab/reference has no function triple"),
        (("self.count += 1", "self.count += 2"), "Mean.add does not begin with the line"),
    ],
)
def test_a_region_without_a_fitting_reference_is_an_error_with_its_line(root, edit, said):
    with pytest.raises(SourceError, match=said) as error:
        with_references(SOURCE.replace(*edit), root)
    assert "### BEGIN SOLUTION" in SOURCE.split("\n")[error.value.line - 1]
