"""Builds the package's shared objects. Each links what it needs from one static library, the C code of csrc/.

    ringtile._C      the ops on CPU tensors
    ringtile._cuda   the ops on CUDA tensors; building it needs nvcc, and neither a GPU nor a torch with CUDA

Environment, read here and nowhere else in the build (setuptools reads CC and CXX as well):

    CC, CXX          the compilers; nvcc uses CXX too
    CUDA_HOME        where to look for nvcc before PATH, and /usr/local/cuda after it
    RINGTILE_CUDA    0: leave the CUDA kernels out, which take minutes to compile; 1: fail without nvcc; auto, the
                     default: build them where nvcc is and torch has CUDA
    RINGTILE_CUDA_ARCHS  the GPUs to compile for, by compute capability: "80;90a". all, the default, is the list of all
                     that are known here and to nvcc (100 and 120 from CUDA 12.8 on); one, as in `make test`, is 80, in
                     a fifth of the time. 80 adds PTX, which a GPU that is not in the list compiles when it first runs a
                     kernel; without 80 such a GPU has no kernels
    RINGTILE_WERROR  1: every warning fails the build, ptxas' included. The Makefile sets it; an installation does not,
                     so that a newer compiler with a new warning still installs
"""

from __future__ import annotations

import concurrent.futures
import filecmp
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib

ROOT = pathlib.Path(__file__).parent
MIN_TORCH = (2, 11)
TARGET_VERSION = "0x020b000000000000"  # TORCH_TARGET_VERSION: the oldest torch the binaries run on, 2.11


def refuse(message: str) -> None:
    """Ends the build with one clear line instead of a page of compiler output."""
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


def setting(variable: str, default: str, meanings: dict[str, str]) -> str:
    """The value of an environment variable that takes one of a few values."""
    value = os.environ.get(variable) or default
    if value not in meanings:
        expected = ", ".join(f"{known} ({meaning})" for known, meaning in meanings.items())
        refuse(f"{variable} is {value!r}; expected one of {expected}.")
    return value


CC = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
CXX = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()
CUDA_HOME = os.environ.get("CUDA_HOME")
USUAL_NVCC_FOLDER = "/usr/local/cuda/bin"  # of Linux packages and images, often not on PATH
NO_NVCC = f"nvcc is neither in CUDA_HOME nor on PATH nor in {USUAL_NVCC_FOLDER}"
CUDA = setting(
    "RINGTILE_CUDA", "auto", {"0": "CPU only", "1": "CPU and CUDA", "auto": "CUDA where nvcc is and torch has CUDA"}
)
KNOWN_ARCHS = {
    "80": "A100",
    "86": "A10, RTX 30",
    "89": "L4, RTX 40",
    "90a": "H100, H200",
    "100": "B200",
    "120": "RTX 50",
}


def cuda_archs(value: str) -> list[str]:
    """The architectures that RINGTILE_CUDA_ARCHS asks for, in the order of KNOWN_ARCHS."""
    value = {"": ";".join(KNOWN_ARCHS), "all": ";".join(KNOWN_ARCHS), "one": "80"}.get(value, value)
    asked = [arch.strip() for arch in value.split(";")]
    for arch in asked:
        if arch not in KNOWN_ARCHS:
            known = ", ".join(f"{known} ({gpus})" for known, gpus in KNOWN_ARCHS.items())
            refuse(
                f"RINGTILE_CUDA_ARCHS names {arch!r}; expected all, one (which is 80, quick to compile), or some of "
                f"{known}, separated by semicolons."
            )
    return [arch for arch in KNOWN_ARCHS if arch in asked]


ARCHS = cuda_archs(os.environ.get("RINGTILE_CUDA_ARCHS", ""))
STRICT = setting("RINGTILE_WERROR", "0", {"0": "warnings are printed", "1": "warnings fail the build"}) == "1"


def without_unknown(archs: list[str], nvcc: str) -> list[str]:
    """The architectures without those that an older nvcc lacks: PTX serves these GPUs."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    return [arch for arch in archs if arch not in ("100", "120") or f"sm_{arch}" in listed]


def check_toolchain() -> None:
    """Tries a one-line C file, and a one-line C++ file with Python's header, before the real build does."""
    empty_main = "int main(void) { return 0; }"
    python_h = "Python's headers (Python.h; on Debian and Ubuntu: apt-get install python3-dev)"
    probes = (
        ("CC", CC, ".c", empty_main, "-std=c17", "a C17 compiler"),
        ("CXX", CXX, ".cpp", empty_main, "-std=c++20", "a C++20 compiler"),
        ("CXX", CXX, ".cpp", "#include <Python.h>\n", "-std=c++20", python_h),
    )
    for variable, compiler, suffix, text, standard, what in probes:
        if shutil.which(compiler[0]) is None:
            refuse(
                f"{what} is missing: {compiler[0]} is not on PATH. Install one (gcc and g++, or clang) or name it in "
                f"{variable}."
            )
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "probe" + suffix)
            source.write_text(text)
            include = "-I" + sysconfig.get_paths()["include"]
            done = subprocess.run(
                [*compiler, standard, include, "-c", source.name, "-o", "probe.o"],
                cwd=folder,
                capture_output=True,
                text=True,
            )
        if done.returncode != 0:
            reason = next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
            refuse(f"{what} is needed; a test compile failed with: {reason}")


