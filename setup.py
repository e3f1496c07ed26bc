"""The packages of the wheel: jaxpar, and the scripts in recipes/ as jaxpar/recipes. All else is in pyproject.toml."""

from setuptools import find_packages, setup

DATA = ("json", "toml", "html", "css", "js", "sbatch", "txtpb")

setup(
    packages=[*find_packages(include=["jaxpar", "jaxpar.*"]), "jaxpar.recipes"],
    package_dir={"jaxpar": "jaxpar", "jaxpar.recipes": "recipes"},
    package_data={
        "jaxpar": ["py.typed", "*.pyi", *(f"**/*.{kind}" for kind in DATA)],
        "jaxpar.recipes": ["*.toml", "data/*.csv", "data/*.jsonl"],
    },
)
