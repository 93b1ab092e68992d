"""Add the course's files to the wheel, and the README with links that work elsewhere.

pyproject.toml has everything else.
"""

import json
import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

COURSE_FILES = ("lessons", "solutions", "benchmarks.results", "benchmarks.llama")
REPOSITORY = "https://github.com/memlab-project/memlab"


class WithoutOutputs(build_py):
    """Strip outputs from the solutions, nine tenths of a wheel: commands read only the cells."""

    def run(self):
        super().run()
        for path in Path(self.build_lib).glob("memlab/course/files/solutions/*.ipynb"):
            notebook = json.loads(path.read_text(encoding="utf-8"))
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    cell["outputs"] = []
            path.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


def readme():
    """Return README.md with absolute links: a package index has only this file."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[([^]]*)\]\((?!http|#)", rf"![\1]({REPOSITORY}/raw/main/", text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!http|#)", rf"[\1]({REPOSITORY}/blob/main/", text)


setup(
    cmdclass={"build_py": WithoutOutputs},
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["memlab", "memlab.*"]),
        *(f"memlab.course.files.{name}" for name in COURSE_FILES),
    ],
    package_dir={f"memlab.course.files.{name}": name.replace(".", "/") for name in COURSE_FILES},
)
