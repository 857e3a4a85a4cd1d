"""The compiled kernels as PyTorch custom ops: what they take, fake kernels, and checks of a user's arguments.

The wrappers take the arguments of the op schemas and document their shapes. Where a kernel is missing or wrong, torch
operations (torch_ops.py) compute the same; attention then is aten's (attn/choose.py). Among the ops here only the
linear ones have registered autograd formulas: `shard_seq`, and `dropout`, itself. The rest are called inside autograd
nodes, which are differentiated by hand.

Shape letters: B batch, N local queries, K keys, H query heads, G kv heads, D head dim, Dv value head dim,
T tokens of a tile, F MLP intermediate size, V vocabulary, S global tokens, W ranks, R runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ringtile import arguments, derivatives, self_test, torch_ops
from ringtile.errors import BuildError
from ringtile.torch_ops import Tensors

MIN_TORCH = (2, 11)  # of setup.py's TORCH_TARGET_VERSION
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
    raise BuildError(f"torch {torch.__version__} is too old; expected torch >= 2.11: pip install 'torch>=2.11'")
try:
    _C = importlib.import_module("ringtile._C")  # loading it registers the ops
except ImportError as error:
    raise BuildError(
        f"ringtile's compiled ops could not be loaded ({error}); "
        f"build them for this torch ({torch.__version__}) with: pip install --no-build-isolation ."
    ) from error

_ops = torch.ops.ringtile
FLOAT_DTYPES = torch_ops.FLOAT_DTYPES
MAX_HEAD_DIM: int = _C.MAX_HEAD_DIM
MAX_CONV_WIDTH: int = _C.MAX_CONV_WIDTH
CHUNK_TOKENS: int = _C.CHUNK_TOKENS  # between the states that a recurrence keeps for its backward
SELECTIVE_CHANNELS: int = _C.SELECTIVE_CHANNELS  # that the kernel of the selective scan takes at once
ISA_NAMES: tuple[str, ...] = _C.ISA_NAMES
MAX_RUNS_WITHOUT_TABLE: int = _C.MAX_RUNS_WITHOUT_TABLE  # of rows, that a launch takes
MIN_CUDA_CAPABILITY = (8, 0)  # of setup.py's lowest architecture
GLU_KINDS: dict[str, int] = _C.GLU_KINDS


# ---- devices ------------------------------------------------------------------------------------


@functools.cache
def why_no_cuda() -> str:
    """Return why this process does not use the CUDA kernels; "" if it does. The first call loads them."""
    if importlib.util.find_spec("ringtile._cuda") is None:
        return (
            "not built: ringtile was installed without its CUDA kernels; on a machine with nvcc, run "
            "RINGTILE_CUDA=1 pip install --no-build-isolation ."
        )
    if torch.version.cuda is None:
        return f"no device: torch {torch.__version__} is a build without CUDA; install a build with CUDA"
    if not torch.cuda.is_available():
        return "no device: torch.cuda.is_available() is False; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    try:
        binary = importlib.import_module("ringtile._cuda")  # loading it registers the ops for CUDA tensors
    except ImportError as error:
        return f"not loaded: {error}; rebuild ringtile for this torch ({torch.__version__})"
    driver, built_with = binary.DRIVER_VERSION // 1000, binary.CUDART_VERSION // 1000  # 1000 major + 10 minor
    if driver < built_with:
        return (
            f"the driver is too old: it runs CUDA {driver}, the kernels were built with CUDA {built_with}; install a "
            f"newer driver, or rebuild ringtile with an nvcc of CUDA {driver}"
        )
    return ""


@functools.cache
def why_not_on(device_index: int) -> str:
    """Return why a CUDA device cannot run the CUDA kernels; "" if it can. Warn, where there is a GPU."""
    if reason := why_no_cuda():
        if torch.cuda.is_available():
            _warn_of(reason)
        return reason
    capability = torch.cuda.get_device_capability(device_index)
    if capability >= MIN_CUDA_CAPABILITY:
        return ""
    reason = (
        f"wrong architecture: {torch.cuda.get_device_name(device_index)} has compute capability "
        f"{'.'.join(map(str, capability))}, expected at least {'.'.join(map(str, MIN_CUDA_CAPABILITY))}"
    )
    _warn_of(reason, f" on cuda:{device_index}")
    return reason


def why_no_kernels(device: torch.device) -> str:
    """Return why there are no kernels for the tensors of a device; "" if there are."""
    return why_not_on(device.index or 0) if device.type == "cuda" else ""


def _warn_of(reason: str, where: str = "") -> None:
    logging.getLogger(__name__).warning(
        "ringtile's CUDA kernels are not in use%s: %s. Torch operations run instead: the same results, but slower; "
        "attention is aten's, and what that cannot compute is refused",
        *(where, reason),
    )


def cpu_isa() -> str:
    """Return the instruction set of the CPU kernels. BuildError: RINGTILE_CPU_ISA names another."""
    try:
        name: str = ISA_NAMES[_ops.cpu_isa()]
        return name
    except RuntimeError as error:
        raise BuildError(str(error).splitlines()[0]) from error


@functools.cache
def why_no_amx() -> str:
    """Return why attention here does not use the CPU's tiles of bfloat16; "" if it may, or the CPU has none."""
    if "amx_bf16" in ISA_NAMES or not torch.cpu._is_amx_tile_supported():
        return ""
    return (
        "not built: this CPU has AMX, but the compiler that built ringtile has not; build it with GCC >= 11 or "
        "Clang >= 12"
    )


