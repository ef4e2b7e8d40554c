"""docs/faults.md and the tests agree: every public fault has a test of its number, and every name is real."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
FAULTS = TESTS.parent / "docs" / "faults.md"


def fault_tests() -> dict[str, int]:
    """Name and number of every fault test in this folder."""
    sources = [path.read_text() for path in TESTS.rglob("test_*.py")]
    names = [name for source in sources for name in re.findall(r"^def (test_fault_\w+)", source, re.M)]
    return {name: int(name.split("_")[2]) for name in names}


def test_the_list_of_faults_names_real_tests() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", FAULTS.read_text(), re.M)
    numbers = [int(number) for number, _ in rows]
    assert numbers == list(range(1, len(rows) + 1)) and len(rows) >= 30
    tests = fault_tests()
    assert set(tests.values()) == set(numbers)
    for number, row in rows:
        named = set(re.findall(r"test_fault_\w+", row))
        assert named and all(tests.get(name) == int(number) for name in named), f"fault {number}: {named}"
