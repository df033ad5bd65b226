"""What mkdocs makes while it builds: generated parts, links to the code, formulas.

- ``<!-- generated: NAME -->`` in a page is followed by what ``PARTS[NAME]`` returns, in place of
  the line for those who read the page as it is.
- README.md is the home page, its links brought to the site's; CHANGELOG.md and the examples' README
  are pages.
- A link to a file of the code, ``[fwd](../src/tilewise/x.py#fwd)``, leads to that file's page, at
  the line where ``fwd`` is defined; a file or name that is not there is a warning.
- Formulas become MathML, so that a reader needs neither a script nor a network.

A warning fails a strict build.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from html import unescape
from pathlib import Path
from typing import Any

import latex2mathml.converter
import parts
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger("mkdocs.hooks.tilewise")

# Files outside docs/ that are pages, and where README's links lead.
PAGES = {"CHANGELOG.md": "changelog.md", "examples/README.md": "examples.md"}
HOME = {"docs/": "", "benchmarks/results": "benchmarks.md", **PAGES}
_MARK = re.compile(r"(<!-- generated: ([\w-]+) -->)(?:\n\*.*\*)?")
_CODE = re.compile(r"\]\((?:\.\./)*((?:src|tests|tools)/[\w./]+\.(?:py|toml))(?:#([\w.]+))?\)")
_MATH = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.S)
_LINE = re.compile(r'href="([^"#]*)" title="line (\d+)"')


def _home(text: str) -> str:
    """README.md with its links as the site has them."""
    for before, after in HOME.items():
        text = text.replace(f"]({before}", f"]({after}")
    return text


def on_files(files: Files, config: Any) -> Files:
    texts = {
        "index.md": _home((ROOT / "README.md").read_text()),
        **{uri: (ROOT / path).read_text() for path, uri in PAGES.items()},
    }
    pages = [f for f in files if f.src_uri.endswith(".md")]
    named = {m[1] for f in pages for m in _CODE.finditer(f.content_string)}
    for path in sorted(p for p in named if (ROOT / p).is_file()):
        texts[f"source/{path}.md"] = _source_page(path)
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    for path in parts.drawn_results():
        uri = f"{parts.DRAWN}/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def _source_page(path: str) -> str:
    kind = path.rpartition(".")[2].replace("py", "python")
    code = (ROOT / path).read_text()
    hidden = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    return f'{hidden}# {path}\n\n```{kind} linenums="1"\n{code}```\n'


def line_of(path: str, name: str) -> int | None:
    """Where a function, class, method or global of a file is defined."""
    nodes: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    found = None
    for part in name.split("."):
        found = next((n for n in nodes if part in _names(n)), None)
        if found is None:
            return None
        nodes = getattr(found, "body", [])
    return found.lineno if found else None


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return [getattr(node, "name", "")]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def part(match: re.Match[str]) -> str:
        mark, name = match.groups()
        if name not in parts.PARTS:
            log.warning(f"{here}: nothing generates '{name}'")
            return match[0]
        return f"{mark}\n\n{parts.PARTS[name]()}\n"

    def code(match: re.Match[str]) -> str:
        path, name = match[1], match[2]
        line = 1 if name is None else (ROOT / path).is_file() and line_of(path, name)
        if not line or not (ROOT / path).is_file():
            log.warning(f"{here}: no {path}{f' with {name}' if name else ''}")
            return match[0]
        uri = posixpath.relpath(f"source/{path}.md", posixpath.dirname(here) or ".")
        return f']({uri} "line {line}")'

    return _CODE.sub(code, _MARK.sub(part, markdown))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    def formula(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        found = latex2mathml.converter.convert(unescape(match[2]).strip(), display=display)
        if re.search(r"\\[a-zA-Z]|<mi>&</mi>", found):
            log.warning(f"{page.file.src_uri}: not understood in a formula: {match[2].strip()}")
        return found

    html = _LINE.sub(r'href="\1#__codelineno-0-\2"', html)
    return _MATH.sub(formula, html)