@functools.cache
def why_amx_is_refused() -> str:
    """Return why Linux does not let this process use the CPU's tiles of bfloat16; "" if it does, or there are none."""
    asks = "amx_bf16" in ISA_NAMES and not os.environ.get("RINGTILE_CPU_ISA") and torch.cpu._is_amx_tile_supported()
    if not asks or cpu_isa() == "amx_bf16":
        return ""
    reason = (
        "refused: this CPU has AMX, but Linux gives this process no room for its tiles: the thread that asked has an "
        "alternate signal stack that is too small for them (sigaltstack; 16 KiB will do), or Linux is older than 5.16"
    )
    logging.getLogger(__name__).warning("ringtile's CPU kernels run as %s: AMX is %s", cpu_isa(), reason)
    return reason


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of running outputs, log-sum-exps and gradients: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- self-test ---------------------------------------------------------------------------------

KERNELS = tuple(self_test.CASES)  # all but attention and recurrences


def why_not_kernel(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with one of KERNELS; "" if nothing is. Found out once a process."""
    return self_test.why_not((name, device, dtype), lambda: self_test.of_op(name, _ops, device, dtype))


def _in_torch(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch operations stand in for one of KERNELS, which is missing, or wrong: then it says so once."""
    if why_no_kernels(device):
        return True
    is_right = self_test.failures.get((name, device, dtype)) == ""  # every call asks
    if is_right or device.type == "meta" or (name != "rows" and dtype not in FLOAT_DTYPES):
        return False
    if reason := why_not_kernel(name, device, dtype):
        given = f"ringtile's {name} kernel", f"{dtype} on {device}", reason
        self_test.warn_once(*given, "A slower version in torch operations")
    return bool(reason)


# As torch.compiler.assume_constant_result would say it, which imports the compiler.
setattr(_in_torch, "_dynamo_marked_constant", True)  # noqa: B010


def _call(kernel: str, op: str, name: str, x: Tensor | Sequence[Tensor], *given: Any) -> Any:
    """Call op on x, its first argument, which has that name, and others: one of KERNELS, or torch operations instead.

    InputError: x is on no device that ringtile knows; or a tensor is sparse, nested or mkldnn, for which torch has no
    kernel.
    """
    first, *others = x if isinstance(x, (list, tuple)) and x else (x,)
    in_torch, asks_all = False, is_compiling()
    for each in (first, *others):  # most are like some whose kernel was found right
        if asks_all or not isinstance(each, Tensor) or self_test.failures.get((kernel, first.device, each.dtype)) != "":
            arguments.check_device(name, each)
            in_torch = _in_torch(kernel, first.device, each.dtype) or in_torch
    try:
        return getattr(torch_ops if in_torch else _ops, op)(x, *given)
    except NotImplementedError:
        for each in (first, *others):
            arguments.check_device(name, each)
        for index, other in enumerate((x, *given)):
            for each in _tensors(other):
                arguments.check_storage(f"argument {index}", each)
        raise


def _tensors(x: Any) -> Sequence[Tensor]:
    """Return the tensors of an op's argument."""
    return [each for each in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(each, Tensor)]


# ---- arguments ----------------------------------------------------------------------------------


def _register_fake(name: str, result: Callable[..., Any] | None = None, host: int = -1) -> None:
    """Register the fake of an op: the results of a call; None: it only writes into its arguments.

    A call with one tensor on meta comes here too, and would make results that hold nothing, or do nothing to the
    others: InputError. host: the index of an argument that is on the CPU wherever the others are, or with them on meta.
    """

    def fake(*given: Any) -> Any:
        tensors = [x for i, each in enumerate(given) for x in _tensors(each) if i != host or x.device.type == "meta"]
        if any(x.device.type == "meta" for x in tensors):
            others = {f"tensor {i}": x for i, x in enumerate(tensors[1:], 2)}
            arguments.check_devices(f"the first tensor of {name}", tensors[0], **others)
        return None if result is None else result(*given)

    torch.library.register_fake(f"ringtile::{name}", fake)


for _name, _host in (("attn_fwd_", 5), ("attn_bwd_", 5), *((f"rows_{each}_", 1) for each in ("pack", "unpack", "add"))):
    _register_fake(_name, host=_host)
for _name in ("glu_bwd_", "attn_merge_", "cross_entropy_fwd_bwd_", "layout_check", "weight_grad_add_"):
    _register_fake(_name)

# ---- attention: one block of keys ---------------------------------------------------------------


# The two ops of a block, called as their schemas say (csrc/torch/sequence.cpp). Forward: merge one block of keys into
# the running softmax of every query, an online softmax as in FlashAttention (arXiv:2205.14135), algorithm 1.
#
#   q (B, N, H, D), k (B, K, G, D), v (B, K, G, Dv)
#   begin, end    int32 (B or 1, N): the query attends global positions [begin, end)
#   k_runs        int64 (R, 4) on the CPU: global_begin, stride, local_begin, length; local_begin is a row of k
#   out, lse      read and written: (B, N, H, Dv) of state_dtype; (B, H, N) of that, or of float64 to avoid rounding
#                 between calls. Before the first block they hold 0 and -inf; with fresh, nothing yet; with
#                 rounded_out too, out may have no elements
#   dropout, seed, step, stream, rows, positions    of the weights, after the softmax (docs/design/dropout.md); int64
#                 rows (B), and positions (N) of the queries. lse is that of all keys
#   rounded_out   like out, contiguous, of q's dtype: gets the merged out, rounded; then out holds any numbers
#   key_begin, key_end    int32 (B or 1, K): the other side of the mask, if it has one. It needs positions
#
# Backward: add one block's gradients to dq, dk and dv, like q, k and v, of state_dtype (algorithm 4).
#
#   dout, lse     of q's dtype; final, over all blocks
#   delta         (B, H, N): see `attn_delta`
#   fresh         dk and dv hold nothing yet, and k_runs every row of k; then rounded_dk and rounded_dv, contiguous, of
#                 k's dtype, may get them rounded, and dk and dv hold any numbers
attn_fwd_, attn_bwd_ = _ops.attn_fwd_.default, _ops.attn_bwd_.default


def attn_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Return the delta of attn_bwd_, (B, H, N) of state_dtype: the sum over Dv of dout * out, minus dlse.

    dout, out (B, N, H, Dv): one dtype, unit stride in the last dim; dlse, the gradient of lse, (B, H, N) float64,
    contiguous; None: 0. dscores = P * (dP - delta): the softmax contributes sum(dout * out), and lse contributes -dlse.
    """
    return _call("delta", "attn_delta", "dout", dout, out, dlse)  # type: ignore[no-any-return]


_register_fake(
    "attn_delta",
    lambda dout, out, dlse=None: dout.new_empty(
        (dout.size(0), dout.size(2), dout.size(1)), dtype=state_dtype(out.dtype)
    ),
)


def attn_merge_(
    part: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    fresh: bool,
    first_row: int = 0,
    rows: Tensor | None = None,
    rounded: Tensor | None = None,
) -> None:
    """Merge a block that another kernel has computed: out += share * (part - out), with the share of its softmax.

    part (P, M, H, Dv) of unit stride in the last dim; its part_lse (P, H, M) of state_dtype, where inf and -inf are
    those of rows without a weight; out (B, N, H, Dv) of state_dtype and lse (B, H, N) float64; all contiguous but part.
    Token m of batch b is row first_row + b N + m of the B N rows of out; or, in turn, those that int64 rows (P M)
    holds, rising. fresh: out and lse hold nothing there. rounded: like out, of part's dtype; written in its place. On a
    GPU, rows that are not of out are left out; on a CPU they are a RuntimeError.
    """
    _call("merge", "attn_merge_", "part", part, part_lse, out, lse, fresh, first_row, rows, rounded)
    torch.autograd.graph.increment_version((out, lse))  # as choose.py asks whether they have changed


# ---- sequence -----------------------------------------------------------------------------------


def runs_tensor(runs: Sequence[Sequence[int]]) -> Tensor:
    """Make runs (global_begin, stride, local_begin, length) an argument of the ops: int64 (R, 4) on the CPU."""
    return torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 4)


def rows_pack_(xs: Tensors, runs: Tensor, dim: int, ys: Tensors, table: Tensor | None = None) -> None:
    """y[local_begin + j] = x[global_begin + j * stride] along dim, for every run, x and its y; any dtypes and strides.

    At most 32 tensors, each with another y of its dtype. table: runs on the device of CUDA tensors, for a single launch
    where there are more than MAX_RUNS_WITHOUT_TABLE.
    """
    _call("rows", "rows_pack_", "x", xs, runs, dim, ys, table)


def rows_unpack_(xs: Tensors, runs: Tensor, dim: int, ys: Tensors, table: Tensor | None = None) -> None:
    """x[global_begin + j * stride] = y[local_begin + j], as of `rows_pack_`; the rest of x keeps its value."""
    _call("rows", "rows_unpack_", "x", xs, runs, dim, ys, table)


def rows_add_(xs: Tensors, runs: Tensor, dim: int, ys: Tensors, table: Tensor | None = None) -> None:
    """x[global_begin + j * stride] += y[local_begin + j], as of `rows_pack_`; all of float32, or of float64."""
    _call("rows", "rows_add_", "x", xs, runs, dim, ys, table)


@torch.library.custom_op("ringtile::shard_seq", mutates_args=())
def _shard_seq(x: Tensor, runs: list[int], dim: int, size: int, is_gradient: bool) -> Tensor:
    """Return the tokens in the runs; or the adjoint: x's, where the runs say, and 0. size: of the result in dim."""
    of_runs = runs_tensor([runs])
    if is_gradient:
        rows_unpack_([whole := resized(x, dim, size).zero_()], of_runs, dim, [x])
        return whole
    rows_pack_([x], of_runs, dim, [y := resized(x, dim, size)])
    return y


def resized(x: Tensor, dim: int, size: int) -> Tensor:
    """Return an uninitialized tensor like x, of another size in dim."""
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])


