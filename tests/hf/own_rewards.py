"""A GRPOTrainer of a user's, whose module imports accelerate's collectives by names of its own."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather as all_rows
from accelerate.utils import gather_object, reduce
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
        metrics["own/rows"].append(len(gather_object(prompts)))
        mean, total = (reduce(torch.tensor(float(len(prompts[0]))), reduction) for reduction in ("mean", "sum"))
        metrics["own/mean"].append(mean.item())
        metrics["own/total"].append(total.item())
        return all_rows(of_functions.contiguous())