if any(
    command in sys.argv
    for command in ("build", "build_ext", "build_clib", "bdist_wheel", "editable_wheel", "develop", "install")
):
    check_toolchain()

WERROR = ["-Werror"] if STRICT else []
# What an exploit of a bug would have to get past (docs/design/threats.md). Checks run once a call, not in loops.
HARDENING = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
HARDENED_LINK = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
C_FLAGS = [
    "-std=c17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffunction-sections",  # the linker drops functions that a shared object does not call
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    *HARDENING,
    *WERROR,
]
BINDING_FLAGS = ["-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", *HARDENING, *WERROR]
NVCC_FLAGS = [
    f"-ccbin={CXX[0]}",
    "-std=c++17",
    "-O3",
    "-lineinfo",  # profilers and sanitizers name source lines; the code stays the same
    "-Xptxas=--warn-on-spills,--warn-on-local-memory-usage",  # a kernel stays in its registers
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffunction-sections,-Wall,-Wextra," + ",".join(HARDENING),
    *(["-Werror=all-warnings", "-Xptxas=--warning-as-error", "-Xcompiler=-Werror"] if STRICT else []),
]
# ptxas only remarks, and never warns, that it serialized the wgmma products of a warp group.
SERIALIZED = "Potential Performance Loss"
core_sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.c"))
core_headers = sorted(str(path.relative_to(ROOT)) for kind in ("h", "inc") for path in ROOT.glob(f"csrc/**/*.{kind}"))
cuda_files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("cuda/**/*.*"))


def find_nvcc() -> str | None:
    """The nvcc of CUDA_HOME, PATH or /usr/local/cuda, the first there is; None leaves the CUDA kernels out."""
    if CUDA == "0" or (CUDA == "auto" and torch.version.cuda is None):
        return None
    in_home = CUDA_HOME and shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin"))
    nvcc = in_home or shutil.which("nvcc") or shutil.which("nvcc", path=USUAL_NVCC_FOLDER)
    reason = why_not_nvcc(nvcc) if nvcc else NO_NVCC
    if not reason:
        return nvcc
    if CUDA == "1":
        refuse(f"RINGTILE_CUDA is 1, but {reason}. Install the CUDA toolkit (>= 12.4), with a compiler that it takes.")
    print(
        f"ringtile: built without its CUDA kernels: {reason}. On a GPU, slower torch operations run instead",
        file=sys.stderr,
    )
    return None


def why_not_nvcc(nvcc: str) -> str:
    """What a test compile for the newest code that the build always has says: an old nvcc, or a compiler too new."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "probe.cu").write_text("__global__ void probe() {}\n")
        command = [nvcc, *NVCC_FLAGS, *arch_flags(["90a"]), "-c", "probe.cu", "-o", "probe.o"]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    said = next((line for line in lines if "error" in line), lines[0])
    return f"a test compile by {nvcc} with {CXX[0]} failed ({said})" if done.returncode != 0 else ""


def compile_cuda(nvcc: str) -> list[str]:
    """Compiles cuda/**/*.cu, on all cores, and returns the objects. Unchanged files keep the object they have."""
    outdated = []
    objects = []
    for source in cuda_files:
        if not source.endswith(".cu"):
            continue
        archs = ["90a"] if "_sm90" in source else ARCHS  # *_sm90*.cu are for it alone, and always there to be linked
        target = ROOT / "build" / pathlib.Path(source).with_suffix(f".{'_'.join(archs)}.o")
        objects.append(str(target))
        needed = target.with_suffix(".d")  # "object : file file ...", lines ending in a backslash
        files = needed.read_text().replace("\\\n", " ").split()[2:] if needed.exists() else []
        files = [*files, __file__]
        if not target.exists() or not needed.exists() or is_older(target, files):
            target.parent.mkdir(parents=True, exist_ok=True)
            outputs = ["-MD", "-MF", str(needed), "-c", source, "-o", str(target)]
            outdated.append([nvcc, *NVCC_FLAGS, *arch_flags(archs), *outputs])
    if outdated:
        print(
            f"ringtile: nvcc compiles {len(outdated)} files for {', '.join(ARCHS)}, which takes minutes. "
            "RINGTILE_CUDA=0 leaves the CUDA kernels out; RINGTILE_CUDA_ARCHS=90a, say, compiles for one kind of GPU.",
            file=sys.stderr,
            flush=True,
        )
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for command, done in zip(outdated, pool.map(run_nvcc, outdated), strict=True):
            print(done.stdout, end="", file=sys.stderr)
            if done.returncode != 0:
                refuse(f"nvcc failed: {' '.join(command)}")
    return objects


def arch_flags(archs: list[str]) -> list[str]:
    """nvcc's flags for machine code of these architectures, and with 80 for PTX."""
    # With code of several architectures of one PTX, ptxas alone runs again for each.
    from_80 = [f"sm_{arch}" for arch in archs if arch != "90a"] + (["compute_80"] if "80" in archs else [])
    flags = [f"-gencode=arch=compute_80,code=[{','.join(from_80)}]"] if from_80 else []
    return [*flags, *(["-gencode=arch=compute_90a,code=sm_90a"] if "90a" in archs else [])]