@_shard_seq.register_fake
def _(x: Tensor, runs: list[int], dim: int, size: int, is_gradient: bool) -> Tensor:
    return resized(x, dim, size)


def _shard_seq_setup(ctx: Any, inputs: tuple[Tensor, list[int], int, int, bool], output: Tensor) -> None:
    x, ctx.runs, ctx.dim, _, ctx.is_gradient = inputs
    ctx.size = x.size(ctx.dim)


def _shard_seq_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.is_gradient:
        derivatives.check_once("the backward of shard", dy)
    return _shard_seq(dy, ctx.runs, ctx.dim, ctx.size, not ctx.is_gradient), None, None, None, None


_shard_seq.register_autograd(_shard_seq_backward, setup_context=_shard_seq_setup)


def shard_seq(x: Tensor, runs: Sequence[Sequence[int]], dim: int) -> Tensor:
    """Return the tokens in one rank's runs, along a dim >= 0 of a global tensor of any dtype; differentiable."""
    derivatives.check_once("shard", x)
    numbers = [number for run in runs for number in run]
    return _shard_seq(x, numbers, dim, sum(numbers[3::4]), False)  # type: ignore[no-any-return]


def layout_check(layout: Tensor, seq_len: int, world_size: int) -> None:
    """Raise RuntimeError unless the rows (rank, run) of layout (R, 5) hold each of 0..seq_len-1 exactly once."""
    arguments.check_on_cpu("layout", layout)
    _ops.layout_check(layout, seq_len, world_size)


