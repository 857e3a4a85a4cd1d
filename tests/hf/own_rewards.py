"""A GRPOTrainer of a user's, which calls accelerate's collectives through another module."""

from __future__ import annotations

from typing import Any

import torch
from own_gather import numbers_of_all, rows_of_all
from trl import GRPOTrainer


class OwnRewards(GRPOTrainer):
    """TRL's rewards, computed as TRL does."""

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        of_rows = {
            "completion_ids": completion_ids_list,
            "log_metric": self._log_metric,
            "log_extra": self._log_completion_extra,
        }
        rewards = [function(prompts=prompts, completions=completions, **of_rows) for function in self.reward_funcs]
        of_functions = torch.tensor([[x if x is not None else torch.nan for x in of_one] for of_one in rewards]).T
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, number in zip(("mean", "total", "rows"), numbers_of_all(len(prompts[0]), prompts), strict=True):
            metrics[f"own/{name}"].append(number)
        return rows_of_all(of_functions.contiguous())
