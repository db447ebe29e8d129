"""Hooks of mkdocs: pages that lie outside docs/, and links between Markdown files as links between pages.

A document is written once, for the repository: README.md links to ``docs/trainers.md``, docs/trainers.md to
``../README.md``. Each such link becomes a link between pages of the site. A link to a file of the repository that is no
page (a program, a test) becomes its text. A link to a file that does not exist stays unchanged, and mkdocs refuses it.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benches/RESULTS.md": "results.md",
    "docs/decisions": "decisions/index.md",
}
"""Pages of the site by the file, or folder, that a link in the repository names."""

_LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s]+)\)")


def decisions() -> dict[str, str]:
    """Return the title of each decision by its page, in their order."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    return {f"decisions/{page.name}": page.read_text().partition("\n")[0].removeprefix("# ") for page in pages}


def public_names() -> list[str]:
    """Return ``__all__`` of the package, without importing it."""
    tree = ast.parse((ROOT / "pipeline" / "__init__.py").read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets)
    )
    return list(ast.literal_eval(value))


def with_page_links(markdown: str, source: str) -> str:
    """Return a document whose relative links name pages of the site.

    Args:
        markdown: The document.
        source: Its path in the repository.
    """

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        named = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = PAGES.get(named) or (named.removeprefix("docs/") if named.startswith("docs/") else "")
        if not (ROOT / named).exists():
            return found[0]
        if not page:
            return text
        own = PAGES.get(source) or source.removeprefix("docs/")
        return f"{image}[{text}]({posixpath.relpath(page, posixpath.dirname(own) or '.')}{mark}{anchor})"

    return _LINK.sub(link, markdown)


def on_config(config: Any) -> Any:
    """Put every decision into the navigation."""
    for section in config.nav:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else ():
                if "Decisions" in entry:
                    entry["Decisions"] = [entry["Decisions"], *({title: page} for page, title in decisions().items())]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/, and a list of the decisions."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    listed = "\n".join(f"- [{title}]({posixpath.basename(page)})" for page, title in decisions().items())
    content = f"# Decisions\n\nWhy a lasting choice was made, one page each.\n\n{listed}\n"
    files.append(File.generated(config, PAGES["docs/decisions"], content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page's text with links between pages, and the reference's with every public name."""
    sources = {target: source for source, target in PAGES.items()}
    uri = page.file.src_uri
    if uri == PAGES["docs/decisions"]:
        return markdown
    if uri == "api.md":
        markdown += "".join(f"\n::: pipeline.{name}\n" for name in public_names())
    return with_page_links(markdown, sources.get(uri, f"docs/{uri}"))
