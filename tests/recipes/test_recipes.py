"""Recipes are shell that works: all parse, and two run from data to report on a tiny target."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/run.sh"))
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="recipes are bash scripts")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_parses_and_is_described(name):
    subprocess.run([BASH, "-n", f"recipes/{name}/run.sh"], cwd=ROOT, check=True)
    assert (ROOT / "recipes" / name / "README.md").read_text().startswith("# ")


@pytest.mark.slow
def test_smoke(tmp_path):
    """A whole recipe, twice: the second time every stage finds its result."""
    environment = {**os.environ, "SMOKE": "1", "RUN": str(tmp_path / "run"), "PYTHON": sys.executable}
    command = [BASH, "recipes/medusa/run.sh"]
    first = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    assert (tmp_path / "run" / "bench" / "report.html").is_file()
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout.count("is there") == 2
