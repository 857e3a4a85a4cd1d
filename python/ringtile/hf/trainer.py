"""`ringtile.enable`, `restore` and `ringtile.auto`: exact context parallelism, tiling and offloading for a Trainer."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import Trainer

from ringtile.errors import ConfigError, InputError
from ringtile.first_batch.compare import Comparison
from ringtile.hf import model, trainers
from ringtile.hf.config import Config
from ringtile.hf.feature import Enabled
from ringtile.hf.features import dynamic, loss, mlp, norm, offload, recurrent, stream, trees
from ringtile.hf.features.rollouts import LossOnRollouts
from ringtile.hf.first_batch import FirstBatch
from ringtile.hf.group import deepspeed_shards_sequences, failures_told
from ringtile.hf.liger import apply_liger
from ringtile.hf.loss import ShardedLoss
from ringtile.hf.loss_on_sequences import LossOnSequences
from ringtile.hf.loss_on_shards import LossOnShards
from ringtile.hf.patches import Patches
from ringtile.hf.tiled_forward import is_tiled

logger = logging.getLogger("ringtile")


class _Session(NamedTuple):
    """An enabled Trainer's configuration, and the record of everything replaced."""

    config: Config
    patches: Patches
    first_batch: FirstBatch | None  # None: nothing is sharded, or it is not to be checked
    trainer: weakref.ref[Trainer]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what stands for it where a model that holds it is pickled: None."""
        return type(None), ()


# Whether a sequence is sharded or not.
FEATURES = tuple(each.FEATURE for each in (stream, mlp, norm, loss, offload, trees, dynamic))
_VARIABLE = "RINGTILE_CONFIG"
_USES = ("train", "evaluate", "predict")  # methods that an enabled Trainer runs otherwise
_SESSION = "_ringtile_session"  # the attribute of an enabled Trainer, and of its model, that holds its _Session
_ENDED = "_ringtile_ended"  # of a Trainer whose model another one has taken over: the Patches that make it refuse


def enable(trainer: Trainer, config: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Patches:
    """Switch on what `config` asks for, on this Trainer only; call it before train() or evaluate(), on every rank.

    ringtile.enable(trainer, {"context_parallel_size": 2, "tiled_mlp": True})
    trainer.train()  # under torchrun

    config: a Config, a mapping of its keys, or the path of a YAML file. Without context_parallel_size, the size comes
    from accelerate's ParallelismConfig(cp_size=...). Where it asks for nothing, nothing is replaced. Returns the record
    of everything replaced, which `ringtile.restore(trainer)` undoes; enabling again with the same config does nothing.
    Raises ConfigError (also for a second, different config), RefusedError for what would not be exact, InputError.
    """
    if not isinstance(trainer, Trainer):
        raise InputError(f"trainer is a {type(trainer).__name__}; expected a transformers.Trainer")
    if not isinstance(config, Config | Mapping | str | os.PathLike):
        raise InputError(
            f"config is a {type(config).__name__}; expected a ringtile.Config, a mapping of its keys, or the path of a "
            f"YAML file"
        )
    with failures_told(trainer.args.ddp_timeout):
        config = _with_size(Config.load(config), trainer)
    enabled: _Session | None = vars(trainer).get(_SESSION)
    if enabled is not None:
        if enabled.config != config:
            raise ConfigError(
                f"this Trainer is already enabled with {enabled.config}; expected the same configuration again: call "
                f"ringtile.restore(trainer) first to change it"
            )
        return enabled.patches
    if not config.asks:
        if trainer.args.process_index == 0 and trainer.model is not None and recurrent.recurs(trainer.model):
            recurrent.warn_of_joined_documents(trainer.model)
        return Patches()
    if (ended := vars(trainer).pop(_ENDED, None)) is not None:
        ended.restore()
    shares = config.context_parallel_size > 1
    with failures_told(trainer.args.ddp_timeout) if shares else contextlib.nullcontext():
        patches = Patches.of(lambda patches: _install(trainer, config, patches))
    if trainer.args.process_index == 0:
        logger.info("ringtile: %d ranks, %d share a sequence", trainer.args.world_size, config.context_parallel_size)
        trainers.warn_of_untried()
    return patches


def first_batch_of(trainer: Trainer) -> Comparison | None:
    """What the first batch of an enabled Trainer has proved; None if it has not come yet, or is not checked."""
    session: _Session | None = vars(trainer).get(_SESSION)
    return None if session is None or session.first_batch is None else session.first_batch.comparison


def restore(trainer: Trainer | nn.Module) -> None:
    """Put back every object that `enable` replaced. Do nothing on a Trainer that is not enabled.

    trainer: or its model, where the Trainer is gone, as after a cell of a notebook that was interrupted.
    """
    session: _Session | None = vars(trainer).get(_SESSION)
    if session is not None:
        session.patches.restore()


def _end_other_session(base: nn.Module) -> None:
    """Undo what another Trainer tiled in this model, which can be tiled once; that Trainer refuses to go on."""
    session: _Session | None = vars(base).get(_SESSION)
    if session is None or not any(map(is_tiled, base.modules())):
        return
    session.patches.restore()
    logger.warning("the model was tiled for another Trainer, which ringtile.enable has restored; this one takes over")

    def refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "ringtile.enable was called for the model of this Trainer on another one, which ended this one's; call it "
            "on this Trainer again"
        )

    if (ended := session.trainer()) is not None:
        patches = Patches()
        for name in _USES:
            patches.wrap(ended, name, refuse)
        setattr(ended, _ENDED, patches)


def enable_every_trainer() -> Patches:
    """Makes every Trainer enable ringtile when it is built, with the YAML file that RINGTILE_CONFIG names.

    The variable is read here, once. `restore()` on the returned record leaves later Trainers alone.
    Raises ConfigError when the variable is unset or the file is not a configuration.
    """
    path = os.environ.get(_VARIABLE)
    if not path:
        raise ConfigError(f"{_VARIABLE} is not set; expected the path of a YAML file with ringtile's keys")
    config = Config.load(path)
    original = Trainer.__init__

    @functools.wraps(original)
    def construct(self: Trainer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self).__init__ is Trainer.__init__:
            enable(self, config)
        else:
            _enable_when_used(self, config)

    patches = Patches()
    patches.set(Trainer, "__init__", construct)
    return patches


def _with_size(config: Config, trainer: Trainer) -> Config:
    """The configuration with a context_parallel_size: its own, or ParallelismConfig.cp_size, or 1.

    Raises ConfigError where the two differ, or accelerate's contradicts another key.
    """
    parallelism, size = trainer.accelerator.parallelism_config, config.context_parallel_size
    theirs = parallelism.cp_size if parallelism is not None and parallelism.cp_enabled else size
    if config.dynamic_context_parallel and size == theirs == 1 and "context_parallel_size" not in config.given:
        theirs = trainer.args.world_size // trainer.get_tp_size()
    if "context_parallel_size" not in config.given:
        return Config(**config.given, context_parallel_size=theirs)
    if size != theirs:
        raise ConfigError(
            f"context_parallel_size is {size} but ParallelismConfig.cp_size is {theirs}; expected the same size: set "
            f"only one of them, or both alike"
        )
    return config


def _install(trainer: Trainer, config: Config, patches: Patches) -> None:
    base = model.base_model(trainer.model)
    assert trainer.model is not None  # base_model has refused it otherwise
    if config.tiled_mlp or config.tiled_norm or config.stream:
        _end_other_session(base)
    run = Enabled(trainer, trainer.model, base, config)
    trainers.check_experts(trainer)
    features = [each for each in FEATURES if getattr(config, each.key)]
    for feature in features:
        feature.refuse(run)
    apply_liger(trainer, patches)
    for feature in features:
        feature.install(run, patches)
    first_batch = None
    if config.attends and not deepspeed_shards_sequences(trainer.accelerator):
        first_batch = _shard(run, patches).proof
    elif config.asks and not config.attends:
        recurrent.keep_documents_apart(run, patches)
    session = _Session(config, patches, first_batch, weakref.ref(trainer))
    patches.set(trainer, _SESSION, session)
    for each in {base, trainer.model}:
        vars(each)[_SESSION] = session
        patches.on_restore(functools.partial(vars(each).pop, _SESSION, None))


def _shard(run: Enabled, patches: Patches) -> ShardedLoss:
    """Makes the Trainer compute its loss on sharded sequences."""
    trainers.check_trainer(run.trainer)
    kind = LossOnSequences if trainers.needs_full_sequences(run.trainer) else LossOnShards
    sharded: ShardedLoss = (LossOnRollouts if trainers.generates(run.trainer) else kind)(run, patches)
    sharded.install()
    return sharded


def _enable_when_used(trainer: Trainer, config: Config) -> None:
    """For a subclass, whose own __init__ goes on: TRL's makes reference models, and draws seeds, after Trainer's."""
    until_used = Patches()

    def use(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        until_used.restore()
        try:
            enable(trainer, config)
        except BaseException:
            _enable_when_used(trainer, config)  # the next use must not run without ringtile
            raise
        return getattr(trainer, original.__name__)(*args, **kwargs)

    for name in _USES:
        until_used.wrap(trainer, name, use)
