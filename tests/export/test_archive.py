"""Artefacts that hold anything but data are refused before torch reads them."""

from __future__ import annotations

import collections
import io
import json
import pickle
import stat
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from voxmma.export import archive
from voxmma.export.artefact import compile_model, load
from voxmma.export.frozen import ArtefactError

Entries = list[tuple[zipfile.ZipInfo | str, bytes]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "net.pt2"
    compile_model(torch.nn.Linear(4, 2), (torch.ones(3, 4),)).save(path)
    return path


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def entries(path: Path) -> Entries:
    with zipfile.ZipFile(path) as file:
        return [(info.filename, file.read(info)) for info in file.infolist()]


def write(path: Path, parts: Entries, compression: int = zipfile.ZIP_STORED) -> Path:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as file:
        warnings.simplefilter("ignore")  # of names that come twice
        for name, data in parts:
            file.writestr(name, data)
    return path


def root(parts: Entries) -> str:
    """Folder of the archive with its slash; '' where torch writes none."""
    first = str(parts[0][0])
    return first.partition("/")[0] + "/" if "/" in first else ""


def place(parts: Entries, end: str) -> int:
    return next(i for i, (name, _) in enumerate(parts) if str(name).endswith(end))


def edited(parts: Entries, change: Callable[[dict[str, Any]], None]) -> Entries:
    """With the program changed."""
    i = next(i for i, (n, _) in enumerate(parts) if "models/" in str(n) or "exported_program" in str(n))
    program = json.loads(parts[i][1])
    change(program)
    return [*parts[:i], (parts[i][0], json.dumps(program).encode()), *parts[i + 1 :]]


def test_an_artefact_passes_and_is_read_whole(good: Path, tmp_path: Path) -> None:
    assert archive.checked(good) == good.read_bytes()
    again = load(write(tmp_path / "again.pt2", entries(good)))
    assert again.check().good


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a/../../b", "a\\b", "C:evil", "x/data/aotinductor/m/a.so"]
)
def test_fault_59_entries_of_other_places_are_refused(good: Path, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "bad.pt2", [*entries(good), (name, b"data")])
    with pytest.raises(ArtefactError, match="none of an artefact") as raised:
        load(path, trust_code=True)
    assert name.rsplit("\\", 1)[-1] in str(raised.value)


def test_fault_59_machine_code_of_torchs_own_is_refused(good: Path, tmp_path: Path) -> None:
    parts = entries(good)
    path = write(tmp_path / "bad.pt2", [*parts, (f"{root(parts)}data/aotinductor/model/a.so", b"\x7fELF")])
    with pytest.raises(ArtefactError, match=r"aotinductor/model/a\.so"):
        load(path)


def test_fault_59_repeated_linked_compressed_or_lying_entries_are_refused(good: Path, tmp_path: Path) -> None:
    parts = entries(good)
    path = tmp_path / "bad.pt2"
    with pytest.raises(ArtefactError, match="is there twice"):
        load(write(path, [*parts, parts[0]]))
    link = zipfile.ZipInfo(f"{root(parts)}extra/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(ArtefactError, match="no plain file"):
        load(write(path, [*parts, (link, b"/etc/passwd")]))
    with pytest.raises(ArtefactError, match="is compressed"):
        load(write(path, [*parts, (f"{root(parts)}extra/bomb", bytes(1 << 24))], zipfile.ZIP_DEFLATED))
    with pytest.raises(ArtefactError, match="something follows"):
        write(path, parts).open("ab").write(b"more")
        load(path)
    data = bytearray(good.read_bytes())
    end = data.rindex(b"PK\x01\x02")  # the last entry of the directory: its sizes
    data[end + 20 : end + 28] = (1 << 30).to_bytes(4, "little") * 2
    path.write_bytes(data)
    with pytest.raises(ArtefactError, match="larger than the file"):
        load(path)


def test_fault_59_a_changed_or_cut_file_is_refused(good: Path, tmp_path: Path) -> None:
    data, path = bytearray(good.read_bytes()), tmp_path / "bad.pt2"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtefactError, match=r"no intact archive|something follows"):  # 2.8: an archive within
        load(path)
    parts = entries(good)
    with zipfile.ZipFile(good) as archive:
        header = archive.getinfo(str(parts[0][0])).header_offset
    start = header + 30 + sum(int.from_bytes(data[header + i : header + i + 2], "little") for i in (26, 28))
    assert data[start : start + len(parts[0][1])] == parts[0][1]
    data[start] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtefactError, match="no intact archive"):
        load(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ArtefactError, match="no intact archive"):
        load(path)


