"""What makes a shared object that is linked here load elsewhere: with glibc 2.28 and other torches.

Loaded by setup.py, which links wheels. Where glibc is 2.28 (the container manylinux_2_28), nothing is old.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

GLIBC = (2, 28)
#: Where glibc 2.28 had what later moved into libc.so.6.
HOMES = (
    ("dl", "libdl.so.2"),
    ("shm_", "librt.so.1"),
    ("pthread_", "libpthread.so.0"),
    ("sem_", "libpthread.so.0"),
)


def _shim(name: str, body: str) -> str:
    return f".globl {name}\n.hidden {name}\n.type {name},@function\n{name}:\n{body}\n"


_STREAM = "St7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEE"
_BUFFER = "St7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE"
_POINTER = "NSt15__exception_ptr13exception_ptr"
_STRING = "St7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE"
#: Symbols of libstdc++ newer than GCC 8, which headers of later ones ask for, by those that it has.
SHIMS = "".join(
    (
        ".text\n",
        _shim(
            f"_ZN{_STREAM}C1Ev", f"movl $16, %esi\njmp _ZN{_STREAM}C1ESt13_Ios_Openmode@PLT"
        ),  # ios_base::out
        _shim(f"_ZNKR{_BUFFER}3strEv", f"jmp _ZNK{_BUFFER}3strEv@PLT"),
        _shim(f"_ZNO{_BUFFER}3strEv", f"jmp _ZNK{_BUFFER}3strEv@PLT"),
        _shim("_ZSt28__throw_bad_array_new_lengthv", "jmp __cxa_throw_bad_array_new_length@PLT"),
        _shim(f"_Z{_POINTER}10_M_releaseEv", f"jmp _Z{_POINTER}D1Ev@PLT"),
        # A copy that is never destroyed adds a reference.
        _shim(
            f"_Z{_POINTER}9_M_addrefEv",
            "subq $24, %rsp\nmovq %rdi, %rsi\nleaq 8(%rsp), %rdi\n"
            f"call _Z{_POINTER}C1ERKS0_@PLT\naddq $24, %rsp\nret",
        ),
        # In place, of a string that has the room: (pointer, ...) is what the whole takes as (position, ...).
        _shim(
            f"_ZN{_STRING}15_M_replace_coldEPcmPKcmm",
            f"subq (%rdi), %rsi\njmp _ZN{_STRING}10_M_replaceEmmPKcm@PLT",
        ),
        _shim(
            "__cxa_call_terminate", "subq $8, %rsp\ncall __cxa_begin_catch@PLT\ncall _ZSt9terminatev@PLT\nud2"
        ),
        # A name that <iostream> asks for and nobody calls; torch's libraries have initialised the streams.
        _shim("_ZSt21ios_base_library_initv", "ret"),
        # Whether there is one thread, of glibc 2.32: to say no is right in every process.
        ".bss\n.globl __libc_single_threaded\n.hidden __libc_single_threaded\n",
        ".type __libc_single_threaded,@object\n.size __libc_single_threaded,1\n",
        "__libc_single_threaded: .byte 0\n",
    )
)


def version_of(text: str) -> tuple[int, ...]:
    """(2, 3, 4) of "GLIBC_2.3.4"."""
    return tuple(int(part) for part in text.removeprefix("GLIBC_").split("."))


def older_versions(listed: str) -> dict[str, str]:
    """Symbols whose version by default is newer than GLIBC, with the newest that is not.

    listed: what `nm -D --with-symbol-versions --defined-only` says of a library of glibc.

    >>> older_versions("0 T dlopen@@GLIBC_2.34\\n0 T dlopen@GLIBC_2.2.5\\n0 T read@@GLIBC_2.2.5")
    {'dlopen': 'GLIBC_2.2.5'}
    """
    found = re.findall(r" (\w+)(@@?)(GLIBC_[\d.]+)$", listed, re.MULTILINE)
    new = {name for name, default, version in found if default == "@@" and version_of(version) > GLIBC}
    old: dict[str, str] = {}
    for name, _, version in found:
        if name in new and version_of(version) <= GLIBC:
            old[name] = max(old.get(name, version), version, key=version_of)
    return old


def _shared(compiler: list[str], path: Path, source: str, script: str = "") -> str:
    """A shared object of an assembly source, with its own name as SONAME."""
    assembly = path.with_suffix(".s")
    assembly.write_text(source + '.section .note.GNU-stack,"",@progbits\n')
    command = [*compiler, "-shared", "-nostdlib", "-o", str(path), str(assembly), f"-Wl,-soname,{path.name}"]
    if script:
        path.with_suffix(".map").write_text(script)
        command.append(f"-Wl,--version-script={path.with_suffix('.map')}")
    subprocess.run(command, check=True)
    return str(path)


def absent_libraries(compiler: list[str], folder: Path, names: tuple[str, ...]) -> list[str]:
    """Empty libraries: what is linked to them asks for the real ones, which torch has loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    return ["-Wl,--no-as-needed", *(_shared(compiler, folder / f"lib{name}.so", "") for name in names)]


def old_glibc(compiler: list[str], folder: Path) -> list[str]:
    """What to link behind all else, for versions of symbols as old as glibc 2.28 and GCC 8."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries: dict[str, dict[str, str]] = {}
    for library in ("libc.so.6", "libm.so.6"):
        path = subprocess.run(
            [*compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        listed = subprocess.run(
            ["nm", "-D", "--with-symbol-versions", "--defined-only", path],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name, version in older_versions(listed).items():
            home = next((home for start, home in HOMES if name.startswith(start)), library)
            libraries.setdefault(home, {})[name] = version
    made = []
    for library, symbols in libraries.items():
        source = "".join(
            f".globl old_{name}\n.type old_{name},@function\nold_{name}:\n"
            f".symver old_{name},{name}@@{version}\n"
            for name, version in symbols.items()
        )
        script = "".join(f"{version} {{}};\n" for version in sorted(set(symbols.values()), key=version_of))
        made.append(_shared(compiler, folder / library, source, script))
    source = folder / "shims.s"
    source.write_text(SHIMS + '.section .note.GNU-stack,"",@progbits\n')
    return [str(source), "-Wl,--as-needed", *made] if made else []
