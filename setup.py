"""Builds ringtile/_C.abi3.so: the C core as a static library, linked into one binding on torch's stable headers."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from setuptools import setup

ROOT = pathlib.Path(__file__).parent
MIN_TORCH = (2, 11)
TARGET_VERSION = "0x020b000000000000"  # TORCH_TARGET_VERSION: the oldest torch the binary runs on, 2.11


def refuse(message: str) -> None:
    """One clear line instead of a page of compiler output."""
    sys.exit(f"ringtile: cannot build: {message}")


try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    refuse(
        "torch is not installed. Install it first (pip install 'torch>=2.11'), then run pip with --no-build-isolation."
    )
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
    refuse(f"torch {torch.__version__} is too old, expected >= {MIN_TORCH[0]}.{MIN_TORCH[1]}.")


def check_toolchain() -> None:
    """Tries a one-line C file, and a one-line C++ file with Python's header, before the real build does."""
    probes = (
        (
            "CC",
            sysconfig.get_config_var("CC") or "cc",
            ".c",
            "int main(void) { return 0; }",
            "-std=c17",
            "a C17 compiler",
        ),
        (
            "CXX",
            sysconfig.get_config_var("CXX") or "c++",
            ".cpp",
            "int main() { return 0; }",
            "-std=c++20",
            "a C++20 compiler",
        ),
        (
            "CXX",
            sysconfig.get_config_var("CXX") or "c++",
            ".cpp",
            "#include <Python.h>\n",
            "-std=c++20",
            "Python's headers (Python.h; on Debian and Ubuntu: apt-get install python3-dev)",
        ),
    )
    for variable, default, suffix, text, standard, what in probes:
        command = os.environ.get(variable, default).split()
        if shutil.which(command[0]) is None:
            refuse(f"{what} is missing: {command[0]} is not on PATH. Install one (gcc, g++) or name it in {variable}.")
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "probe" + suffix)
            source.write_text(text)
            include = "-I" + sysconfig.get_paths()["include"]
            done = subprocess.run(
                [*command, standard, include, "-c", source.name, "-o", "probe.o"],
                cwd=folder,
                capture_output=True,
                text=True,
            )
        if done.returncode != 0:
            reason = next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
            refuse(f"{what} is needed; trying it gave: {reason}")


if any(
    command in sys.argv
    for command in ("build", "build_ext", "build_clib", "bdist_wheel", "editable_wheel", "develop", "install")
):
    check_toolchain()

C_FLAGS = [
    "-std=c17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Werror",
]
core_sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.c"))
core_headers = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.h"))

setup(
    libraries=[
        (
            "ringtile_core",
            {
                "sources": core_sources,
                "cflags": C_FLAGS,
                "include_dirs": ["csrc"],
                "obj_deps": {"": core_headers},
            },
        )
    ],
    ext_modules=[
        CppExtension(
            "ringtile._C",
            ["csrc/bindings.cpp"],
            include_dirs=[str(ROOT / "csrc")],
            depends=[*core_sources, *core_headers],
            define_macros=[("TORCH_TARGET_VERSION", TARGET_VERSION)],
            extra_compile_args=[
                "-O2",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-Wno-unused-parameter",
            ],
            extra_link_args=["-Wl,--exclude-libs,ALL"],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
