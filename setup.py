"""Add the course's files to the wheel; pyproject.toml has everything else."""

from setuptools import find_packages, setup

COURSE_FILES = ("lessons", "solutions", "benchmarks.results", "benchmarks.llama")

setup(
    packages=[
        *find_packages(include=["memlab", "memlab.*"]),
        *(f"memlab.course.files.{name}" for name in COURSE_FILES),
    ],
    package_dir={f"memlab.course.files.{name}": name.replace(".", "/") for name in COURSE_FILES},
)
