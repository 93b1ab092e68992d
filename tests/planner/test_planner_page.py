"""The planner page of the site runs in the browser: without torch, on the files that it lists."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAN = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None  # an import raises ModuleNotFoundError
sys.path[:0] = [".", "site"]
import planner
from memlab.configs.shapes import PRESETS
from memlab.planner.formulas import training_bytes
from memlab.planner.recipes import Recipe
recipe = Recipe(tensor_parallel=2, pipeline_parallel=2)
print(training_bytes(PRESETS["5m"], recipe, 1, 512, gpus=8).peak_bytes)
"""


def test_the_files_of_the_planner_page_are_all_that_it_needs(tmp_path):
    tree = ast.parse((ROOT / "site/build.py").read_text(encoding="utf-8"))
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    [listed] = [node for node in assigned if ast.unparse(node.targets[0]) == "PLANNER_FILES"]
    patterns = [node.value for node in ast.walk(listed.value) if isinstance(node, ast.Constant)]
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            if path.is_file():
                copy = tmp_path / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
    command = [sys.executable, "-I", "-c", PLAN]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 0