# These run on the host, on CPU tensors (csrc/ringtile/sequence.h). begin, end: int32 (B or 1, S), or (2, B or 1, S),
# those of queries, then those of keys; layout, runs int64 (R, 5) and (R, 4). Results are int64 unless they are bounds.
#
#   run_positions(runs)    (N,): the position in each row, for runs in any order that fill the rows
#   plan_rank(begin, end, layout, rank, at_once)    the rounds of one rank, of which sequence/plan.py makes objects:
#       rounds (W, or 1 at once, 5), num_keys, num_pairs, first_run, num_runs, in_place; transfers (2, W, 5), incoming
#       and outgoing, rank, num_keys, first_run, num_runs, is_head; and all their runs (M, 4)
#   plan_counts(begin, end, layout)    keys and pairs (W, W), by rank of the queries, then of the keys: the keys of a
#       rank that another attends, and the unmasked (query, key) pairs, summed over the rows of the mask
#   balance(begin, end, num_keys, world_size, chunk)    (C,): the rank of each chunk of tokens (csrc/seq/balance.c), and
#       (W,): the pairs of each rank; of begin and end of the queries alone; num_keys (B, S) with two sides, else None
#   pieces(begin, end, k_runs, key_begin, key_end, positions, max_pieces, max_stretches)    as `pieces_of` in
#       sequence/pieces.py: (P, 6), the numbers of a `Piece` each, and how many each row of the mask has (B,); empty
#       where there are too many
#   mask_hulls(begin, end, key_begin, key_end, last=0)    how many keys each query of a mask with two sides attends
#       (B, S); the first, and the last plus 1, int32 (B, S). last: of its keys, only the last so many; 0: all. With the
#       sides exchanged: the queries of each key
run_positions, plan_rank, plan_counts = _ops.run_positions, _ops.plan_rank, _ops.plan_counts
balance, pieces, mask_hulls = _ops.balance, _ops.pieces, _ops.mask_hulls


