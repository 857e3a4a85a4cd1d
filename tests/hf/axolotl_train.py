"""`axolotl train FILE` on CPU ranks, as it runs on GPUs: only the device, and who sees an accelerator, are replaced."""

import os
import pathlib
import sys

import hf_engines
import yaml


def on_cpu(engine: str) -> None:
    """Has axolotl, accelerate and DeepSpeed take the CPU for the device they look for. Then runs axolotl's command."""
    if not engine:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    with hf_engines.engine(engine or "DDP"):
        import axolotl.cli.config
        import axolotl.utils.trainer
        from accelerate.parallelism_config import ParallelismConfig

        normalize, mesh = axolotl.cli.config.normalize_config, ParallelismConfig.build_device_mesh

        def normalize_config(cfg):
            normalize(cfg)
            cfg.device_map = "cpu"

        axolotl.cli.config.normalize_config = normalize_config
        axolotl.utils.trainer.check_cuda_p2p_ib_support = lambda: True
        ParallelismConfig.build_device_mesh = lambda self, device: mesh(self, "cpu")
        from axolotl.cli.train import do_cli

        do_cli(sys.argv[1])


if __name__ == "__main__":
    words = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
    on_cpu("ZeRO-3" if "deepspeed" in words else "FSDP2" if "fsdp_config" in words else "")
