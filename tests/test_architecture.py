"""The structure of the tree: the direction of imports, what an import costs, what no file may contain."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "jaxpar").rglob("*.py"))
# jaxpar/ itself is described in docs/architecture.md, and a module of commands/ is named like its command.
PACKAGES = [path for path in MODULES if path.name == "__init__.py" and path.parent.name not in ("jaxpar", "commands")]
OPTIONAL = (
    "flax",
    "orbax",
    "scipy.sparse",
    "matplotlib",
    "tyro",
    "sklearn",
    "kubernetes",
    "starlette",
    "uvicorn",
    "equinox",
    "haiku",
    "safetensors",
    "tokenizers",
    "jinja2",
    "pyarrow",
    "grain",
    "torch",
    "transformers",
)
MACHINE_PATH = re.compile(r"(?<![\w.$})~-])/(?:home|root|Users|work|tmp|opt|scratch|data|private)/\w|\b[A-Z]:\\\w")


def lint_imports(root: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"]
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


def test_no_module_is_longer_than_300_lines():
    assert MODULES
    long = {str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 300}
    assert not long, f"each holds two things, or more than a reader takes in at once: {long}"


def tracked_files() -> list[Path]:
    """What git tracks; where there is no git, the folders that hold our text."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listing.split("\0") if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        folders = ("jaxpar", "recipes", "tests", "benchmarks", "docs", ".ci")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return [path for path in paths if path.is_file()]


def test_signatures_with_shapes_are_checked():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    packages = next(option for option in options if option.startswith("--jaxtyping-packages=")).partition("=")[2]
    *checked, _ = packages.split(",")
    with_shapes = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in MODULES
        if re.search(r'\b[A-Z][A-Za-z]+\[(jax\.)?Array, "', path.read_text())
    }
    unchecked = {name for name in with_shapes if not any(f"{name}.".startswith(f"{package}.") for package in checked)}
    assert with_shapes
    assert not unchecked, "name them in pyproject.toml's --jaxtyping-packages"


def test_imports_run_one_way():
    lint = lint_imports(ROOT)
    assert lint.returncode == 0, lint.stdout + lint.stderr


WRONG = {  # lines, and the imports that the linter then names
    "models/mlp.py": ("import jaxpar.mesh", "jaxpar.models.mlp -> jaxpar.mesh"),
    "tensor_parallel.py": ("import jaxpar.data_parallel", "jaxpar.tensor_parallel -> jaxpar.data_parallel"),
    "mesh.py": ("import jaxpar.sharding", "jaxpar.mesh -> jaxpar.sharding"),
    "schedule/__init__.py": ("import jax", "jaxpar.schedule -> jax"),
    "train.py": ("from orbax.checkpoint import v1", "jaxpar.train -> orbax"),
    "planner/plans.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxpar.planner.estimator import Estimator",
        r"\.plans -> \.estimator",
    ),
}


@pytest.fixture
def copied(tmp_path):
    """A copy of the package, which a test may break."""
    shutil.copytree(ROOT / "jaxpar", tmp_path / "jaxpar", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_wrong_imports_are_noticed(copied):
    for module, (line, _) in WRONG.items():
        with (copied / "jaxpar" / module).open("a") as file:
            file.write(f"\n{line}\n")
    lint = lint_imports(copied)
    assert lint.returncode == 1
    for _, named in WRONG.values():
        assert re.search(rf"{named}\b", lint.stdout), f"{named} passed:\n{lint.stdout}{lint.stderr}"


def test_a_module_that_no_layer_names_is_noticed(copied):
    (copied / "jaxpar" / "helpers.py").write_text('"""A module that no layer names."""\n')
    lint = lint_imports(copied)
    assert lint.returncode == 1
    assert "jaxpar.helpers" in lint.stdout, lint.stdout + lint.stderr


def test_import_leaves_optional_packages_alone():
    program = f"import sys, jaxpar; print(*sorted({set(OPTIONAL)!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [], "`import jaxpar` should import none of these"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text())), "a module opens with what it is all of"


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.relative_to(ROOT).as_posix())
def test_package_says_what_each_of_its_modules_is_for(path):
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    modules = {module.name for module in path.parent.glob("*.py")} - {path.name}
    assert modules <= set(re.findall(r"`([\w/]+\.py)`", said)), "name every module in the docstring of __init__.py"


def test_make_help_names_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split()) - {"help"}
    assert set(re.findall(r'^\t@echo "make ([a-z-]+) ', makefile, re.M)) == targets


def test_no_file_names_a_path_of_one_machine():
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{n}: {line.strip()}"
            for n, line in enumerate(lines, 1)
            if MACHINE_PATH.search(line)
        ]
    assert not found, "\n".join(found)


def test_no_duration_depends_on_the_time_of_day():
    """A clock that is set back must not stop a heartbeat, or make a rate negative: `time.time` dates things, and no more."""
    found = []
    for path in sorted([*MODULES, *(ROOT / "recipes").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            operands = ast.iter_child_nodes(node) if isinstance(node, ast.BinOp | ast.Compare | ast.AugAssign) else ()
            found += [f"{path.relative_to(ROOT)}:{node.lineno}" for each in operands if is_time_of_day(each)]
            if isinstance(node, ast.Assign) and is_time_of_day(node.value):  # to be compared later
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, "use time.monotonic or time.perf_counter in " + ", ".join(found)


def is_time_of_day(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "time.time",
        "datetime.now",
        "datetime.datetime.now",
    )
