"""Examples of README and docs run as they stand; every public fault has a test of its number."""

from __future__ import annotations

import pkgutil
import re
import types
from pathlib import Path

import pytest

import voxmma
import voxmma.engine
import voxmma.models

TESTS = Path(__file__).parent
FAULTS = TESTS.parent / "docs" / "faults.md"
#: Pages whose examples compile a network, as test_compile.py, test_policy.py and test_engine.py do on less.
COMPILED = ("compile.md", "networks.md", "policy.md")


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


def examples(page: Path) -> str:
    """The Python of a page's ```python blocks, on the lines where it stands."""
    kept, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        kept.append(line if inside else "")
    return "\n".join(kept)


PAGES = [
    page
    for page in (TESTS.parent / "README.md", *sorted(FAULTS.parent.glob("*.md")))
    if examples(page).strip()
]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name in COMPILED)) for page in PAGES],
)
def test_examples_run_as_they_stand(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page one after another, as one program."""
    monkeypatch.chdir(tmp_path)
    program = compile(examples(page), page.name, "exec")
    with voxmma.settings.override(cache_dir=str(tmp_path)):
        exec(program, {"__name__": page.stem})


def test_the_reference_has_every_public_name() -> None:
    """What docs/api names is there; classes and functions of the public modules are documented by it."""
    pages = [page.read_text() for page in (FAULTS.parent / "api").glob("*.md")]
    targets = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.M)]
    assert len(targets) == len(set(targets))
    documented = {id(pkgutil.resolve_name(name)) for name in targets}
    public = (voxmma, voxmma.nn, voxmma.nn.functional, voxmma.models, voxmma.export)
    for module in (*public, voxmma.engine, voxmma.policy, voxmma.schedule):
        for name in module.__all__:
            found = getattr(module, name)
            if isinstance(found, type | types.FunctionType) and not hasattr(found, "__wrapped__"):
                assert id(found) in documented, f"{module.__name__}.{name}"
