"""Builds ringtile/_C.abi3.so: the C core as a static library, linked into one binding on torch's stable headers.

Where nvcc is, also ringtile/_cuda.abi3.so: the kernels of cuda/, under the same binding. Neither a GPU nor a torch with
CUDA is needed for that. RINGTILE_CUDA=0 leaves it out, RINGTILE_CUDA=1 refuses to build without it.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from setuptools import Extension, setup

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
    "-ffunction-sections",  # what a shared object does not call is left out of it
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Werror",
]
BINDING_FLAGS = ["-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-Werror=all-warnings",
    "-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error",  # a kernel stays in its registers
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffunction-sections,-Wall,-Wextra,-Werror",
]
WAITS = "Potential Performance Loss"  # so ptxas remarks that products of a warp group wait for each other
# Machine code for A100, RTX 30, RTX 40 and H100, and PTX for what comes after them; *_sm90*.cu are for H100 alone.
SM_90A = "-gencode=arch=compute_90a,code=sm_90a"
ALL_ARCHS = ["-gencode=arch=compute_80,code=[sm_80,sm_86,sm_89,compute_80]", SM_90A]
core_sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.c"))
core_headers = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.h"))
cuda_files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("cuda/**/*.*"))


def find_nvcc() -> str | None:
    """The nvcc of CUDA_HOME, or else of PATH; None: leave the CUDA kernels out."""
    wanted = os.environ.get("RINGTILE_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        refuse(f"RINGTILE_CUDA is {wanted!r}; expected 0 (CPU only), 1 (CPU and CUDA), or auto (CUDA where nvcc is).")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = (home and shutil.which("nvcc", path=os.path.join(home, "bin"))) or shutil.which("nvcc")
    if not nvcc and wanted == "1":
        refuse("RINGTILE_CUDA is 1, but nvcc is neither in CUDA_HOME nor on PATH. Install the CUDA toolkit (>= 12.4).")
    return nvcc or None


def compile_cuda(nvcc: str) -> list[str]:
    """The objects of cuda/**/*.cu; those whose files have changed are compiled anew, on all cores."""
    outdated = []
    objects = []
    for source in cuda_files:
        if not source.endswith(".cu"):
            continue
        target = ROOT / "build" / pathlib.Path(source).with_suffix(".o")
        objects.append(str(target))
        needed = target.with_suffix(".d")  # "object : file file ...", lines ending in a backslash
        files = needed.read_text().replace("\\\n", " ").split()[2:] if needed.exists() else []
        files = [*files, __file__]
        if not target.exists() or not needed.exists() or is_older(target, files):
            target.parent.mkdir(parents=True, exist_ok=True)
            archs = [SM_90A] if "_sm90" in target.stem else ALL_ARCHS
            outdated.append([nvcc, *NVCC_FLAGS, *archs, "-MD", "-MF", str(needed), "-c", source, "-o", str(target)])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for command, done in zip(outdated, pool.map(run_nvcc, outdated), strict=True):
            print(done.stdout, end="", file=sys.stderr)
            if done.returncode != 0 or WAITS in done.stdout:
                pathlib.Path(command[-1]).unlink(missing_ok=True)
                refuse(f"nvcc failed: {' '.join(command)}")
    return objects


def run_nvcc(command: list[str]) -> subprocess.CompletedProcess[str]:
    """With what it and ptxas say, in stdout."""
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def is_older(target: pathlib.Path, files: list[str]) -> bool:
    """Whether one of the files is newer than the target, or gone."""
    paths = [ROOT / file for file in files]
    return any(not path.exists() or path.stat().st_mtime > target.stat().st_mtime for path in paths)


def cuda_library_dirs(nvcc: str) -> list[str]:
    """Where the CUDA toolkit of an nvcc keeps its libraries, as that nvcc says."""
    said = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    libraries = next((line for line in said.splitlines() if line.startswith("#$ LIBRARIES=")), "")
    return re.findall(r'"-L([^"]+)"', libraries)


def extension(name: str, sources: list[str], **more: list[str]) -> Extension:
    """One shared object of the package: a binding, and what of the C core it calls."""
    return CppExtension(
        f"ringtile.{name}",
        sources,
        include_dirs=[str(ROOT / "csrc"), str(ROOT / "cuda")],
        depends=[*core_sources, *core_headers, "csrc/bindings.cpp", *more.pop("depends", [])],
        define_macros=[("TORCH_TARGET_VERSION", TARGET_VERSION)],
        extra_compile_args=BINDING_FLAGS,
        extra_link_args=["-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", *more.pop("extra_link_args", [])],
        py_limited_api=True,
        **more,
    )


class BuildExtensions(BuildExtension):
    """Compiles what is CUDA with nvcc, before the extensions are built."""

    def build_extensions(self) -> None:
        for ext in self.extensions:
            if ext.name == "ringtile._cuda":
                ext.extra_objects = compile_cuda(NVCC)
        super().build_extensions()


NVCC = find_nvcc()
extensions = [extension("_C", ["csrc/bindings.cpp", "csrc/plan_bindings.cpp"])]
if NVCC:
    extensions.append(
        extension(
            "_cuda",
            ["cuda/bindings.cpp"],
            depends=cuda_files,
            library_dirs=cuda_library_dirs(NVCC),
            libraries=["cudart_static", "dl", "rt", "pthread"],
            # libtorch.so brings libtorch_cuda.so where torch has it; nothing here names a symbol of either.
            extra_link_args=["-Wl,--no-as-needed,-ltorch"],
        )
    )

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
    ext_modules=extensions,
    cmdclass={"build_ext": BuildExtensions.with_options(use_ninja=False)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
