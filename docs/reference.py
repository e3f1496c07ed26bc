"""For mkdocs: the reference, a page for each package of jaxpar with all its public modules, made from the files themselves."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PACKAGE = Path(__file__).parents[1] / "jaxpar"
ONE_PAGE = "step"  # of the modules that lie in jaxpar itself


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages below the page api.md in the navigation."""
    developers = next(
        part["For developers"] for part in config.nav or [] if "For developers" in part
    )
    listed = [{_title(name): f"reference/{name}.md"} for name in pages()]
    developers[developers.index("api.md")] = {
        "API reference": [{"Where to look": "api.md"}, *listed]
    }
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for name, modules in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=_page(name, modules)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes each module that the page api.md names a link to its description."""
    if page.file.src_uri != "api.md":
        return markdown
    described = {module for modules in pages().values() for module in modules}
    link = lambda found: f"[{found[0]}][{found[1]}]" if found[1] in described else found[0]
    return re.sub(r"`(jaxpar\.[\w.]+)`", link, markdown)


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


def _title(name: str) -> str:
    return "The step and what it is made of" if name == ONE_PAGE else f"jaxpar.{name}"


def _page(name: str, modules: list[str]) -> str:
    heading = [f"# {_title(name)}"] if name == ONE_PAGE else []
    return "\n\n".join([*heading, *(_module(module, _title(name)) for module in modules)]) + "\n"


def _module(module: str, title: str) -> str:
    """Returns the directive that describes a module: a package by its docstring alone, since its modules have its names."""
    is_package = (PACKAGE.parent / module.replace(".", "/")).is_dir()
    options = {"heading_level": 1 if module == title else 2} | (
        {"members": False} if is_package else {}
    )
    return "\n".join(
        [
            f"::: {module}",
            "    options:",
            *(f"      {key}: {str(value).lower()}" for key, value in options.items()),
        ]
    )
