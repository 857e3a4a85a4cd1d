"""Starts of trainings, each rank with a hash seed of its own, as torchrun makes them: `hash_seeds.py [starts] [world]`.

Models of transformers loop over sets of strings, whose order follows the seed. The ranks of a pool are forks of one
process and share theirs.
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

FAMILIES = ("gemma3", "modernbert")


def train(rank: int, world_size: int, store: str) -> None:
    import ringtile
    import torch.distributed as dist
    from hf_models import tiny_encoder, tiny_model
    from hf_training import make_trainer
    from ringtile.hf.trainer import first_batch_of

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for family in FAMILIES:
        model = tiny_encoder(family) if family == "modernbert" else tiny_model(family).train()
        trainer = make_trainer(model=model, max_steps=1)
        ringtile.enable(trainer, {"context_parallel_size": world_size})
        trainer.train()
        proof = first_batch_of(trainer)
        assert proof is not None
        assert proof.num_modules > 20
    print("proved", flush=True)
    os._exit(0)


def start(seeds: list[int], timeout: float = 600.0) -> list[str]:
    """What each rank prints, with `proved` in its last line if all families trained."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, seed in enumerate(seeds):
            env = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "rank", str(rank), str(len(seeds)), f"{folder}/store"]
            ranks.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        return [rank.communicate(timeout=timeout)[0] for rank in ranks]


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
        train(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    starts, world = (int(x) for x in (*sys.argv[1:], *("30", "2")[len(sys.argv) - 1 :]))
    refused = 0
    for _ in range(starts):
        said = start([random.SystemRandom().randrange(1 << 31) for _ in range(world)])
        refused += not all("proved" in text for text in said)
    print(f"{starts} starts on {world} ranks, {len(FAMILIES)} models each: {refused} refused")
