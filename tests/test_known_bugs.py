"""Every test that docs/known-bugs-tested.md names must exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "known-bugs-tested.md"


def test_every_test_that_is_named_exists():
    functions = {
        file: set(re.findall(r"^ *def (test_\w+)", file.read_text(), re.MULTILINE)) for file in TESTS.rglob("*.py")
    }
    quoted = re.findall(r"`([^`]*)`", DOCUMENT.read_text())
    named = [text for text in quoted if re.fullmatch(r"(?:[\w/]+\.py::)?test_\w+|[\w/]*test_\w+\.py", text)]
    assert len(named) > 30
    for text in named:
        file, _, name = text.rpartition("::")
        if name.endswith(".py"):
            assert TESTS / name in functions, text
        else:
            assert any(name in found and str(path).endswith(file) for path, found in functions.items()), text
