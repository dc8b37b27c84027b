"""MkDocs hook: files outside of docs/ become part of the site, if pages link to them; roles of docstrings go.

Pages link to files as they are in the repository, so that links work there too. A linked file is added under its path
in the repository, and so are the files that it links to if it is Markdown. The Markdown files at the top are added in
any case, but for the README, which MkDocs would take for the index: links to it, and to folders, become plain text.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS, HOME = "docs/", "README.md"
CODE = r"```.*?```|`[^`\n]*`"
LINK = r"!?\[(?P<text>(?:[^\[\]]|!?\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)"
EITHER = re.compile(f"{CODE}|{LINK}", re.DOTALL)
"""Code, in which nothing is a link, or a link without a scheme."""
ROLE = re.compile(r":[a-z]+:(<code>)~?(?:punica\.(?:\w+\.)*(?=[A-Z]))?")
"""Role of a name in a docstring, e.g. ``:class:``, and the modules before a class."""
SEVERAL = re.compile(r"(,</\w+></code>)</td>\s*<td>\s*<code>\(?(.*?)\)?</code>\s*</td>")
"""Attributes of one entry: mkdocstrings takes those behind the first for its type."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that the added pages link to."""
    waiting = [path.name for path in ROOT.glob("*.md")]
    for page in files.documentation_pages():
        waiting += _linked(page.src_uri)
    while waiting:
        path = waiting.pop()
        uri = path.removeprefix(DOCS)
        if path == HOME or not (ROOT / path).is_file() or files.get_file_from_path(uri) is not None:
            continue
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        if uri.endswith(".md"):
            waiting += _linked(uri)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to the places that files have in the site."""
    return EITHER.sub(lambda match: _rewritten(match, page.file.src_uri), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Drop the roles that docstrings give to names, and keep the names of an entry together."""
    return SEVERAL.sub(r"\1 <code>\2</code></td><td></td>", ROLE.sub(r"\1", html))


def _linked(page: str) -> Iterator[str]:
    """Yield the paths in the repository that the links of ``page`` name."""
    return _targets((ROOT / _path_of(page)).read_text(encoding="utf-8"), page)


def _targets(markdown: str, page: str) -> Iterator[str]:
    for match in EITHER.finditer(markdown):
        if match["target"]:
            yield _target(page, match["target"])
            yield from _targets(match["text"], page)


def _rewritten(match: re.Match[str], page: str) -> str:
    """Return a link between places in the site; code, and links to what does not exist, as they are."""
    if not match["target"]:
        return match[0]
    path = _target(page, match["target"])
    text = EITHER.sub(lambda inner: _rewritten(inner, page), match["text"])
    if path == HOME or (ROOT / path).is_dir():
        return text
    if not (ROOT / path).is_file():
        return match[0]
    place = posixpath.relpath(path.removeprefix(DOCS), posixpath.dirname(page) or ".")
    return f"{'!' * match[0].startswith('!')}[{text}]({place}{match['anchor'] or ''})"


def _target(page: str, link: str) -> str:
    """Return the path in the repository that ``link`` on the site's ``page`` names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_path_of(page)), link))


def _path_of(uri: str) -> str:
    """Return the path in the repository of a file of the site."""
    return DOCS + uri if (ROOT / DOCS / uri).exists() else uri
