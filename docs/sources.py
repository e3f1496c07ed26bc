"""For mkdocs: links from pages to files of the repository lead to pages that show them, in the site as in the repository."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OWN_LINK = re.compile(
    r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)"
)  # of a page of the repository, to its files
LINK = re.compile(
    r"\]\((?P<up>(?:\.\./)+)(?P<path>(?:(?:jaxpar|recipes|benchmarks|tests)/[\w/.-]+)|(?:SECURITY|CONTRIBUTING|README|README\.zh)\.md)\)"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file that a page links to."""
    linked = {
        link["path"]
        for file in files.documentation_pages()
        for link in LINK.finditer(file.content_string or "")
    }
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}.md", content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns ``../jaxpar/mesh.py`` into the page that shows it."""
    up = "../" * page.file.src_uri.count("/")
    return LINK.sub(lambda link: f"]({up}source/{link['path']}.md)", markdown)


def _shown(path: str) -> str:
    file = ROOT / path
    if file.suffix == ".md":
        return OWN_LINK.sub(r"\1", file.read_text())
    return f"# {path}\n\n````python\n{file.read_text()}````\n"
