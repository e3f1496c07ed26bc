"""No file of the package can execute data: no pickle, no eval, no exec, no import by a name from outside."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "jaxpar").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "imp",
    "runpy",
    "code",
}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
UNSAFE = {
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.load",
    "os.system",
    "os.popen",
    "pydoc.locate",
}
# Tables of our own, of literal names: a command of `python -m jaxpar`, a library whose modules an adapter takes, a recipe of
# `jaxpar train`, the public names of the package.
IMPORTS_BY_NAME = {
    *("jaxpar/__init__.py", "jaxpar/__main__.py", "jaxpar/adapters.py", "jaxpar/commands/train.py"),
    "jaxpar/commands/plan_model.py",  # the module that a user names on the command line
}


def name_of(node):
    """The dotted name of what is called; "" for what has none."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(text, path="jaxpar/x.py"):
    """What in a file's text could run data, by line."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [
                (node.lineno, alias.name)
                for alias in node.names
                if alias.name.split(".")[0] in MODULES
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append((node.lineno, node.module))
        elif isinstance(node, ast.Call):
            found += [(node.lineno, what) for what in unsafe_call(node, path)]
    return found


def unsafe_call(node, path):
    name = name_of(node.func)
    if name == "__import__" and path in IMPORTS_BY_NAME:
        return
    if name in CALLS or name in UNSAFE or name.startswith("pickle."):
        yield name
    if (
        name.split(".")[-1] == "import_module"
        and path not in IMPORTS_BY_NAME
        and not is_literal(node.args[0])
    ):
        yield f"{name} of a name that is not literal"
    for keyword in node.keywords:
        on = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        if keyword.arg in ("allow_pickle", "shell") and on:
            yield f"{name}({keyword.arg}=...)"


def is_literal(node):
    return isinstance(node, ast.Constant)


def test_no_file_runs_what_data_says():
    names = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
    found = [
        f"{name}:{line}: {what}"
        for name, text in names.items()
        for line, what in unsafe(text, name)
    ]
    assert names
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval('1')",
        "exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "importlib.import_module(config['model'])",
        "import_module(name)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
    ],
)
def test_what_would_run_data_is_found(line):
    assert unsafe(line), line


def test_what_runs_no_data_is_let_be():
    assert not unsafe(
        "import json\njson.loads(text)\nre.compile(x)\nlowered.compile()\nnp.load(p, allow_pickle=False)"
    )
    assert not unsafe("importlib.import_module('jaxpar.gradients')\nyaml.safe_load(text)")