def archs_of_binary() -> str:
    """A file that changes with the architectures; no source does, and an unchanged binary is not linked again."""
    file = ROOT / "build" / "cuda" / "archs"
    if not file.exists() or file.read_text() != ";".join(ARCHS):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(";".join(ARCHS))
    return str(file)


def run_nvcc(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs nvcc; stdout holds all that it and ptxas print. If it fails, also for a remark in a strict build, no object
    is left that the next build would take for a good one."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0 and STRICT and SERIALIZED in done.stdout:
        done.returncode = 1
    if done.returncode != 0:
        pathlib.Path(command[-1]).unlink(missing_ok=True)
    return done


def is_older(target: pathlib.Path, files: list[str]) -> bool:
    """Whether one of the files is newer than the target, or gone."""
    paths = [ROOT / file for file in files]
    return any(not path.exists() or path.stat().st_mtime > target.stat().st_mtime for path in paths)


def cuda_library_dirs(nvcc: str) -> list[str]:
    """The library folders of nvcc's own toolkit, from a dry run of it."""
    printed = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    libraries = next((line for line in printed.splitlines() if line.startswith("#$ LIBRARIES=")), "")
    return re.findall(r'"-L([^"]+)"', libraries)


def extension(name: str, sources: list[str], **more: list[str]) -> Extension:
    """One shared object of the package: a binding, and the parts of the C core that it calls."""
    return CppExtension(
        f"ringtile.{name}",
        sources,
        include_dirs=[str(ROOT / "csrc"), str(ROOT / "cuda")],
        depends=[__file__, *core_sources, *core_headers, "csrc/torch/kernels.cpp", *more.pop("depends", [])],
        define_macros=[("TORCH_TARGET_VERSION", TARGET_VERSION)],
        extra_compile_args=BINDING_FLAGS,
        extra_link_args=[
            "-Wl,--exclude-libs,ALL",
            "-Wl,--gc-sections",
            "-lgcc",  # static: libgcc_s.so has the conversions of f16 only since GCC 12, newer than many systems'
            *HARDENED_LINK,
            *more.pop("extra_link_args", []),
        ],
        py_limited_api=True,
        **more,
    )


def on_all_cores(compile_files: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The compile method of a setuptools compiler, one file a thread."""

    def compile_each(sources: list[str], *args: Any, **options: Any) -> list[str]:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = pool.map(lambda source: compile_files([source], *args, **options), sources)
            return [name for names in objects for name in names]

    return compile_each


class BuildCore(build_clib):
    def build_libraries(self, libraries: list[Any]) -> None:
        self.compiler.compile = on_all_cores(self.compiler.compile)
        super().build_libraries(libraries)


class BuildExtensions(BuildExtension):
    """Compiles the CUDA kernels with nvcc before the extensions are linked."""

    def build_extensions(self) -> None:
        self.compiler.compile = on_all_cores(self.compiler.compile)
        for ext in self.extensions:
            if ext.name == "ringtile._cuda":
                ext.extra_objects = compile_cuda(NVCC)
                ext.depends = [*ext.depends, archs_of_binary()]
        super().build_extensions()

    def copy_file(self, infile: str, outfile: str, *args: object, **options: object) -> tuple[str, bool]:
        """An unchanged binary keeps its file: a process may be loading it while another one is built."""
        if os.path.isfile(outfile) and filecmp.cmp(infile, outfile, shallow=False):
            return outfile, False
        return super().copy_file(infile, outfile, *args, **options)


NVCC = find_nvcc()
if NVCC and os.environ.get("RINGTILE_CUDA_ARCHS", "") in ("", "all"):
    ARCHS = without_unknown(ARCHS, NVCC)
extensions = [
    extension("_C", [f"csrc/torch/{name}.cpp" for name in ("kernels", "scan", "sequence", "shared_memory")]),
]
if NVCC:
    extensions.append(
        extension(
            "_cuda",
            ["cuda/torch/kernels.cpp"],
            depends=cuda_files,
            library_dirs=cuda_library_dirs(NVCC),
            libraries=["cudart_static", "dl", "rt", "pthread"],
            # libtorch.so loads libtorch_cuda.so where torch has one; the linker sees no symbol of either in use.
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
    cmdclass={"build_clib": BuildCore, "build_ext": BuildExtensions.with_options(use_ninja=False)},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
