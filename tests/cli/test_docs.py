"""What the documents show is what the commands print, and their Python runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.core.catalogue import METHODS
from apportion.study import card, family

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_readme_holds_the_family_table():
    shown = re.search(r"<!-- family -->\n(.*)\n<!-- /family -->", README, re.DOTALL)[1]
    assert shown == family.markdown(METHODS.values()), "paste the table that apportion methods --markdown prints first"


def test_the_methods_page_is_what_the_command_prints():
    printed = "\n\n".join([family.markdown(METHODS.values()), *(card.markdown(m) for m in METHODS.values())])
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert page.split("<!-- generated -->\n")[1] == printed + "\n", "append the output of apportion methods --markdown"


PAGES = [README, *(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("code", [c for page in PAGES for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL)])
def test_the_python_of_readme_and_docs_runs(code, capsys):
    exec(code, {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=[p.stem for p in EXAMPLES])
def test_the_examples_run(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