def test_fault_59_pickles_are_not_run(good: Path, tmp_path: Path) -> None:
    """Wherever torch would unpickle: sample inputs, legacy weights, tensors marked as pickled, the check."""
    parts, mark, path = entries(good), tmp_path / "mark", tmp_path / "bad.pt2"
    saved = io.BytesIO()
    torch.save({"weight": Bomb(mark)}, saved)
    bombs = [saved.getvalue(), pickle.dumps({"weight": Bomb(mark)})]
    pickles = [i for i, (name, _) in enumerate(parts) if str(name).endswith(".pt")]
    assert pickles
    for bomb in bombs:
        for i in pickles:
            changed = [*parts[:i], (parts[i][0], bomb), *parts[i + 1 :]]
            with pytest.raises(ArtefactError, match="holds more than tensors"):
                load(write(path, changed))
        if not root(parts):
            continue
        legacy = f"{root(parts)}data/weights/model.pt"  # which torch 2.8 still writes
        others = [part for part in parts if str(part[0]) != legacy]
        with pytest.raises(ArtefactError, match="holds more than tensors"):
            load(write(path, [*others, (legacy, bomb)]))
        if any(str(name) == legacy for name, _ in parts):
            continue  # weights are in that one alone
        config, tensor = place(parts, "model_weights_config.json"), place(parts, "weights/weight_0")
        listed = json.loads(parts[config][1])
        for payload in listed["config"].values():
            payload["use_pickle"] = True
        changed = list(parts)
        changed[config] = parts[config][0], json.dumps(listed).encode()
        changed[tensor] = parts[tensor][0], bomb
        with pytest.raises(ArtefactError, match="holds more than tensors"):
            load(write(path, changed))
        for payload in listed["config"].values():
            payload["path_name"] = "opaque_obj_0"
        changed[config] = parts[config][0], json.dumps(listed).encode()
        with pytest.raises(ArtefactError, match="holds no tensor"):
            load(write(path, changed))
    assert not mark.exists()


def _nodes(program: dict[str, Any]) -> list[Any]:
    return list(program["graph_module"]["graph"]["nodes"])


def _retarget(target: str) -> Callable[[dict[str, Any]], None]:
    return lambda program: _nodes(program)[0].update(target=target)


def _rename(program: dict[str, Any]) -> None:
    program["graph_module"]["graph"]["inputs"][-1]["as_tensor"]["name"] = "x=print('evil')"