def digest(begin: Tensor, end: Tensor, layout: Tensor) -> int:
    """Return 64 bits that are equal on two ranks exactly if their masks and layouts are, up to a collision."""
    return int(_ops.digest(begin, end, layout).item())


@torch.library.register_fake("ringtile::run_positions")  # type: ignore[untyped-decorator]
def _(runs: Tensor) -> Tensor:
    return runs.new_empty(torch.library.get_ctx().new_dynamic_size())


_register_fake("digest", lambda begin, end, layout: layout.new_empty(1))
_register_fake("mask_hulls", lambda begin, *others: (begin.new_empty(begin.shape).long(), begin.clone(), begin.clone()))

# ---- MLP and loss -------------------------------------------------------------------------------


def glu_fwd(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """act(gate) * up for (T, F) matrices of any row stride; kind is a value of GLU_KINDS (arXiv:2002.05202)."""
    return _call("GLU", "glu_fwd", "gate", gate, up, kind)  # type: ignore[no-any-return]


def glu_bwd_(gate: Tensor, up: Tensor, dprod: Tensor, kind: int) -> None:
    """In place, in one pass over (T, F): gate and up become their gradients, dprod becomes act(gate) * up."""
    _call("GLU", "glu_bwd_", "gate", gate, up, dprod, kind)


_register_fake("glu_fwd", lambda gate, up, kind: gate.new_empty(gate.shape))


def cross_entropy_fwd_bwd_(
    logits: Tensor,
    labels: Tensor,
    loss: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    want_grad: bool,
) -> None:
    """Per-token softmax cross entropy; the logits (T, V) become their gradient, with weight 1 per token.

    labels int64 (T); loss, lse (T) of state_dtype. With x' = softcap * tanh(x / softcap) (softcap 0: x' = x):
    loss = (1 - label_smoothing) * (lse - x'[label]) + label_smoothing * (lse - mean x') + z_loss * lse ** 2.
    An ignored token has loss 0 and a gradient of exactly 0. With want_grad False the logits keep their value. A label
    outside [0, V) is a RuntimeError on the CPU; on a GPU, which the call does not wait for, its token becomes NaN.
    """
    given = logits, labels, loss, lse, ignore_index, label_smoothing, softcap, z_loss, want_grad
    _call("loss", "cross_entropy_fwd_bwd_", "logits", *given)


def weight_grad_add_(dout: Tensor, x: Tensor, total: Tensor) -> None:
    """total += dout^T x on a CPU: dout (T, F) and x (T, E), of one dtype, total (F, E) of state_dtype; any row strides.

    Products are summed in state_dtype. Those of two bfloat16 are exact, but subnormal numbers may count as 0.
    """
    _call("weight gradient", "weight_grad_add_", "dout", dout, x, total)
