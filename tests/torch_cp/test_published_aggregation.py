"""Numbers that other libraries hard-code in their tests of loss aggregation, under context parallelism.

Each is recomputed from `sequence_log_probs` on rows that 1, 2 or 3 ranks share, by a loop that knows nothing of ranks.
A loss of a token that a source gives enters as its advantage, negated: at the first step the ratio is 1, so the loss of
the token is that number. The log-probabilities are those of a bigram model. The numbers are exact in float64 up to a
few roundings.

Sources, as they were in November 2026:
- slime: THUDM/slime, tests/test_cp_utils.py;
- verl: verl-project/verl, test_sequence_token_counts_reconstruct_global_sequence_mean; issues 5993 and 6609, where the
  mean was divided by the number of ranks, and gradients grew with it;
- ROLL: alibaba/ROLL, pull request 444; WorldFoundry: test_all_packed_token_aggregations_match_direct_formulas;
- NeMo-RL: NVIDIA-NeMo/RL, tests/unit/algorithms/test_loss_functions.py;
- Megatron-LM: NVIDIA/Megatron-LM, pull request 7513: with one valid token, the gradient was halved on 2 ranks.

Shape letters: B rows, T tokens of a response, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from ringtile import sequence_log_probs
from torch import Tensor, nn
from torch.nn import functional

PROMPT = 5  # tokens before each response


class Bigram(nn.Module):
    """Gives each token of a response (B, T) the log-probability that is asked for; no two tokens are alike."""

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__()
        rows, tokens = log_probs.shape[0], PROMPT + log_probs.shape[1]
        size = rows * tokens + 1  # the last class is the rest
        self.input_ids = torch.arange(rows * tokens).view(rows, tokens)
        of_tokens = functional.pad(log_probs.double(), (PROMPT, 0), value=-1.0)
        table = torch.full((size, size), -1e4, dtype=torch.float64)
        before, after = self.input_ids[:, :-1], self.input_ids[:, 1:]
        table[before, after] = 0.0
        table[before, -1] = torch.log(torch.expm1(-of_tokens[:, 1:]))
        self.table = nn.Embedding.from_pretrained(table, freeze=False)
        self.head = nn.Linear(size, size, bias=False, dtype=torch.float64)
        nn.init.eye_(self.head.weight)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Tensor:
        return self.head(self.table(input_ids))


# ---- the user's loop: of whole rows (B, T), nothing of ranks ------------------------------------


def token_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def of_rows(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum(1) / mask.sum(1)


def sum_of_row_means(losses: Tensor, mask: Tensor) -> Tensor:
    return of_rows(losses, mask).sum()


def row_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return of_rows(losses, mask).mean()


def divided_by(number: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda losses, mask: (losses * mask).sum() / number


def sum_of_rollout_means(losses: Tensor, mask: Tensor) -> Tensor:
    """The first three rows are one rollout, the fourth another."""
    counts = torch.tensor([9.0, 9.0, 9.0, 3.0], dtype=torch.float64)
    return ((losses * mask).sum(1) / counts).sum()


class Case(NamedTuple):
    source: str
    losses: list[list[float]]
    mask: list[list[int]]
    aggregate: Callable[[Tensor, Tensor], Tensor]
    expected: float
    gradients: list[list[float]] | None = None  # of the loss of each token, if the source gives them


def ones(rows: int, tokens: int) -> list[list[int]]:
    return [[1] * tokens for _ in range(rows)]


EIGHT = [[float(i) for i in range(1, 9)], [10.0 * i for i in range(1, 9)]]
CASES = [
    Case("slime", [[1, 2, 3], [4, 5, 6], [7, 8, 9]], ones(3, 3), sum_of_row_means, 15.0),
    Case("slime", [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]], ones(4, 3), sum_of_rollout_means, 16.0),
    Case("slime", [[1, 2, 3], [4, 5, 6]], [[1, 1, 1], [1, 0, 1]], divided_by(8.0), 2.0),
    Case("slime", [[1, 2, 3], [4, 5, 6]], [[1, 1, 1], [1, 0, 1]], sum_of_row_means, 7.0),
    Case("slime", [[1, 2, 3]], ones(1, 3), divided_by(1.0), 6.0),
    Case("slime, two shards of each row", EIGHT, ones(2, 8), divided_by(16.0), 24.75),
    Case("slime, two shards of each row", EIGHT, ones(2, 8), divided_by(32.0), 12.375),
    Case("verl", [[1, 3, 5, 7]], ones(1, 4), row_mean, 4.0),
    Case("ROLL", [[1, 100], [1, -50]], [[1, 0], [1, 0]], token_mean, 1.0, [[0.5, 0.0], [0.5, 0.0]]),
    Case("WorldFoundry", [[1, 3], [9, 0]], [[1, 1], [1, 0]], token_mean, 13 / 3),
    Case("WorldFoundry", [[1, 3], [9, 0]], [[1, 1], [1, 0]], row_mean, 5.5),
    Case("WorldFoundry", [[1, 3], [9, 0]], [[1, 1], [1, 0]], divided_by(2 * 4.0), 1.625),
    Case("Megatron-LM", [[0, 0, 0, 2.5]], [[0, 0, 0, 1]], token_mean, 2.5, [[0.0, 0.0, 0.0, 1.0]]),
    Case("NeMo-RL, ratios forced to 1", [[-1, 1, -2]], ones(1, 3), token_mean, -2 / 3),
]


def parameter_gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """The mean over the ranks, as an engine takes it."""
    gradients = list(torch.autograd.grad(loss, list(model.parameters())))
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def exact(got: Tensor, expected: object) -> None:
    torch.testing.assert_close(
        got.detach().double(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14
    )


def losses_are_published() -> None:
    for case in CASES:
        losses, mask = torch.tensor(case.losses, dtype=torch.float64), torch.tensor(case.mask)
        model = Bigram(-1 - torch.arange(losses.numel()).view(losses.shape) / 7)
        completion_mask = functional.pad(mask, (PROMPT, 0))
        call = (model, model.input_ids, dist.group.WORLD)
        with torch.no_grad():
            old = sequence_log_probs(*call, completion_mask=completion_mask)
        new = sequence_log_probs(*call, completion_mask=completion_mask)
        of_tokens = ((new - old).exp()[:, PROMPT - 1 :]) * losses
        loss = case.aggregate(of_tokens, mask)
        exact(loss, case.expected)
        (of_each,) = torch.autograd.grad(loss, of_tokens, retain_graph=True)
        if case.gradients is not None:
            exact(of_each, case.gradients)
        # The gradient of the model is that of one process: d loss / d log-probability goes through all logits.
        of_model = parameter_gradients(loss, model)
        alone = model(model.input_ids, model.input_ids, False)[:, PROMPT - 1 : -1].log_softmax(-1)
        alone = alone.gather(2, model.input_ids[:, PROMPT:, None])[..., 0]
        oracle = torch.autograd.grad((of_each * losses * alone).sum(), list(model.parameters()))
        for one, other in zip(of_model, oracle, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)  # hidden holds logits of 1e4


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 3))])
def test_losses_of_tokens_are_aggregated_to_the_published_numbers(world_size: int) -> None:
    run_ranks(world_size, losses_are_published)