def _size(program: dict[str, Any]) -> None:
    size = {"as_expr": {"expr_str": "__import__('os').system('true')", "hint": None}}
    program["graph_module"]["graph"]["sym_int_values"]["metadata"] = size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_retarget("torch.hub.load"), "no operator"),
        (_retarget("_operator.call"), "no operator"),
        (_retarget("_operator.attrgetter"), "no operator"),
        (_retarget("torch.ops.aten.from_file.default"), "no operator"),
        (_rename, "has a name"),
        (_size, "no expression of sizes"),
        (
            lambda program: _nodes(program)[0]["inputs"].append({"arg": {"as_custom_obj": {}}}),
            "as_custom_obj",
        ),
    ],
)
def test_fault_59_programs_that_could_be_code_are_refused(
    good: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    with pytest.raises(ArtefactError, match=message):
        load(write(tmp_path / "bad.pt2", edited(entries(good), change)))


LEAF = {"type": None, "context": None, "children_spec": []}


def named(module: str, name: str) -> dict[str, Any]:
    """A structure for which torch imports a module."""
    context = {"default_factory_module": module, "default_factory_name": name, "dict_context": ["a"]}
    return {"type": "collections.defaultdict", "context": context, "children_spec": [LEAF]}


def enum(module: str, name: str) -> dict[str, Any]:
    context = json.dumps([{"__enum__": True, "fqn": f"{module}:{name}", "name": "A"}])
    return {"type": "builtins.dict", "context": context, "children_spec": [LEAF]}


@pytest.mark.parametrize("make", [named, enum])
@pytest.mark.parametrize("where", ["in_spec", "out_spec", "inputs", "outputs"])
def test_structures_import_nothing(
    good: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[str, str], dict[str, Any]],
    where: str,
) -> None:
    """Not even with letters written as JSON's escapes."""
    (tmp_path / "voxmma_bomb.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    node = {"type": "builtins.tuple", "context": "null", "children_spec": [make("voxmma_bomb", "f")]}
    text = json.dumps([1, node])
    for spec in (text, text.replace("factory", "f\\u0061ctory").replace("__enum", "\\u005f_enum")):
        assert json.loads(spec) == json.loads(text)

        def change(program: dict[str, Any], spec: str = spec) -> None:
            (module, *_) = program["graph_module"]["module_call_graph"]
            module["signature"][where] = spec

        parts = entries(good)
        if where.endswith("_spec"):
            parts = edited(parts, change)
        else:
            i = place(parts, "voxmma.json")
            parts[i] = parts[i][0], json.dumps({**json.loads(parts[i][1]), where: spec}).encode()
        with pytest.raises(ArtefactError, match="to be imported"):
            load(write(tmp_path / "bad.pt2", parts))


def test_structures_of_plain_types_pass(tmp_path: Path) -> None:
    class Counted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return collections.defaultdict(list, {"{y": [y], 3: collections.OrderedDict(y=y)})

    path, x = tmp_path / "net.pt2", torch.ones(3, 4)
    made = compile_model(Counted(4, 2), (x,))
    made.save(path)
    y = load(path)(x)
    assert y.default_factory is list and torch.equal(y["{y"][0], made(x)[3]["y"])

    class Named(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return collections.defaultdict(Path.cwd, y=super().forward(x))

    with pytest.raises(ArtefactError, match=r"outputs cannot be in an artefact: .*imported: pathlib"):
        compile_model(Named(4, 2), (x,))


def test_damaged_metadata_is_refused(good: Path, tmp_path: Path) -> None:
    parts = entries(good)
    at, check = place(parts, "voxmma.json"), place(parts, "voxmma.check")
    whole = json.loads(parts[at][1])
    changes: list[Any] = [
        [],
        {"format": whole["format"]},
        *(
            {key: value for key, value in whole.items() if key != name}
            for name in ("policy", "aot", "passed")
        ),
        {**whole, "policy": 3},
        {**whole, "passed": {"7": 0}},
        {**whole, "passed": {"0": 7}},
        {**whole, "tolerance": "1"},
        {**whole, "tolerance": float("inf")},
        {**whole, "aot": {}},
        {**whole, "outputs": "[9]"},
        {**whole, "inputs": '[1, {"type": "builtins.tuple"}]'},
    ]
    for text in (b"{", *(json.dumps(changed).encode() for changed in changes)):
        changed = [*parts[:at], (parts[at][0], text), *parts[at + 1 :]]
        with pytest.raises(ArtefactError, match="is damaged, or of another format"):
            load(write(tmp_path / "bad.pt2", changed))
    changed = [*parts[:check], (parts[check][0], b"AAAA"), *parts[check + 1 :]]
    with pytest.raises(ArtefactError, match="damaged example"):
        load(write(tmp_path / "bad.pt2", changed))


def test_fault_59_guards_of_a_file_are_not_compiled(good: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def change(program: dict[str, Any]) -> None:
        program["guards_code"] = [f"open({str(mark)!r}, 'w') is not None"]

    parts = entries(good)
    if "guards_code" not in json.loads(next(d for n, d in parts if str(n).endswith("model.json"))):
        pytest.skip("this torch writes no guards")
    made = load(write(tmp_path / "guarded.pt2", edited(parts, change)))
    made(torch.ones(3, 4))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Symbol('s0', positive=True, integer=True)", True),
        ("Add(Mul(Integer(2), Symbol('s1')), Integer(-1))", True),
        ("2*s0 + FloorDiv(u1, 4)", True),
        ("s0.__class__", False),
        ("open('x')", False),
        ("print(s0)", False),
        ("Symbol('s0') if True else 0", False),
        ("s0" * 6000, False),
    ],
)
def test_sizes_are_arithmetic(text: str, good: bool) -> None:
    assert archive.is_expression(text) is good
