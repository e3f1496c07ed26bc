"""The structure of the tree: the direction of imports, what an import costs, what no file may contain."""

import ast
import functools
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
import traceback
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
import walk

import jaxpar
import jaxpar.pipeline.layer
from tests import conftest
from tests.support import tiny
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "jaxpar").rglob("*.py"))
MOST_TOKENS = 3600  # of code in a module
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# jaxpar/ itself is described in docs/architecture.md, and a module of commands/ is named like its command.
PACKAGES = [
    path
    for path in MODULES
    if path.name == "__init__.py" and path.parent.name not in ("jaxpar", "commands")
]
OPTIONAL = (
    "flax",
    "orbax",
    "scipy.sparse",
    "matplotlib",
    "tyro",
    "sklearn",
    "kubernetes",
    "starlette",
    "pydantic",
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
SATELLITES = (
    "adapters",
    "checkpoint",
    "collectives",
    "huggingface",
    "inspect",
    "jobs",
    "planner",
    "report",
    "serve",
)
CHEAP = {
    "jaxpar.__main__",
    "jaxpar._near_names",
    "jaxpar.commands",
    "jaxpar.commands.cli",
    "jaxpar.fields",
}
CHEAP |= {
    "jaxpar.runtime",
    "jaxpar.runtime.exit_codes",
    "jaxpar.runtime.interrupt",
    "jaxpar.runtime.output",
}
MACHINE_PATH = re.compile(
    r"(?<![\w.$})~-])/(?:home|root|Users|work|tmp|opt|scratch|data|private)/\w|\b[A-Z]:\\\w"
)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def lint_imports(root: Path) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())",
    ]
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        command,
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )


