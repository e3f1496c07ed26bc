"""What pip installs: the wheel and the sdist, built here and used from an empty environment, without the network."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import house_prices_report
import jaxpar
from jaxpar.__main__ import main
from jaxpar.commands.train import RECIPES, path_of
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]
PURELIB = sysconfig.get_path("purelib")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def run(*words, cwd, **environment):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(
        [*map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind, source, folder):
    """Returns the file that setuptools builds, as pip does without build isolation."""
    return folder / run(sys.executable, "-c", BUILD, kind, folder, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files of an unpacked sdist, in a folder of their own, so that nothing is built among the sources."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = tmp_path_factory.mktemp("copy") / "jaxpar"
    names = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    with tarfile.open(build("build_sdist", copy, folder)) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the programs of an environment with the wheel, which finds the other packages of this one."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("\n".join(paths))
    with zipfile.ZipFile(wheel) as archive:  # as pip does, which takes longer
        archive.extractall(site)
    return home / "bin"


@pytest.mark.full
def test_the_sdist_has_what_its_tests_read(source):
    for name in (
        "tests/conftest.py",
        "docs/pictures.py",
        "recipes/data/portland_houses.csv",
        "constraints.txt",
        "Makefile",
    ):
        assert (source / name).is_file(), name
    tests = lambda root: {path.relative_to(root) for path in (root / "tests").rglob("*.py")}
    assert tests(source) == tests(ROOT)


@pytest.mark.slow
def test_tests_of_the_sdist_run(source):
    run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_mesh.py",
        cwd=source,
        PYTHONPATH=str(source),
    )


@pytest.mark.full
def test_the_wheel_has_the_same_recipes(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {
            name: archive.read(name)
            for name in archive.namelist()
            if name.startswith("jaxpar/recipes/")
        }
        names = archive.namelist()
    kinds = (".py", ".toml", ".csv", ".jsonl")
    there = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in kinds]
    assert inside == {
        f"jaxpar/recipes/{path.relative_to(ROOT / 'recipes')}": path.read_bytes() for path in there
    }
    tracked = run("git", "ls-files", "jaxpar", cwd=ROOT).splitlines()
    assert set(tracked) <= set(names), "with the files that modules read"
    assert not [name for name in names if not name.startswith(("jaxpar/", "jaxpar-"))], (
        "nothing else at the top"
    )


@pytest.mark.full
def test_the_installed_program_trains_far_from_the_repository(installed, tmp_path):
    program = installed / "python"
    script = """import sys; import jaxpar; from jaxpar.__main__ import main
print(jaxpar.__file__, main(["--version"])); sys.exit(main())"""
    words = ("train", "house-prices", "--fake-devices", "2", "--mesh.data", "2", "--dry-run")
    said = run(program, "-c", script, *words, cwd=tmp_path, JAX_PLATFORMS="cpu")
    version, where, *_ = said.splitlines()
    assert version == f"jaxpar {jaxpar.__version__}"
    assert Path(where.removesuffix(" 0")).is_relative_to(installed.parent)
    assert "47 rows of portland_houses.csv" in said
    assert "all-reduce" in said


def test_a_clone_is_found_from_beside_it(source, tmp_path):
    """In the folder of a clone, the clone itself looks like a package: only an entry of the path is asked before it."""
    clone = source.with_name("jaxpar")
    source.rename(clone)
    try:
        editable = build("build_editable", clone, tmp_path)
        with zipfile.ZipFile(editable) as archive:
            archive.extractall(tmp_path / "site")
        script = f"""import site, sys; site.addsitedir({str(tmp_path / "site")!r}); sys.path.append({PURELIB!r})
import jaxpar; print(jaxpar.__file__); jaxpar.use_fake_devices"""
        found = run(sys.executable, "-S", "-c", script, cwd=clone.parent)
        assert Path(found.strip()) == clone / "jaxpar" / "__init__.py"
    finally:
        clone.rename(source)


def test_the_console_script_is_declared(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = (
            archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt")
        )
        (about,) = (
            archive.read(n).decode()
            for n in archive.namelist()
            if n.endswith(".dist-info/METADATA")
        )
    assert "jaxpar = jaxpar.__main__:main" in entry
    assert f"Version: {jaxpar.__version__}" in about
    assert "Description-Content-Type: text/markdown" in about


def test_every_recipe_of_the_command_is_there():
    for name in RECIPES:
        assert path_of(name).is_file()


def test_train_lists_the_recipes_and_suggests_one(capsys):
    assert main(["train", "--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in RECIPES)
    assert "Learns house prices from real sales" in listed
    assert main(["train", "house_price"]) == 2
    assert "got 'house_price'. Did you mean house-prices?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpt", "bloom"])
def test_a_recipe_of_the_command_is_named_as_it_was_called(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxpar", "train", name])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAXPAR_LOG_SECONDS", "0")
    with pytest.raises(SystemExit, match="0"):
        main(["train", name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: jaxpar train {name} [-h]")
    with pytest.raises(SystemExit, match="2"):
        main(["train", name, "--nothing"])
    said = capsys.readouterr().err
    assert f"jaxpar train {name} --help" in said
    assert ".py" not in said


@pytest.mark.full
def test_a_recipe_ends_with_a_command_by_which_it_was_called(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["bin/jaxpar"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAXPAR_LOG_SECONDS", "0")
    monkeypatch.chdir(tmp_path)
    for plot in ("plot_loss", "plot_surface", "plot_errors"):
        monkeypatch.setattr(house_prices_report, plot, lambda *_: None)
    main(["train", "house-prices", "--steps", "3", "--out-dir", "my runs/1"])
    (line,) = re.findall("^try it: (.*)", capsys.readouterr().out, re.MULTILINE)
    assert line.startswith("jaxpar train house-prices --out-dir 'my runs/1' --predict ")
    assert main(shlex.split(line.partition("jaxpar ")[2])) == 0, "it works as it is"
    assert re.match(r"price_usd -?[\d,]+ for area_ft2 ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("program", "called"),
    [("bin/jaxpar", "jaxpar"), ("jaxpar/__main__.py", "python -m jaxpar")],
    ids=["script", "module"],
)
def test_the_help_of_an_installed_recipe_names_the_command_and_no_script(
    program, called, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="0"):
        main(["train", "house-prices", "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: {called} train house-prices [-h]")
    assert f"{called} train house-prices --predict 1650 3" in said
    assert "recipes/house_prices.py" not in said


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxpar {jaxpar.__version__}\n"
