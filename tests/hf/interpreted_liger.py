"""A training with Liger's own kernels, in Triton's interpreter: `interpreted_liger.py FOLDER`, alone or by torchrun.

Saves the run of the first rank in FOLDER, by the number of ranks. The interpreter lacks two things that the kernels
use: it hands a kernel numbers as they are, where Triton makes tensors of them, and knows no `rsqrt` of libdevice.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import liger_kernel.transformers  # noqa: F401
import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from hf_training import train
from test_liger import CONFIG, LIGER
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt


def _convert_floats(argument):
    if not isinstance(argument, float):
        return _convert(argument)
    return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)


def main(folder: str) -> None:
    interpreter._implicit_cvt = _convert_floats
    for name, module in sys.modules.items():
        if name.startswith("liger_kernel.ops") and hasattr(module, "rsqrt"):
            module.rsqrt = lambda x: tl.math.rsqrt(x)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    run = train(CONFIG if world > 1 else None, **{**LIGER, "num_rows": 8})
    if world == 1 or dist.get_rank() == 0:
        torch.save(vars(run), os.path.join(folder, str(world)))


if __name__ == "__main__":
    main(sys.argv[1])
