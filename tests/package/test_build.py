"""setup.py refuses what it cannot build in one clear line, before any compiler output, and knows strict builds from
lax ones; the binaries need only stable symbols."""

from __future__ import annotations

import ast
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import sys

import pytest
import ringtile
from pool import run_program
from ringtile.errors import EXTRAS
from ringtile.hf import trainers
from setuptools._distutils.filelist import FileList

PACKAGE = pathlib.Path(ringtile.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]


def run_setup(before: str = "", folder: pathlib.Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `setup.py build_ext`, after some Python that breaks its surroundings."""
    program = f"""{before}
import runpy, sys
sys.argv = ["setup.py", "build_ext"]
runpy.run_path("setup.py", run_name="__main__")
"""
    return run_program(program, folder, **environment)


def assert_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode != 0
    # A torch with CUDA says a line of its own where there is no GPU.
    lines = [line for line in done.stderr.strip().splitlines() if "No CUDA runtime is found" not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("ringtile: cannot build: ")
    assert message in lines[0]


REFUSED: dict[str, tuple[str, dict[str, str], str]] = {  # Python before setup.py, environment, what is said
    "no torch": ("import sys; sys.modules['torch'] = None", {}, "torch is not installed"),
    "old torch": ("import torch; torch.__version__ = '2.9.1'", {}, "torch 2.9.1 is too old"),
    "no CC": ("", {"CC": "no-such-compiler"}, "no-such-compiler is not on PATH"),
    "no CXX": ("", {"CXX": "no-such-compiler"}, "no-such-compiler is not on PATH"),
    "no nvcc": (
        "import shutil; which = shutil.which; "
        "shutil.which = lambda name, **at: None if name == 'nvcc' else which(name, **at)",
        {"RINGTILE_CUDA": "1"},
        "nvcc is neither in CUDA_HOME nor on PATH nor in /usr/local/cuda/bin",
    ),
    "CUDA": ("", {"RINGTILE_CUDA": "yes"}, "RINGTILE_CUDA is 'yes'; expected one of 0 ("),
    "WERROR": ("", {"RINGTILE_WERROR": "yes"}, "RINGTILE_WERROR is 'yes'; expected one of 0 ("),
    "architectures": (
        "",
        {"RINGTILE_CUDA_ARCHS": "80;75;90a"},
        "RINGTILE_CUDA_ARCHS names '75'; expected all, one (which is 80, quick to compile), or some of 80 (A100), ",
    ),
}
OF_EVERY_RUN = ("no torch", "no CC", "CUDA", "architectures")  # the others end in the same lines of setup.py


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in OF_EVERY_RUN)) for name in REFUSED]
)
def test_build_is_refused_in_one_line(name: str) -> None:
    before, environment, message = REFUSED[name]
    assert_refused(run_setup(before, **environment), message)


@pytest.mark.long  # packaging
def test_compiler_without_python_headers_is_one_line(tmp_path: pathlib.Path) -> None:
    """The compiler fails on any file that includes Python.h, as on a machine without python3-dev."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ngrep -qs Python.h probe.cpp && { echo "no Python.h" >&2; exit 1; }\nexec c++ "$@"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    assert_refused(run_setup(CXX=str(compiler)), "Python's headers")


def test_cuda_kernels_follow_torch(tmp_path: pathlib.Path) -> None:
    """nvcc alone does not cost a user of torch for CPUs minutes; a torch with CUDA, or RINGTILE_CUDA=1, does."""
    copy_with_fake_nvcc(tmp_path)
    cases = [("auto", None), ("auto", "13.0"), ("1", None), ("0", "13.0")]
    found = "(find_nvcc.__globals__.update(CUDA=choice), setattr(torch.version, 'cuda', cuda), bool(find_nvcc()))[2]"
    done = evaluate_in_setup(f"[{found} for choice, cuda in {cases}]", tmp_path, CUDA_HOME=str(tmp_path))
    assert eval(done.stdout.splitlines()[-1]) == [False, True, True, False]


def test_an_nvcc_that_cannot_compile_leaves_the_kernels_out(tmp_path: pathlib.Path) -> None:
    """With a reason: too old, or for an older compiler. Where the kernels were asked for, the build is refused."""
    nvcc = copy_with_fake_nvcc(tmp_path)
    nvcc.write_text('#!/bin/sh\necho "$@" >&2\necho "error: unsupported GNU version! gcc 15" >&2\nexit 1\n')
    found = "(find_nvcc.__globals__.update(CUDA='auto'), setattr(torch.version, 'cuda', '12.8'), find_nvcc())[2]"
    done = evaluate_in_setup(found, tmp_path, CUDA_HOME=str(tmp_path), CXX="c++")
    assert done.stdout.splitlines()[-1] == "None"
    assert f"a test compile by {nvcc} with c++ failed (error: unsupported GNU version! gcc 15)" in done.stderr
    refused = run_setup("", tmp_path, CUDA_HOME=str(tmp_path), RINGTILE_CUDA="1")
    assert_refused(refused, "RINGTILE_CUDA is 1, but a test compile by ")


def test_nvcc_is_looked_for_where_toolkits_are(tmp_path: pathlib.Path) -> None:
    """CUDA_HOME before PATH before the usual folder; without any, the build says what it leaves out."""
    places = {}
    for name in ("home", "path", "usual"):
        places[name] = copy_with_fake_nvcc(tmp_path / name).parent
    found = (
        "(find_nvcc.__globals__.update(CUDA='auto', USUAL_NVCC_FOLDER=usual, CUDA_HOME=home), "
        "setattr(torch.version, 'cuda', '13.0'), os.environ.update(PATH=path), find_nvcc())[3]"
    )
    home, path, usual, none = str(tmp_path / "home"), *(str(places[name]) for name in ("path", "usual")), "/nowhere"
    cases = [(home, path, usual), (None, path, usual), (None, none, usual), (None, none, none)]
    done = evaluate_in_setup(f"[{found} for home, path, usual in {cases}]", tmp_path / "home", CUDA_HOME=home)
    expected = [*(str(places[name] / "nvcc") for name in ("home", "path", "usual")), None]
    assert eval(done.stdout.splitlines()[-1]) == expected
    assert "ringtile: built without its CUDA kernels: nvcc is neither in CUDA_HOME nor on PATH nor in" in done.stderr


FAKE_NVCC = """#!/bin/sh
for last; do :; done
: >> "$last" && echo "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"
"""


def copy_with_fake_nvcc(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the sources, and an nvcc whose ptxas remarks that it serialized products; returns the nvcc."""
    for part in ("csrc", "cuda"):
        shutil.copytree(ROOT / part, folder / part)
    shutil.copy(ROOT / "setup.py", folder)
    (folder / "bin").mkdir()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return nvcc


def test_strict_build_fails_on_products_that_ptxas_serializes(tmp_path: pathlib.Path) -> None:
    """ptxas only remarks on it and exits with 0, so its output is read; the object is removed."""
    copy_with_fake_nvcc(tmp_path)
    done = run_setup("", tmp_path, CUDA_HOME=str(tmp_path), RINGTILE_CUDA="1", RINGTILE_WERROR="1")
    assert done.returncode != 0
    assert "(C7512)" in done.stderr
    assert "ringtile: cannot build: nvcc failed" in done.stderr
    assert list((tmp_path / "build" / "cuda").rglob("*.o")) == []


def evaluate_in_setup(
    expression: str, folder: pathlib.Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Prints an expression of setup.py's own names, without building anything."""
    program = f"""
import runpy, sys
sys.argv = ["setup.py", "--version"]
print(eval({expression!r}, runpy.run_path("setup.py")))
"""
    done = run_program(program, folder, **environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long  # packaging; of every run is that strict builds fail on such remarks
def test_user_build_says_what_takes_minutes_and_only_prints_ptxas_remarks(tmp_path: pathlib.Path) -> None:
    nvcc = copy_with_fake_nvcc(tmp_path)
    done = evaluate_in_setup(f"compile_cuda({str(nvcc)!r})", tmp_path, RINGTILE_CUDA="0", RINGTILE_WERROR="0")
    before_nvcc = next(line for line in done.stderr.splitlines() if line.startswith("ringtile: "))
    assert "takes minutes. RINGTILE_CUDA=0 leaves the CUDA kernels out" in before_nvcc
    assert done.stderr.index(before_nvcc) < done.stderr.index("(C7512)")
    assert "(C7512)" in done.stderr
    assert len(list((tmp_path / "build" / "cuda").rglob("*.o"))) == len(list((tmp_path / "cuda").rglob("*.cu"))) > 0


def test_warnings_fail_strict_builds_only() -> None:
    """make sets RINGTILE_WERROR=1; without it the same sources get the same flags, minus the refusals."""
    expression = "[C_FLAGS, BINDING_FLAGS, NVCC_FLAGS]"
    strict, lax = (
        eval(evaluate_in_setup(expression, RINGTILE_CUDA="0", RINGTILE_WERROR=value).stdout.splitlines()[-1])
        for value in ("1", "")
    )
    refusals = (["-Werror"], ["-Werror"], ["-Werror=all-warnings", "-Xptxas=--warning-as-error", "-Xcompiler=-Werror"])
    for with_refusal, without, added in zip(strict, lax, refusals, strict=True):
        assert with_refusal == [*without, *added]
        assert "-Wall" in ",".join(without)
    rules = (ROOT / "Makefile").read_text()
    assert "STRICT := RINGTILE_WERROR=1" in rules
    builds = [line for line in rules.splitlines() if "RINGTILE_CUDA=" in line and "RT_ISA_MODEL" not in line]
    assert len(builds) == 4
    assert all("$(STRICT)" in line for line in builds)


@pytest.mark.long  # packaging; of every run is that unknown ones are refused
def test_architectures_of_a_build_are_a_list(tmp_path: pathlib.Path) -> None:
    """nvcc's flags follow the list; 80 brings PTX for GPUs beyond it; another list links the binary again."""
    copy_with_fake_nvcc(tmp_path)
    lists = ("", "all", "one", "80", "90a;80", " 86 ; 89", "90a", "120;100")
    stamp = "(ARCHS.clear(), ARCHS.append(arch), archs_of_binary(), open(archs_of_binary()).read())[3]"
    expression = f"[[arch_flags(cuda_archs(value)) for value in {lists}], [{stamp} for arch in ('80', '89')]]"
    done = evaluate_in_setup(expression, tmp_path, RINGTILE_CUDA="0", RINGTILE_CUDA_ARCHS="")
    flags, stamps = eval(done.stdout.splitlines()[-1])
    every, only_90a = (
        "-gencode=arch=compute_80,code=[sm_80,sm_86,sm_89,sm_100,sm_120,compute_80]",
        "-gencode=arch=compute_90a,code=sm_90a",
    )
    blackwell = "-gencode=arch=compute_80,code=[sm_100,sm_120]"
    only_80, newer = "-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_80,code=[sm_86,sm_89]"
    assert dict(zip(lists, flags, strict=True)) == {
        "": [every, only_90a],
        "all": [every, only_90a],
        "one": [only_80],
        "80": [only_80],
        "90a;80": [only_80, only_90a],
        " 86 ; 89": [newer],
        "90a": [only_90a],
        "120;100": [blackwell],
    }
    assert stamps == ["80", "89"]


def test_an_older_nvcc_leaves_the_newest_architectures_to_ptx(tmp_path: pathlib.Path) -> None:
    folder, compilers = copy_with_fake_nvcc(tmp_path).parent, []
    for listed in ("sm_80 sm_90a sm_100 sm_120", "sm_80 sm_90a sm_100", "sm_80"):
        compilers.append(str(folder / f"nvcc{len(compilers)}"))
        shutil.copy(folder / "nvcc", compilers[-1])  # which may be run
        pathlib.Path(compilers[-1]).write_text(f"#!/bin/sh\necho {listed}\n")
    expression = f"[without_unknown(cuda_archs('all'), nvcc)[4:] for nvcc in {compilers}]"
    done = evaluate_in_setup(expression, tmp_path, RINGTILE_CUDA="0", RINGTILE_CUDA_ARCHS="")
    assert eval(done.stdout.splitlines()[-1]) == [["100", "120"], ["100"], []]


# ---- the binaries --------------------------------------------------------------------------------

# Symbols of libc, libm, libgcc and libstdc++ carry versions, except for some templates of std.
VERSIONED = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+$")
STABLE = re.compile(r"^(aoti_torch_|torch_|Py|_Py|_ZN(K|KR|O)?St|_ITM_|__gmon_start__$)")
BINARIES = ("_C", pytest.param("_cuda", marks=pytest.mark.nvcc))


@pytest.mark.parametrize("name", BINARIES)
def test_binary_needs_stable_symbols_only(name: str) -> None:
    """One binary serves every torch and Python: it uses libtorch's C shims, the limited C API, and the runtimes. Old
    ones too: conversions of f16 are linked statically, since libgcc_s.so has them from GCC 12 on only."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", PACKAGE / f"{name}.abi3.so"], capture_output=True, text=True, check=True
    )
    symbols = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert [symbol for symbol in symbols if not VERSIONED.search(symbol) and not STABLE.match(symbol)] == []
    assert ("aoti_torch_get_current_cuda_stream" in symbols) == (name == "_cuda")
    assert {version for version in re.findall(r"@GCC_(\d+)", listed.stdout) if int(version) > 4} == set()


OLD_SYMBOLS = """
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
extern char __libc_single_threaded;
static void *run(void *unused) { return unused; }
double use(double x, pthread_t *thread) {
    pthread_create(thread, 0, run, dlopen("x", RTLD_LAZY));
    return pow(x, x) + tanh(x) + __libc_single_threaded; // tanh has had one version ever
}
"""


def test_wheel_binds_to_the_symbols_of_an_old_glibc(tmp_path: pathlib.Path) -> None:
    """It does as a linker with glibc 2.28 would: threads in libpthread, and no pow of 2.29."""
    (tmp_path / "old.c").write_text(OLD_SYMBOLS)
    script = [sys.executable, ROOT / "tools" / "wheel" / "older_glibc.py", tmp_path / "glibc", "2.28"]
    flags = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-z,defs", *flags, "old.c", "-lm", "-o", "old.so"], cwd=tmp_path, check=True
    )
    read = subprocess.run(
        ["readelf", "-Ws", "-V", "-d", tmp_path / "old.so"], capture_output=True, text=True, check=True
    )
    versions = [tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([0-9.]+)", read.stdout)]
    assert (2, 2) < max(versions) <= (2, 28)
    assert {"libpthread.so.0", "libdl.so.2", "libm.so.6"} <= set(re.findall(r"NEEDED.*\[(.*)\]", read.stdout))
    assert not re.search(r"UND .*__libc_single_threaded", read.stdout)


def test_sdist_holds_every_tracked_file() -> None:
    """setuptools' own choice leaves out the tests' helpers and the documentation, for example."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = listed.stdout.split()
    chosen = FileList()
    chosen.allfiles = tracked
    rules = (ROOT / "MANIFEST.in").read_text().splitlines()
    for rule in rules:
        if not rule.startswith("#"):
            chosen.process_template_line(rule)
    by_setuptools = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    left_out = {file for file in set(tracked) - set(chosen.files) if not file.startswith(("python/", "."))}
    assert left_out == by_setuptools


@pytest.mark.parametrize("name", BINARIES)
def test_binary_is_hardened_and_links_no_cuda_library(name: str) -> None:
    """Tables of addresses are read-only after loading (full RELRO), the stack holds no code and is guarded. libtorch.so
    loads libtorch_cuda.so where torch has one; the CUDA half uses one symbol of it."""
    binary = PACKAGE / f"{name}.abi3.so"
    read = subprocess.run(["readelf", "-lWd", "--dyn-syms", binary], capture_output=True, text=True, check=True).stdout
    segments = re.findall(r"^  (\w+) +0x\w+ 0x\w+ 0x\w+ 0x\w+ 0x\w+ ([RWE ]{3})", read, re.M)
    assert dict(segments)["GNU_STACK"].strip() == "RW"
    assert "GNU_RELRO" in dict(segments)
    assert [flags for kind, flags in segments if kind == "LOAD" and "W" in flags and "E" in flags] == []
    assert re.search(r"\(FLAGS\) +.*BIND_NOW", read), "addresses are bound lazily, so their table stays writable"
    assert re.search(r"UND __stack_chk_fail", read), "no function has a stack protector"
    needed = re.findall(r"NEEDED.*\[(.*)\]", read)
    assert not [library for library in needed if "cuda" in library]
    assert ("libtorch.so" in needed) == (name == "_cuda")


@pytest.mark.nvcc
def test_cuda_binary_registers_every_kernel() -> None:
    """The CUDA half has every kernel of the CPU half, but for masks and plans, which are the host's, and recurrences
    and weight gradients, for which ringtile uses torch there.

    It is loaded lazily, so no symbol is looked up.
    """
    program = """
import os, sys
sys.setdlopenflags(os.RTLD_LAZY)
import torch, ringtile._C, ringtile._cuda
has = torch._C._dispatch_has_kernel_for_dispatch_key
names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("ringtile::")}
print(sorted(name for name in names if has(name, "CPU") and not has(name, "CUDA")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    recurrences = ["causal_conv1d", "scan", "selective_scan"]
    recurrences += [f"{name}_backward" for name in recurrences]
    of_plans = ["balance", "layout_check", "mask_hulls", "pieces", "plan_counts", "plan_rank", "run_positions"]
    on_cpu_only = sorted(["digest", "weight_grad_add_", *of_plans, *recurrences])
    assert done.stdout.strip() == str([f"ringtile::{name}" for name in on_cpu_only])


def test_lowest_torch_is_one_version() -> None:
    lowest = re.search(r"^MIN_TORCH = \((\d+), (\d+)\)", (ROOT / "setup.py").read_text(), re.M)
    assert lowest is not None
    assert tuple(map(int, lowest.groups())) == ringtile.ops.MIN_TORCH
    assert len(re.findall(rf'"torch>={lowest[1]}\.{lowest[2]}[",]', (ROOT / "pyproject.toml").read_text())) == 2


# One start for all: torch takes seconds to import.
BARE = """
import os, sys
class Blocker:
    names = {"pydantic", "transformers", "accelerate", "yaml"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
import torch
if os.fork() == 0:
    torch.__version__ = "2.10.1+cpu"
    import ringtile
    try:
        ringtile.attention
    except ringtile.BuildError as error:
        print(error, "ringtile._C" in sys.modules, flush=True)
    os._exit(0)
os.wait()
if os.fork() == 0:
    def asked(*args): raise SystemExit("asked")
    for name in ("is_available", "device_count", "init", "current_device"): setattr(torch.cuda, name, asked)
    torch._C._cuda_getDeviceCount = asked
    import ringtile
    q, mask, layout = torch.ones(1, 4, 1, 8), ringtile.IntervalMask.causal(4), ringtile.Layout.contiguous(4, 1)
    ringtile.ring_attention(q, q, q, mask=mask, layout=layout)
    os._exit(0)
assert os.wait()[1] == 0

import ringtile, ringtile.cli.doctor, ringtile.cli.self_tests
ringtile.cli.self_tests.in_children = lambda device, num_cases: [""] * num_cases  # another process, which has them all
q = torch.ones(1, 4, 1, 8)
assert torch.equal(ringtile.attention(q, q, q, mask=ringtile.IntervalMask.causal(4)), q)
assert ringtile.cli.doctor.examine()["kernels"]["error"] is None

Blocker.names -= {"yaml"}
assert ringtile.Config().tile_tokens
for use in (lambda: ringtile.enable, lambda: __import__("ringtile.auto"), lambda: ringtile.tile_mlps):
    try:
        use()
    except ringtile.MissingPackageError as error:
        assert isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        print(error)
"""


def test_what_runs_without_other_packages_and_what_names_them() -> None:
    """Attention and the doctor need torch alone. A torch that is too old is named before the binary,
    whose symbols it may lack, is loaded; `import ringtile` itself works, for the doctor. Neither it nor a call on a CPU
    asks about CUDA: a process that has asked cannot fork workers that use a GPU."""
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    old, *missing = done.stdout.splitlines()
    assert old == "torch 2.10.1+cpu is too old; expected torch >= 2.11: pip install 'torch>=2.11' False"
    assert [line.split(" needs ")[0] for line in missing] == ["ringtile.enable", "ringtile.auto", "ringtile.tile_mlps"]
    assert all("transformers, which is not installed" in line for line in missing)
    assert all("pip install 'transformers>=5.17' 'accelerate>=1.15'" in line for line in missing)


def test_what_messages_say_of_extras_is_what_pyproject_has() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    packages = {name: re.findall(r'"([^"]+)"', line) for name, line in re.findall(r"^(\w+) = \[(.*)\]$", text, re.M)}
    hf, train = packages["hf"], packages["train"]
    assert train[0] == "ringtile[hf]"
    assert {"hf": shlex.join(hf), "train": shlex.join(hf + train[1:])} == EXTRAS
    for name, (major, minor) in trainers.TRIED.items():
        assert re.findall(rf'"{name}[^"]*<([\d.]+)"', text) == [f"{major}.{minor + 1}"]  # once, in the extra dev


# Written for a package that whoever imports them has: axolotl brings pydantic too.
FOR_OTHERS = {"axolotl.py": {"axolotl", "pydantic"}, "four_bit.py": {"peft"}}


def test_what_modules_import_is_declared() -> None:
    """Every package that a module of ringtile imports as it is loaded is a dependency, or of the extras hf, train."""
    text = (ROOT / "pyproject.toml").read_text()
    lines = re.findall(r"^(?:dependencies|hf|train) = \[(.*)\]$", text, re.M)
    declared = {name.lower() for line in lines for name in re.findall(r'"([A-Za-z]+)', line)}
    declared |= {"yaml"} & {name.replace("pyyaml", "yaml") for name in declared}
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
            assert packages <= declared | {"ringtile"} | FOR_OTHERS.get(path.name, set()), path
