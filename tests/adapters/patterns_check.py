"""Compare `patterns.py` with `re` on the Python that runs this file, which needs no torch: its path is the argument.

The module reads `re`'s private parser. A Python without it, or with another grammar, ends this script with an error.
"""

import importlib.util
import re
import sys
from pathlib import Path

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.17.mlp.down_proj", "lm_head", "a", ""]
PATTERNS = [
    "q_proj", "q_proj|down_proj", r".*\.1\d\..*", "(?:a|b)+", "[^a-m]*", r"\w+", r"(?:\D+\.)*\d*\S*", "(?i:LM_HEAD)",
    "m.*?d", "a{0,3}", r"^model\b.*$", r"\Amodel.*\Z", r".*\B_proj", "(?=.*q)[a-z._0-9]+", "(?!lm).*", "(?<=a)b|a",
    "(?!)", "(?P<x>l)m_head", "(?s:.)*", r"[\w.]+\.[qd]\w+", "[a-c]?",
]  # fmt: skip
REFUSED = [r"(a)\1", "(?>a+)b", "a++", "(a)?(?(1)b|c)"]


def main(root: Path) -> None:
    sys.path.insert(0, str(root))
    spec = importlib.util.spec_from_file_location("patterns", root / "punica" / "adapters" / "patterns.py")
    assert spec is not None
    assert spec.loader is not None
    patterns = importlib.util.module_from_spec(spec)
    sys.modules["patterns"] = patterns
    spec.loader.exec_module(patterns)
    for pattern in PATTERNS:
        found = patterns.ModuleNames(NAMES, patterns.Steps()).matching(patterns.NamePattern(pattern, suffix=False))
        assert found == [re.fullmatch(pattern, name) is not None for name in NAMES], (pattern, found)
    for pattern in REFUSED:
        try:
            patterns.NamePattern(pattern)
        except patterns.UnboundedPattern:
            continue
        raise AssertionError(f"{pattern!r} is not refused")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
