"""House style of docstrings: a noun or verb first, in the field's words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADLESS = re.compile(r"(What|Whether|Who|Of|How)\b")
BANNED = re.compile(r"\b(nobody|somebody|everybody|whoever|lies|goes on)\b", re.IGNORECASE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of constants and fields included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for i, one in enumerate(body if isinstance(body, list) else []):
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                before = body[i - 1] if i else None
                if (i == 0 and isinstance(node, DOCUMENTED)) or isinstance(before, (ast.Assign, ast.AnnAssign)):
                    yield one.lineno, one.value.value


def faults(source: str) -> list[str]:
    """List the house words and headless first lines of a file's docstrings."""
    found = []
    for line, text in docstrings(ast.parse(source)):
        found += [f"{line}: {match.group()!r}" for match in BANNED.finditer(" ".join(text.split()))]
        if HEADLESS.match(text.lstrip()):
            found.append(f"{line}: begins with {text.split()[0]!r}")
    return found


def test_docstrings_are_in_house_style() -> None:
    files = [path for folder in ("punica", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [f"{path.relative_to(ROOT)}:{one}" for path in files for one in faults(path.read_text("utf-8"))] == []
    source = '"""Lists."""\nX = 1\n"""Of rows."""\ndef f():\n    """Return x; it\n    goes on, and nobody lies."""\n'
    assert faults(source) == ["3: begins with 'Of'", "5: 'goes on'", "5: 'nobody'", "5: 'lies'"]