def tokens_of_code(path: Path) -> int:
    """The tokens of a module that are neither comments, docstrings nor layout."""
    source = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and node.body
    ]
    texts = [each for each in firsts if isinstance(getattr(each, "value", None), ast.Constant)]
    prose = {line for each in texts for line in range(each.lineno, each.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in prose for token in tokens)


def test_no_module_has_more_code_than_a_reader_takes_in_at_once():
    """Tokens are counted, not lines, so that no one saves lines by longer ones."""
    assert MODULES
    long = {
        str(path.relative_to(ROOT)): n
        for path in MODULES
        if (n := tokens_of_code(path)) > MOST_TOKENS
    }
    assert not long, f"each holds two things: {long}"


def tracked_files() -> list[Path]:
    """What git tracks; where there is no git, the folders that hold our text."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_SECONDS,
        ).stdout
        paths = [ROOT / name for name in listing.split("\0") if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        folders = ("jaxpar", "recipes", "tests", "benchmarks", "docs", ".ci")
        paths = [
            path
            for folder in folders
            for path in (ROOT / folder).rglob("*")
            if "__pycache__" not in path.parts
        ]
    return [path for path in paths if path.is_file()]


def test_the_walk_of_a_batch_has_the_lines_of_its_functions():
    page = walk.PAGE.read_text()
    assert len(walk.stops(page)) > 8
    assert page == walk.renumbered(page), "run python docs/walk.py"


def ways_to(monkeypatch, owner: Any, name: str, **sizes: int) -> list[list[tuple[str, str]]]:
    """Returns the files of jaxpar/, and the functions in them, through which a step comes to each call of a function."""
    ways, function, package = [], getattr(owner, name), f"{ROOT / 'jaxpar'}{os.sep}"

    def noted(*args, **kwargs):
        frames = [(frame.filename, frame.name) for frame in traceback.extract_stack()]
        ways.append(
            [(file.removeprefix(package), of) for file, of in frames if file.startswith(package)]
        )
        return function(*args, **kwargs)

    mesh = jaxpar.make_mesh(devices=jax.devices()[:2], **sizes)
    params, optimizer = tiny.make_params(), optax.sgd(0.1)
    value_and_grad = jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, num_microbatches=2)
    where = tiny.shardings(mesh, params)
    state = jaxpar.abstract_state(tiny.init, jax.random.key(0), optimizer, mesh, where)
    batch = jaxpar.abstract_batch(tiny.make_batch(), mesh)
    monkeypatch.setattr(owner, name, noted)
    jax.eval_shape(jaxpar.make_train_step(value_and_grad, optimizer), state, batch)
    return ways


@pytest.mark.parametrize(
    ("last", "sizes"),
    [
        pytest.param("pipeline/layer.py", {"stage": 2}, id="with a program"),
        pytest.param("layered_model.py", {"data": 2}, id="without one"),
    ],
)
def test_a_batch_goes_down_the_walk_and_never_up(monkeypatch, last, sizes):
    stops = walk.stops(walk.PAGE.read_text())
    end = next(at for at, stop in enumerate(stops) if stop.file == last)
    begin = max(at for at, stop in enumerate(stops[: end + 1]) if stop.number == 4)
    planned = [
        (stop.file, stop.function.split(".")[-1]) for stop in (*stops[:3], *stops[begin : end + 1])
    ]
    owner = jaxpar.pipeline.layer if "stage" in sizes else jaxpar.LayeredModel
    ways = ways_to(monkeypatch, owner, "run_passes" if "stage" in sizes else "apply", **sizes)
    way = next(way for way in ways if planned[3] in way)
    passed = [each for each in dict.fromkeys(way) if each in planned]
    files = [file for file, _ in planned]
    depths = [files.index(file) for file, _ in way if file in files]
    assert passed == (planned if "stage" in sizes else planned[:-1]), way
    assert depths == sorted(depths), f"a batch goes up again: {way}"
    assert max(stop.number for stop in stops) <= 8, "more files than a reader keeps in mind"


def test_signatures_with_shapes_are_checked():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
        "addopts"
    ]
    packages = next(
        option for option in options if option.startswith("--jaxtyping-packages=")
    ).partition("=")[2]
    *checked, _ = packages.split(",")
    with_shapes = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in MODULES
        if re.search(r'\b[A-Z][A-Za-z]+\[(jax\.)?Array, "', path.read_text())
    }
    unchecked = {
        name
        for name in with_shapes
        if not any(f"{name}.".startswith(f"{package}.") for package in checked)
    }
    assert with_shapes
    assert not unchecked, "name them in pyproject.toml's --jaxtyping-packages"


def test_imports_run_one_way():
    lint = lint_imports(ROOT)
    assert lint.returncode == 0, lint.stdout + lint.stderr


WRONG = {  # lines, and the imports that the linter then names
    "models/mlp.py": ("import jaxpar.mesh", "jaxpar.models.mlp -> jaxpar.mesh"),
    "tensor_parallel.py": (
        "import jaxpar.data_parallel",
        "jaxpar.tensor_parallel -> jaxpar.data_parallel",
    ),
    "mesh.py": ("import jaxpar.sharding", "jaxpar.mesh -> jaxpar.sharding"),
    "schedule/__init__.py": ("import jax", "jaxpar.schedule -> jax"),
    "train.py": ("from orbax.checkpoint import v1", "jaxpar.train -> orbax"),
    "planner/plans.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxpar.planner.ranking import plan",
        r"\.plans -> \.ranking",
    ),
}


@pytest.fixture
def copied(tmp_path):
    """A copy of the package, which a test may break."""
    shutil.copytree(
        ROOT / "jaxpar", tmp_path / "jaxpar", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_wrong_imports_and_a_module_that_no_layer_names_are_noticed(copied):
    (copied / "jaxpar" / "helpers.py").write_text('"""A module that no layer names."""\n')
    for module, (line, _) in WRONG.items():
        with (copied / "jaxpar" / module).open("a") as file:
            file.write(f"\n{line}\n")
    lint = lint_imports(copied)
    assert lint.returncode == 1
    for _, named in WRONG.values():
        assert re.search(rf"{named}\b", lint.stdout), f"{named} passed:\n{lint.stdout}{lint.stderr}"
    assert "jaxpar.helpers" in lint.stdout, lint.stdout + lint.stderr


def imported_by(program: str) -> set[str]:
    """Returns the modules that a program imports, which ends with a line break."""
    command = [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_an_import_of_the_package_imports_neither_jax_nor_modules_of_its_own():
    """So it costs hundredths of an import of JAX, and so do commands that need no JAX, such as `jaxpar --help`."""
    found = imported_by("import jaxpar\nfrom jaxpar.__main__ import usage")
    assert not found & {"jax", "numpy", "scipy", "optax", *OPTIONAL}
    assert not {name for name in found if name.startswith("jaxpar.")} - CHEAP


def test_a_program_that_trains_imports_only_what_that_takes():
    core = "make_mesh LayeredModel LayerLayout value_and_grad init_state make_train_step shard_batch fetch initialize"
    found = imported_by("\n".join(["import jaxpar", *(f"jaxpar.{name}" for name in core.split())]))
    assert not found & {*OPTIONAL, *(f"jaxpar.{part}" for part in SATELLITES)}


def test_public_names_are_the_same_for_type_checkers_and_at_run_time():
    lines = [
        line
        for line in tree_of(ROOT / "jaxpar" / "__init__.pyi").body
        if isinstance(line, ast.ImportFrom)
    ]
    # A stub exports what it imports as the same name.
    assert sorted(name.asname for line in lines for name in line.names) == jaxpar.__all__
    for name in jaxpar.__all__:
        assert getattr(jaxpar, name) is not None
        assert name in dir(jaxpar)
    # Python would bind a module to the name once it is imported, in place of what is in it.
    modules = {name for name in jaxpar.__all__ if importlib.util.find_spec(f"jaxpar.{name}")}
    assert modules == {name for name, module in jaxpar._MODULE_OF.items() if module == "jaxpar"}


def test_every_module_says_what_it_is():
    silent = [
        str(path.relative_to(ROOT)) for path in MODULES if not ast.get_docstring(tree_of(path))
    ]
    assert not silent, f"a module opens with what it is all of: {silent}"


def test_every_package_says_what_each_of_its_modules_is_for():
    unnamed = []
    for path in PACKAGES:
        said = ast.get_docstring(tree_of(path)) or ""
        named = {path.name, *re.findall(r"`([\w/]+\.py)`", said)}
        unnamed += [
            str(module.relative_to(ROOT))
            for module in path.parent.glob("*.py")
            if module.name not in named
        ]
    assert PACKAGES
    assert not unnamed, (
        f"name every module in the docstring of its package's __init__.py: {unnamed}"
    )


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
        for node in ast.walk(tree_of(path)):
            operands = (
                ast.iter_child_nodes(node)
                if isinstance(node, ast.BinOp | ast.Compare | ast.AugAssign)
                else ()
            )
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}"
                for each in operands
                if is_time_of_day(each)
            ]
            if isinstance(node, ast.Assign) and is_time_of_day(node.value):  # to be compared later
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, "use time.monotonic or time.perf_counter in " + ", ".join(found)


def is_time_of_day(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) in (
        "time.time",
        "datetime.now",
        "datetime.datetime.now",
    )


def name_of(node: ast.AST) -> str:
    """Returns a name with dots; "" for what is none."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


# Modules of tests that may read a clock: the one that waits, those that replace a clock, and runs of a given time.
CLOCKS = ("waiting.py", "meetings.py", "tiny_run.py", "chaos.py", "test_serve_soak.py")
CLOCK_CALLS = ("monotonic", "perf_counter", "process_time", "thread_time", "time", "now", "timeit")
READS_CLOCK = re.compile(
    rf"(time|timeit|datetime|datetime\.datetime)\.({'|'.join(CLOCK_CALLS)})(_ns)?"
)
SYS_PATH_CHANGES = ("sys.path.insert", "sys.path.append", "sys.path.extend")
WAITS = ("acquire", "communicate", "join", "result", "wait")


def test_no_test_depends_on_the_speed_of_the_machine():
    """Each waits for WAIT_SECONDS of tests/support/waiting.py, and none measures how long something took."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        found += [f"{path.name}:{line}" for line in of_speed(tree_of(path), path.name in CLOCKS)]
    assert not found, "wait with tests/support/waiting.py, or replace the clock, in " + ", ".join(
        found
    )


def of_speed(tree: ast.AST, may_read_clock: bool) -> list[int]:
    """Returns the lines with a clock that is read, a time-out of its own, or a process that is waited for without one."""
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Sub)
            and "st_mtime" in names_in(node)
        ):
            found.append(node.lineno)
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", "")
        given = {
            keyword.arg: ast.unparse(keyword.value)
            for keyword in node.keywords
            if keyword.arg == "timeout"
        }
        if called in WAITS and len(node.args) == 1 and is_number(node.args[0], least=1):
            found.append(node.lineno)  # a shorter one is a pause
        name = name_of(node.func) if called.removesuffix("_ns") in ("run", *CLOCK_CALLS) else ""
        if (given or name == "subprocess.run") and given.get("timeout") not in (
            "WAIT_SECONDS",
            "timeout",
        ):
            found.append(node.lineno)
        if READS_CLOCK.fullmatch(name) and not may_read_clock:
            found.append(node.lineno)
    return found


def names_in(node: ast.AST) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def is_number(node: ast.AST, least: float) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and node.value >= least
    )


def test_files_that_are_started_first_or_left_out_of_a_tier_exist():
    named = {*conftest.ORDER}
    assert not {name for name in named if not (ROOT / "tests" / name).is_file()}


def test_no_test_imports_another_test_or_changes_where_modules_are_found():
    """What tests share is in tests/support; the scripts that they import are found by pyproject's ``pythonpath``."""
    found = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.walk(tree_of(path)):
            modules = (
                {name.name for name in node.names}
                if isinstance(node, ast.Import | ast.ImportFrom)
                else set()
            )
            modules |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            changes = isinstance(node, ast.Call) and name_of(node.func) in SYS_PATH_CHANGES
            if changes or any(
                f".{name}".rpartition(".")[2].startswith("test_") for name in modules
            ):
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def test_every_legend_has_a_place():
    """Without one Matplotlib looks for the best, and warns where that takes the machine more than a second."""
    found = []
    for path in [
        file
        for folder in ("jaxpar", "recipes", "docs", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
    ]:
        if ".legend(" not in path.read_text():
            continue
        calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
        legends = (
            call
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == "legend"
        )
        named = lambda call: {keyword.arg for keyword in call.keywords}
        found += [
            f"{path.relative_to(ROOT)}:{call.lineno}"
            for call in legends
            if "loc" not in named(call)
        ]
    assert not found, 'write loc="best", or a place, in ' + ", ".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - began < 5",
        "assert now() - folder.stat().st_mtime < 30",
        "subprocess.run(command, timeout=120)",
        "subprocess.run(command)",
        "process.communicate(timeout=SECONDS)",
        "thread.join(60)",
        "urlopen(address, timeout=10)",
    ],
)
def test_a_test_that_depends_on_the_speed_of_the_machine_is_noticed(line):
    assert of_speed(ast.parse(line), may_read_clock=False) == [1]
    assert (
        of_speed(
            ast.parse("subprocess.run(command, timeout=WAIT_SECONDS); event.wait(0.05)"), False
        )
        == []
    )
