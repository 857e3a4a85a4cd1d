"""Makes the linker bind to an older glibc's symbols, so that a wheel linked here runs on older systems.

    python older_glibc.py FOLDER 2.28    fills FOLDER and prints the linker flags (LDFLAGS) that use it

glibc keeps old versions of its symbols for old binaries, but a linker always binds to the newest: pthread_create, for
example, is GLIBC_2.34 since it moved into libc.so.6, and GLIBC_2.2.5 before. This script writes stub libraries: symbol
tables without code, which offer what has a newer version in the version that the older glibc has, in the library that
has it there. A binary linked against them is what a linker on that system would have made, and the running glibc, old
or new, provides the code. `auditwheel` checks the result.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

# Where symbols of libc.so.6 were before glibc 2.34; of others with a newer version it is not known here.
FORMER_HOMES = {"libpthread.so.0": r"pthread_|sem_", "libdl.so.2": r"dl", "librt.so.1": r"aio_|lio_|mq_|shm_|timer_"}
# libstdc++'s headers read it since glibc 2.32; 0 says that there may be several threads, which is always safe.
SINGLE_THREADED = """
    .section .rodata
    .globl __libc_single_threaded
    .hidden __libc_single_threaded
    .type __libc_single_threaded, %object
    .size __libc_single_threaded, 1
__libc_single_threaded:
    .byte 0
    .section .note.GNU-stack, "", %progbits
"""
CC = (os.environ.get("CC") or "cc").split()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def older_versions(library: str, oldest: str) -> tuple[dict[str, str], set[str]]:
    """The version that `oldest` has of each function of a library, and the functions with a newer version."""
    newer, older = set(), dict[str, str]()
    path = run(*CC, f"-print-file-name={library}").strip()
    symbols = run("nm", "-D", "--with-symbol-versions", path)
    for name, version in re.findall(r" [TWi] (\w+)@@?GLIBC_([0-9.]+)$", symbols, re.M):
        if as_numbers(version) > as_numbers(oldest):
            newer.add(name)
        elif as_numbers(version) > as_numbers(older.get(name, "0")):
            older[name] = version
    return older, newer


def write_stub(folder: pathlib.Path, library: str, symbols: dict[str, str]) -> str:
    """Links a library that offers these symbols in these versions; returns its path."""
    assembly, versions = folder / f"{library}.s", folder / f"{library}.map"
    assembly.write_text("".join(f".globl {name}\n.type {name}, %function\n{name}:\n" for name in symbols))
    names: dict[str, list[str]] = {}
    for name, version in symbols.items():
        names.setdefault(version, []).append(f"{name};")
    versions.write_text("".join(f"GLIBC_{version} {{ {' '.join(names[version])} }};\n" for version in names))
    output = str(folder / library)
    run(*CC, "-shared", "-nostdlib", f"-Wl,-soname,{library},--version-script={versions}", str(assembly), "-o", output)
    return output


def main(folder: pathlib.Path, oldest: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    older, newer = older_versions("libc.so.6", oldest)
    moved = {name: version for name, version in sorted(older.items()) if name in newer}
    stubs = {
        home: {name: moved[name] for name in moved if re.match(names, name)} for home, names in FORMER_HOMES.items()
    }
    # All of libm: a linker reads only the first library of a name, so the stub hides the real one.
    stubs["libm.so.6"], _ = older_versions("libm.so.6", oldest)
    single_threaded = folder / "single_threaded.s"
    single_threaded.write_text(SINGLE_THREADED)
    libraries = [write_stub(folder, library, symbols) for library, symbols in stubs.items() if symbols]
    # A linker takes a symbol from the first library that has it. Setuptools puts these flags before any object, so no
    # symbol is missing yet, and --as-needed, the default of some compilers, would pass over the libraries.
    print(single_threaded, "-Wl,--push-state,--no-as-needed", *libraries, "-Wl,--pop-state")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute(), sys.argv[2])
