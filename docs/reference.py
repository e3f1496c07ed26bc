"""For mkdocs: the reference, a page for each package of jaxpar with all its public modules, made from the files themselves."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).parents[1] / "jaxpar"
ONE_PAGE = "step"  # of the modules that lie in jaxpar itself


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages below the page api.md in the navigation."""
    developers = next(part["For developers"] for part in config.nav or [] if "For developers" in part)
    developers[developers.index("api.md")] = {"Reference": ["api.md", *(f"reference/{name}.md" for name in pages())]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for name, modules in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=_page(name, modules)))
    return files


def pages() -> dict[str, list[str]]:
    """Returns for each page the modules on it, by their full names."""
    found: dict[str, list[str]] = {ONE_PAGE: []}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if any(part.startswith("_") for part in parts if part != "__init__"):
            continue
        module = ".".join(["jaxpar", *(part for part in parts if part != "__init__")])
        if module != "jaxpar":
            found.setdefault(ONE_PAGE if len(parts) == 1 else parts[0], []).append(module)
    return found


def _page(name: str, modules: list[str]) -> str:
    title = "The step and what it is made of" if name == ONE_PAGE else f"jaxpar.{name}"
    return "\n\n".join([f"# {title}", *(f"## {module}\n\n::: {module}" for module in modules)]) + "\n"
