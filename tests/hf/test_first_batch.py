"""Users' code that no list knows must not train silently wrong: the first batch names it before step 1. A model that is
exact trains as if nothing had been proved."""

import collections
import contextvars
import functools
import io
import logging
import sys

import hash_seeds
import pytest
import ringtile
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from cells import Cell, check, params, table
from hf_engines import engine as engine_arguments
from hf_models import tiny_encoder, tiny_model
from hf_training import Messages, Padded, failure_of, make_trainer, packed, without_other_tests
from pool import run_ranks
from ringtile.first_batch.trace import TIMES
from ringtile.hf import first_batch
from ringtile.hf.first_batch import cut_batch
from ringtile.hf.trainer import first_batch_of
from torch import nn
from torch.nn import functional
from transformers import Trainer

CONFIG = {"context_parallel_size": 2}
GENERATOR = torch.Generator()


class Mixing(nn.Module):
    """An MLP beside code that mixes the tokens of a row in one of many ways, each of which a shard gets wrong."""

    def __init__(self, mlp: nn.Module, how: str) -> None:
        super().__init__()
        self.mlp, self.how = mlp, how
        self.batch_norm, self.scores = nn.BatchNorm1d(32), nn.Linear(32, 2)
        self.positions = nn.Embedding(64, 32)
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + getattr(self, self.how)(x)

    def mean_over_the_sequence(self, x):
        return x.mean(1, keepdim=True)

    def token_shift(self, x):
        return functional.pad(x[:, :-1], (0, 0, 1, 0))

    def cumsum(self, x):
        return 0.1 * x.cumsum(1)

    def norm_of_a_batch(self, x):
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)

    def norm_over_tokens(self, x):
        return x / x.norm(dim=1, keepdim=True)

    def first_token(self, x):
        return x[:, :1]

    def expert_choice(self, x):
        scores = self.scores(x).softmax(-1)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(x.size(1) // 2, dim=1).indices, 1.0)
        return x * (scores * chosen).sum(-1, keepdim=True)

    def counted_positions(self, x):
        return self.positions(torch.arange(x.size(1)))

    def noise_of_its_own(self, x):
        return 0.1 * torch.randn(x.shape, generator=self.generator)

    def noise_of_the_file(self, x):
        return 0.1 * torch.randn(x.shape, generator=GENERATOR)


NOISE = ["noise_of_its_own", pytest.param("noise_of_the_file", marks=pytest.mark.long)]
HOW = [name for name in vars(Mixing) if not name.startswith("_") and name != "forward" and "noise" not in name]


def _mixing_model(how):
    model = tiny_model().train()
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp, how)
    return model


def _refusal_of_mixing(engine, how):
    with engine_arguments(engine) as arguments:
        trainer = make_trainer(model=_mixing_model(how), **arguments)
        return failure_of(trainer), trainer.state.global_step


# A module with a state. All others read other tokens, like that of the first evaluation below.
SHORT = [("DDP", "norm_of_a_batch")]


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        *SHORT,
        *(pytest.param(engine, "token_shift", marks=pytest.mark.long) for engine in ("FSDP2", "ZeRO-3")),
        *(pytest.param("DDP", how, marks=pytest.mark.long) for how in HOW if ("DDP", how) not in SHORT),
    ],
)
def test_modules_that_mix_tokens_are_named_before_the_first_step(engine, how):
    for message, step in run_ranks(2, _refusal_of_mixing, engine, how):
        assert message.startswith("RefusedError: 2 ranks do not compute what one process computes")
        assert "model.layers.1.mlp (Mixing)" in message
        assert "expected the same numbers" in message
        assert step == 0


