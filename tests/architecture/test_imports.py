"""The house rules, read from the source: who may import whom, how long things may be, nothing left undone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import apportion

ROOT = Path(apportion.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LOWER = {
    "core": set(),
    "methods": {"core"},
    "toy": {"core"},
    "runs": {"core"},
    "control": {"core", "runs"},
    "lm": {"core", "runs"},
    "audit": {"core", "toy"},
    "study": {"core", "methods", "runs", "toy", "control", "lm", "audit"},
}
"""What each package may import besides itself. Whatever is not listed (lab, the command line) may import all."""
FRAMEWORKS = {
    "jax": {"control"}, "jaxlib": {"control"}, "optax": {"control"}, "equinox": {"control"}, "mujoco": {"control"},
    "torch": {"lm"}, "transformers": {"lm"}, "peft": {"lm"}, "accelerate": {"lm"},
}  # fmt: skip
TABLES = {"core/catalogue.py", "core/references.py"}
"""Data, one entry after another: as long as the family is."""
LONGEST_FILE, LONGEST_FUNCTION = 400, 60

each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def package(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """Absolute dotted names of everything the file imports, wherever in it."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the whole name"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@each_file
def test_dependencies_point_one_way(path):
    """core <- runs <- {toy, control, lm} <- {audit, study} <- {lab, cli}."""
    own = package(path)
    used = {name.split(".")[1] for name in imported(path) if name.startswith("apportion.")}
    used = {name for name in used if (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()} - {own}
    if own == "__init__":
        assert not used, "import apportion must stay light"
    elif own in LOWER:
        assert used <= LOWER[own], f"{own} imports {sorted(used - LOWER[own])}; it may import {sorted(LOWER[own])}"


@each_file
def test_frameworks_stay_in_their_domain(path):
    for framework in top(imported(path)) & set(FRAMEWORKS):
        assert package(path) in FRAMEWORKS[framework], f"{framework} belongs under {sorted(FRAMEWORKS[framework])}"


@pytest.mark.parametrize("path", sorted((ROOT / "core").rglob("*.py")), ids=lambda p: p.name)
def test_the_core_is_mathematics(path):
    """The standard library and the array API only: no NumPy, no files, no frameworks."""
    allowed = set(sys.stdlib_module_names) | {"array_api_compat", "apportion"}
    assert top(imported(path)) <= allowed
    assert not top(imported(path)) & {"os", "io", "pathlib", "subprocess", "socket", "random", "time"}


@pytest.mark.parametrize("name", ["apportion", "apportion.methods", "apportion.core.catalogue", "apportion.core.weigh"])
def test_the_core_loads_no_framework(name):
    heavy = ("jax", "torch", "equinox", "mujoco", "gymnasium", "plotly", "rich")
    code = f"import sys, {name}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@each_file
def test_files_are_short(path):
    if str(path.relative_to(ROOT)) not in TABLES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return first.end_lineno - first.lineno + 1 if is_text else 0


@each_file
def test_functions_are_short(path):
    long = [
        f"{node.name} ({length})"
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := node.end_lineno - node.lineno + 1 - docstring_lines(node)) > LONGEST_FUNCTION
    ]
    assert not long, f"longer than {LONGEST_FUNCTION} lines without the docstring: {', '.join(long)}"


@each_file
def test_nothing_is_left_undone(path):
    text = path.read_text(encoding="utf-8")
    for word in ("NotImplementedError", "TODO", "FIXME", "XXX", "breakpoint("):
        assert word not in text, word


@each_file
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(tree(path)), "a module starts with a line that says what it is"


def test_the_rules_name_what_exists():
    assert {"core", "toy", "control"} <= {package(p) for p in FILES}
    assert all((ROOT / table).exists() for table in TABLES if table != "core/references.py")
