"""One case through one backend, in processes of its own, and the verdict.

The limit is derived: TIMES the error that torch's eager attention makes in the same dtype in one process, against
float64, because sums in another order round elsewhere, and both errors are the largest of many (first_batch/trace.py).
"""

from __future__ import annotations

import importlib
import linecache
import traceback
from typing import Any

import torch
import torch.distributed as dist
from ringtile.first_batch.trace import TIMES

from tools.gauntlet import training_cases
from tools.gauntlet.attention_cases import AttentionCase, Outputs, exact
from tools.gauntlet.backends import Backend, NotOfferedError, backend
from tools.gauntlet.training_cases import TrainingCase
from tools.models.workers import Workers

RANKS = 4
START_SECONDS = 300.0  # the first time, all of torch and transformers is imported
SECONDS = 40.0  # of a case, with the imports of its package, after which its ranks are killed
VERDICTS = ("exact", "wrong", "refused", "hangs", "crashed", "not offered")


class Judge:
    """The ranks of one backend: new ones after a case that did not come to an end in numbers."""

    def __init__(self, one: Backend) -> None:
        self.one, self.ranks = one, Workers(RANKS)

    def judge(self, case: AttentionCase) -> dict[str, Any]:
        """verdict, one of VERDICTS; words, which say more; difference and limit, where numbers came."""
        self.ranks.call(prepare, self.one.name, seconds=START_SECONDS)
        found = verdict(self.ranks.call(run, self.one.name, case, seconds=SECONDS))
        if found["verdict"] not in ("exact", "wrong", "not offered"):
            self.ranks.close()
        documented = self.one.documented.get(case.name, "")
        return {"case": case.name, "trains": False, **found, "documented": documented}

    def close(self) -> None:
        self.ranks.close()


def verdict(results: list[Any]) -> dict[str, Any]:
    """Of what the ranks answered, see `run`."""
    said = [result for result in results if isinstance(result, dict) and "kind" in result]
    after = "".join(f"; a rank: {one_said['words']}" for one_said in said[:1])
    for kind, error in (("crashed", EOFError), ("hangs", TimeoutError), ("crashed", BaseException)):
        if failed := [str(result) for result in results if isinstance(result, error)]:
            return {"verdict": kind, "words": failed[0] + after}
    for kind in ("crashed", "not offered", "refused"):
        if words := [result["words"] for result in said if result["kind"] == kind]:
            return {"verdict": kind, "words": words[0]}
    worst = max(results, key=lambda result: result["excess"])
    found = {"difference": worst["difference"], "limit": worst["limit"]}
    if worst["excess"] <= 1.0:
        return {"verdict": "exact", "words": "", **found}
    return {"verdict": "wrong", "words": f"{worst['tensor']} by {worst['difference']:.1e}", **found}


def prepare(name: str) -> None:
    """On a rank: imports what takes long."""
    one = backend(name)
    if one.version() is not None:
        for module in one.imports:
            importlib.import_module(module)


def run(name: str, case: AttentionCase) -> dict[str, Any]:
    """On a rank: the largest difference of the backend's outputs; or what it raised."""
    one = backend(name)
    try:
        outputs = one.attend(case, case.tensors(one.dtype))
    except Exception as error:
        return raised(error)
    dist.barrier()
    return compare(case, outputs, one.dtype)


def train(name: str, case: TrainingCase) -> dict[str, Any]:
    """On a rank: what it has trained, or what was raised, as in `run`."""
    try:
        return training_cases.train(case, name)
    except Exception as error:
        return raised(error)


def raised(error: Exception) -> dict[str, Any]:
    if isinstance(error, NotOfferedError):
        return {"kind": "not offered", "words": str(error)}
    kind = "refused" if is_deliberate(error) else "crashed"
    return {"kind": kind, "words": " ".join(f"{type(error).__name__}: {error}".split())[:400]}


def is_deliberate(error: Exception) -> bool:
    """Whether the line that raised an error is a statement of Python that raises: the package says no."""
    frames = traceback.extract_tb(error.__traceback__)
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    return line.startswith(("raise", "assert")) and bool(str(error))


def compare(case: AttentionCase, outputs: Outputs, dtype: torch.dtype) -> dict[str, Any]:
    """excess: the largest difference, relative to a tensor's largest number, over its limit."""
    inputs = case.tensors(dtype)  # a backend may have changed its own
    expected, rounded = exact(case, inputs).named(), exact(case, inputs, dtype).named()
    real = case.real()
    worst: dict[str, Any] = {"excess": -1.0}
    for name, tensor in outputs.named().items():
        truth, one_process = expected[name], rounded[name].double()
        if tensor.shape != truth.shape:
            return {
                "excess": float("inf"),
                "tensor": f"{name} of shape {tuple(tensor.shape)}",
                "difference": float("inf"),
                "limit": 0.0,
            }
        found = tensor.double()
        if name in ("out", "dq"):  # of padding, nobody reads them
            truth, one_process, found = truth[real], one_process[real], found[real]
        largest = float(truth.abs().max()) or 1.0
        difference = float((found - truth).abs().max()) / largest
        error = max(float((one_process - truth).abs().max()) / largest, torch.finfo(dtype).eps)
        limit = TIMES * error
        excess = difference / limit if difference == difference else float("inf")
        if excess > worst["excess"]:
            worst = {"excess": excess, "tensor": name, "difference": difference, "limit": limit}
    return worst


class TrainingJudge:
    """Ranks that train by a backend, and one process that is the reference."""

    def __init__(self, one: Backend) -> None:
        self.one, self.ranks, self.alone = one, Workers(training_cases.RANKS), Workers(1)

    def judge(self, case: TrainingCase) -> dict[str, Any]:
        (expected,) = self.alone.call(training_cases.train, case, "", seconds=START_SECONDS)
        results = self.ranks.call(train, self.one.name, case, seconds=START_SECONDS)
        all_results = [expected, *results]
        failed = any(isinstance(result, BaseException) or "kind" in result for result in all_results)
        found = verdict(all_results) if failed else training_cases.compare(results, expected)
        if self.one.package != "ringtile":
            self.ranks.close()  # what it has changed in a process stays there
        documented = self.one.documented.get(case.name, "")
        return {"case": case.name, "trains": True, **found, "documented": documented}

    def close(self) -> None:
        self.ranks.close()
        self.alone.close()