def _mean(logits, labels, vocab_size, shift_labels=None, **kwargs):
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _sum_that_shifts(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (targets.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


def _weight_decay(model, outputs):
    return 1e-3 * sum(weight.square().sum() for weight in model.parameters())


def _second_token(model, outputs):
    """Multi-token prediction: the token after the next one, too."""
    return 0.1 * outputs["logits"].log_softmax(-1)[:, :-2].mean()


def _mean_of_logits(model, outputs):
    return outputs["logits"].mean()


def _in_forward(term, model):
    """Adds a term to the loss."""
    forward = model.forward

    def with_term(input_ids=None, **kwargs):
        outputs = forward(input_ids, **kwargs)
        outputs["loss"] = outputs["loss"] + term(model, outputs)
        return outputs

    model.forward = with_term


LOSSES = {
    "mean": lambda model: setattr(model, "loss_function", _mean),
    "sum that shifts": lambda model: setattr(model, "loss_function", _sum_that_shifts),
    "weight decay": functools.partial(_in_forward, _weight_decay),
    "second token": functools.partial(_in_forward, _second_token),
    "term in forward": functools.partial(_in_forward, _mean_of_logits),
}


def _refusals_of_losses(names):
    messages = {}
    for name in names:
        model = tiny_model().train()
        LOSSES[name](model)
        trainer = make_trainer(model=model, trainer_arguments={}, remove_unused_columns=False)
        messages[name] = failure_of(trainer), trainer.state.global_step
    return messages


OF_EVERY_RUN = ["mean", "sum that shifts", "second token"]  # a term in forward enters the loss as the last does
TERMS = pytest.param([name for name in LOSSES if name not in OF_EVERY_RUN], marks=pytest.mark.long)


@pytest.mark.parametrize("names", [OF_EVERY_RUN, TERMS], ids=", ".join)
def test_losses_that_are_no_sum_over_tokens_are_refused_before_the_first_step(names):
    for messages in run_ranks(2, _refusals_of_losses, names):
        for name, (message, step) in messages.items():
            assert "one process" in message, (name, message)
            assert "the loss is" in message or "shift_labels" in message, (name, message)
            assert step == 0


# ---- ranks in another order ---------------------------------------------------------------------


def _in_another_order(family):
    """A model that loops over a set of its kinds of layers; the second rank does so the other way round."""
    model = tiny_encoder(family) if family == "modernbert" else tiny_model(family).train()
    file = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        ordered = functools.partial(sorted, reverse=dist.get_rank() == 1)
        patch.setattr(file, "set", lambda kinds: ordered(set(kinds)), raising=False)
        trainer = make_trainer(model=model, max_steps=1)
        ringtile.enable(trainer, CONFIG)
        trainer.train()
        proof = first_batch_of(trainer)
        ringtile.restore(trainer)
    return proof


@pytest.mark.parametrize("family", ["gemma3", pytest.param("modernbert", marks=pytest.mark.long)])
def test_ranks_may_call_a_module_in_another_order(family):
    for proof in run_ranks(2, _in_another_order, family):
        assert proof.num_modules > 20


@pytest.mark.long
def test_ranks_with_other_hash_seeds():
    for said in hash_seeds.start([0, 1], timeout=170.0):
        assert "proved" in said, said


def _warnings_of_noise(how):
    with Messages() as said:
        trainer = make_trainer(model=_mixing_model(how), max_steps=1)
        ringtile.enable(trainer, CONFIG)
        trainer.train()
        found = first_batch_of(trainer)
        ringtile.restore(trainer)
    return list(said), found.random


@pytest.mark.parametrize("how", NOISE)
def test_modules_that_draw_are_named_and_left_out(how):
    """Their noise is of the size of what they return: no other error is seen, as is said, and none is made up."""
    for said, random in run_ranks(2, _warnings_of_noise, how):
        assert random == "model.layers.1.mlp (Mixing)"
        assert all("draws random numbers of its own" in text for text in said)


# ---- nothing of the run changes -----------------------------------------------------------------


def _dropping():
    return {"model": tiny_model(attention_dropout=0.1).train()}


def _unknown_model():
    """A layer that does not attend, and a convolution of width 1: nothing mixes tokens."""
    model = tiny_model().train()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    mlp, conv = model.model.layers[0].mlp, nn.Conv1d(32, 32, 1)
    mlp.conv = conv
    mlp.register_forward_hook(lambda module, args, x: x + conv(x.transpose(1, 2)).transpose(1, 2))
    return {"model": model}


EXACT = {
    "LoRA with dropout": {"lora": True},
    "ZeRO-3": {"engine": "ZeRO-3"},
    "packed": {"collator": packed},
    "padded left, checkpoints": {"collator": Padded("left"), "gradient_checkpointing": True},
    "experts": {"family": "mixtral-balanced"},
    "hybrid": {"family": "lfm2", "collator": packed},
    "FSDP2": {"engine": "FSDP2"},
    "mixed precision": {"bf16": True},
}


def _proved(what, options):
    """Bit for bit the run of as many ranks that was not proved."""
    config = CONFIG | {"tiled_mlp": True, "tile_tokens": 16}
    return Cell(
        what,
        options,
        config | {"first_batch_check": True},
        made=_dropping if what == "LoRA with dropout" else dict,
        alone_config=config | {"first_batch_check": False},
        processes=2,
        **{"losses": 0.0, "norms": 0.0, "weights": 0.0},
        long=what not in ("LoRA with dropout", "ZeRO-3"),
    )


def _documents(rows, ids=True, positions=False, padding=0, seq_lens=False):
    """Documents in a row, with padding behind each, by ids 1, 2, ... in attention_mask, and in other ways too."""
    batch = collections.defaultdict(list)
    ends = [0]
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"] += row["input_ids"] + [0] * padding
        batch["labels"] += [-100] + row["labels"][1:] + [-100] * padding
        batch["attention_mask"] += [number + 1 if ids else 1] * length + [0] * padding
        batch["position_ids"] += [*range(length + padding)]
        ends.append(len(batch["labels"]))
    tensors = {name: torch.tensor([x]) for name, x in batch.items() if positions or name != "position_ids"}
    if seq_lens:
        bounds = torch.tensor(ends, dtype=torch.int32)
        tensors |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        tensors |= dict.fromkeys(("max_length_q", "max_length_k"), int(bounds.diff().max()))
    return tensors


def _packed_cell(what, long=False, **how):
    """Of documents that one process has as rows of their own."""
    counts = {"include_num_input_tokens_seen": "no"}
    collator = functools.partial(_documents, **how)
    return Cell(what, counts, {"first_batch_check": True}, {"collator": collator}, {"collator": Padded()}, long=long)


def _smoothed():
    return {"parallelism_config": ParallelismConfig(cp_size=2)}


CELLS = table(
    *(_proved(what, options) for what, options in EXACT.items()),
    _packed_cell("document ids, positions that restart", long=True, positions=True),  # the next rows have either
    _packed_cell("document ids, padding between documents", padding=3),
    _packed_cell("documents said twice", ids=False, positions=True, seq_lens=True),
    Cell(
        "label smoothing on accelerate's mesh",
        {"label_smoothing_factor": 0.1},
        {"first_batch_check": True},
        {"engine": "FSDP2"},
        made=_smoothed,
        made_alone=dict,
    ),
    Cell(
        "two tokens on two ranks",  # the scores of a query that sees one key have a gradient of 0
        {"collator": lambda rows: {name: x[:, :2] for name, x in Padded()(rows).items()}, "num_rows": 24},
        {"first_batch_check": True, "tiled_loss": True},
    ),
    Cell("a model of which nothing is known", {"evaluate": True}, {"first_batch_check": True}, made=_unknown_model),
)


@pytest.mark.parametrize("cell", params(CELLS))
def test_a_proof_changes_nothing(cell):
    check(__name__, cell)


class Counting(nn.Module):
    """Keeps a count, a mean and a list of what it has seen, as batch norms and routers do."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.calls, self.seen = mlp, 0, []
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.mean.mul_(0.9).add_(0.1)
        return self.mlp(x)


def _state_at_the_first_step():
    model = tiny_model().train()
    counting = model.model.layers[0].mlp = Counting(model.model.layers[0].mlp)
    trainer = make_trainer(model=model, max_steps=1, gradient_accumulation_steps=1)
    ringtile.enable(trainer, CONFIG)
    torch.manual_seed(7)
    states = []
    step = trainer.training_step

    def training_step(*args, **kwargs):
        grads = [weight.grad for weight in model.parameters()]
        states.append((counting.calls, list(counting.seen), float(counting.mean), grads, torch.rand(())))
        return step(*args, **kwargs)

    trainer.training_step = training_step
    trainer.train()
    proof = first_batch_of(trainer)
    ringtile.restore(trainer)
    return states[0], proof


# ---- what cannot be proved ----------------------------------------------------------------------


class Own(nn.Module):
    """A user's MLP. takes: of a number of tokens, whether its kernels take so many. Counts tokens and calls."""

    def __init__(self, mlp, takes=None, log=None):
        super().__init__()
        self.mlp, self.takes, self.log, self.calls = mlp, takes, log, 0
        self.scales = self.squares = False
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x):
        if self.takes is not None and not self.takes(x.size(1)):
            raise ValueError(f"{x.size(1)} tokens do not fit")
        scale = 1 + 1e-3 * float(self.tokens) if self.scales else 1.0
        self.calls += 1
        self.tokens += x.size(0) * x.size(1) ** (2 if self.squares else 1)
        return self.mlp(x) * scale


def _is_24_or_less(tokens):
    return tokens <= 24


def _is_multiple_of_24(tokens):
    return tokens % 24 == 0


def _hidden(x):
    """A state that nothing finds: it is behind an object of a library, which is taken not to change."""
    VARIABLE.set([*VARIABLE.get(), 1])
    HIDDEN.next_log_level = getattr(HIDDEN, "next_log_level", 0) + 1
    return x * (1 + 0.1 * HIDDEN.next_log_level)


VARIABLE = contextvars.ContextVar("seen", default=())
HIDDEN = logging.getLogger("users")
OWN = {
    "a file": {"log": io.StringIO},
    "short rows": {"takes": _is_24_or_less},
    "multiples": {"takes": _is_multiple_of_24},
    "counts": {},
    "counts that are read": {"scales": True},
    "counts that do not add up": {"squares": True},
    "hidden": {},
}


def _rows_of_48(rows):
    ids = torch.tensor([(row["input_ids"] * 8)[:48] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def _of_own(what, config):
    """What is warned of, whether it was proved, and the losses; or the refusal. Cuts are of 32 of 48 tokens."""
    model, options = tiny_model().train(), dict(OWN[what])
    own = model.model.layers[0].mlp = Own(model.model.layers[0].mlp, options.get("takes"), options.get("log", list)())
    own.scales, own.squares = options.get("scales", False), options.get("squares", False)
    if what == "hidden":
        vars(HIDDEN).pop("next_log_level", None)
        model.model.norm.forward = functools.partial(_scaled, model.model.norm.forward)
    calls = []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    with pytest.MonkeyPatch.context() as patch, Messages() as said:
        patch.setattr(first_batch, "_TOKENS", 1)
        patch.setattr(first_batch, "_ROW", 32)
        trainer = make_trainer(model=model, max_steps=2, gradient_accumulation_steps=1, collator=_rows_of_48)
        try:
            ringtile.enable(trainer, CONFIG | config)
            trainer.train()
        except ringtile.RefusedError as error:
            return [str(error)], False, [], []
        finally:
            proof = first_batch_of(trainer)
            ringtile.restore(trainer)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    state = [own.calls, float(own.tokens), len(calls)]
    return list(said), proof is not None, losses, state


def _scaled(forward, x):
    return _hidden(forward(x))


TOKENS = "LlamaForCausalLM.model.layers.0.mlp.tokens"
REFUSED = {"counts that are read": f"reads {TOKENS}", "counts that do not add up": f"{TOKENS}, which a forward"}
UNPROVED = {"a file": "log is a StringIO", "short rows": "fails in one process (ValueError: 48 tokens do not fit)"}


def _all_of_own():
    ways = {what: ["auto", False] for what in OWN} | {what: ["auto"] for what in REFUSED}
    ways |= {what: ["auto", "require", False] for what in (*UNPROVED, "hidden")}
    with without_other_tests(__name__):
        return {what: {how: _of_own(what, {"first_batch_check": how}) for how in ways[what]} for what in OWN}


def test_a_check_of_the_users_code_changes_nothing_and_stops_only_what_differs():
    ranks = run_ranks(2, _all_of_own, timeout=300.0)
    assert any("gave other bits, first in model.norm" in text for text in ranks[0]["hidden"]["auto"][0])
    for found in ranks:
        for what, runs in found.items():
            (said, proved, losses, state), required, off = runs["auto"], runs.get("require"), runs.get(False)
            if what in REFUSED:
                assert "compute what one process computes" in said[0], said
                assert REFUSED[what] in said[0], said
                continue
            assert off[0] == [], what
            if what != "hidden":
                assert (losses, state) == (off[2], off[3]), what
            assert len(off[2]) == 2
            if what in UNPROVED:
                assert not proved
                assert required[0][0].startswith("the first batch proves nothing: "), required
                assert UNPROVED[what] in required[0][0]
                assert all("unproved" in text and UNPROVED[what] in text for text in said)
            else:
                assert proved
            if what == "counts":
                assert all(f"writes a part of {TOKENS}" in text for text in said)
            if what == "hidden":
                assert "gave other bits, first in model.norm" in required[0][0]


def _refused_in_the_second_step():
    model = _mixing_model("cumsum")
    trainer = make_trainer(model=model, max_steps=2)

    _in_forward(lambda model, outputs: torch.inf if trainer.state.global_step == 0 else 0.0, model)
    return failure_of(trainer), trainer.state.global_step


def test_a_loss_that_is_not_finite_leaves_the_proof_to_the_next_batch():
    for message, step in run_ranks(2, _refused_in_the_second_step):
        assert "model.layers.1.mlp (Mixing)" in message
        assert step == 1


def test_a_proof_leaves_no_trace_in_the_model():
    for (calls, seen, mean, grads, _), proof in run_ranks(2, _state_at_the_first_step):
        assert (calls, seen, mean) == (0, [], 0.0)
        assert all(grad is None for grad in grads)
        assert proof.num_modules > 20
        assert 0.0 < proof.largest < TIMES


# ---- evaluation ---------------------------------------------------------------------------------


def _refusal_of_evaluation(how):
    return failure_of(make_trainer(model=_mixing_model(how)), use=Trainer.evaluate)


def test_a_first_evaluation_is_proved():
    for message in run_ranks(2, _refusal_of_evaluation, "cumsum"):
        assert "model.layers.1.mlp (Mixing)" in message


def _switched_off(how):
    trainer = make_trainer(model=_mixing_model(how), max_steps=1)
    ringtile.enable(trainer, CONFIG | {"first_batch_check": False})
    trainer.train()
    ringtile.restore(trainer)
    return trainer.state.global_step


def test_the_proof_can_be_switched_off():
    assert run_ranks(2, _switched_off, "cumsum") == [1, 1]


# ---- the cut ------------------------------------------------------------------------------------


def test_cut_keeps_an_edge_of_documents_and_targets():
    lengths = torch.tensor([3000, 5000])
    position_ids = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    labels = torch.full((1, 8000), -100)
    labels[:, 2900:3000] = 7
    batch = {
        "input_ids": torch.arange(8000)[None],
        "labels": labels,
        "position_ids": position_ids,
        "cu_seq_lens_q": torch.tensor([0, 3000, 8000], dtype=torch.int32),
        "max_length_q": 5000,
    }
    cut = cut_batch(batch, 32)
    assert cut["input_ids"].tolist() == [list(range(3000 - 256, 3000 + 256))]
    assert cut["cu_seq_lens_q"].tolist() == [0, 256, 512]
    assert cut["max_length_q"] == 256
    assert (cut["labels"] == 7).sum() == 100
    assert torch.equal(cut["position_ids"], position_ids[:, 3000 - 256 : 3000 + 256])


def test_cut_shows_the_first_targets_of_each_row():
    labels = torch.full((2, 4000), -100)
    labels[0, 3500:], labels[1, 10:] = 5, 5
    cut = cut_batch({"input_ids": torch.arange(8000).view(2, -1), "labels": labels}, 32)
    assert cut["input_ids"].shape == (2, 256)
    assert (cut["labels"] == 5).any(1).all()


def test_cut_at_targets_shows_where_rows_of_a_prompt_part():
    labels, mask = torch.full((2, 4000), -100), torch.ones(2, 4000, dtype=torch.int64)
    labels[:, 1000:] = 5
    mask[0, 3000:], mask[1, 2000:] = 0, 0  # edges behind the targets
    batch = {"input_ids": torch.arange(4000).expand(2, -1), "labels": labels, "attention_mask": mask}
    of_rows = cut_batch(batch | {"tasks": batch["input_ids"]}, 32, per_row={"tasks"})
    assert torch.equal(of_rows["tasks"], batch["input_ids"])
    cut = cut_batch(batch, 32, at_targets=True)
    assert torch.equal(cut["input_ids"][0], cut["input_ids"][1])
    assert (cut["labels"] == -100).any(1).all()
    assert cut_batch(batch, 32)["input_ids"][:, 0].tolist() == [3000 - 128, 2000 - 128]


def test_cut_has_a_multiple_of_what_is_declared():
    batch = {"input_ids": torch.arange(8000).view(2, -1)}
    assert cut_batch(batch, 32, multiple=384)["input_ids"].shape == (2, 384)
    assert cut_batch(batch, 32, multiple=1024)["input_ids"].shape == (2, 1024)


def test_cut_leaves_short_batches_and_other_tensors():
    batch = {"input_ids": torch.ones(2, 40), "weights": torch.ones(2), "names": ["a", "b"]}
    assert cut_batch(batch, 32) == batch


# ---- plain PyTorch ------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, mixes: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(96, 32), nn.Embedding(1024, 32)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 96)
        self.mixes = mixes

    def forward(self, ids, positions):
        x = self.embed(ids) + self.position(positions)
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + x.mean(1, keepdim=True) if self.mixes else x)


def _batch(seq_len=600, ignored=0):
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 96, (2, seq_len), generator=generator) for _ in range(2))
    labels[:, :ignored] = -100
    return {"ids": ids, "labels": labels, "positions": torch.arange(seq_len).expand(2, -1).contiguous()}


def _loss(model, batch):
    logits = model(batch["ids"], batch["positions"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _mean_by_hand(model, batch):
    logits, labels = model(batch["ids"], batch["positions"]), batch["labels"]
    return -logits.log_softmax(-1).gather(-1, labels.clamp(0)[..., None])[labels != -100].mean()


def _checked(mixes=False, ignored=0, loss=_loss, **options):
    net, batch = Net(mixes), _batch(ignored=ignored)
    kept = {name: x.clone() for name, x in batch.items()}
    try:
        found = ringtile.check_first_batch(net, batch, loss, dist.group.WORLD, **options)
    except ringtile.RefusedError as error:
        found = str(error)
    assert all(torch.equal(kept[name], batch[name]) for name in kept)
    assert all(weight.grad is None for weight in net.parameters())
    return found


def test_a_proof_that_is_over_reads_no_count():
    """Of items on a GPU, for which the host would wait in each micro-batch."""

    class Unread:
        def __int__(self):
            raise AssertionError

    proof = first_batch.FirstBatch(None)
    proof._trained = True
    proof.before(None, {}, None, num_items=Unread())


def test_check_of_a_plain_loop():
    mask = ringtile.IntervalMask.documents([100, 300, 200])
    for options in ({}, {"layout": "contiguous"}, {"scheme": "ulysses"}, {"mask": mask}):
        for found in run_ranks(2, _checked, **options):
            assert found.num_modules == 6
            assert 0.0 < found.largest < TIMES


def test_check_names_a_module_and_a_loss():
    for message in run_ranks(2, _checked, mixes=True):
        assert "what Net hands to its head" in message
    # More targets on one rank than on the other.
    for loss in (_mean_by_hand, _loss):
        for message in run_ranks(2, _checked, ignored=100, loss=loss):
            assert "the loss is" in message


def _checked_in_block(mixes):
    net, batch = Net(mixes), _batch(64)
    with ringtile.context_parallel(
        dist.group.WORLD, buffers=list(batch.values()), buffer_seq_dims=[1] * 3, check=(net, lambda: _loss(net, batch))
    ):
        _loss(net, batch).backward()
    return float(net.head.weight.grad.norm())


def test_context_parallel_checks_its_first_block():
    assert all(norm > 0.0 for norm in run_ranks(2, _checked_in_block, False))
    with pytest.raises(ringtile.RefusedError, match="what Net hands to its head"):
        run_ranks(2, _checked_in_block, True)
