"""What the user's code writes in a forward pass is put back after the first batch, or said."""

import array
import collections
import contextvars
import csv
import ctypes
import dataclasses
import enum
import functools
import io
import itertools
import logging
import queue
import random
import socket
import threading
import types
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hf_models import tiny_model
from hf_training import without_other_tests
from ringtile.first_batch.own import own_code
from ringtile.first_batch.state import State
from torch import nn
from transformers import PretrainedConfig

ELSEWHERE = types.ModuleType("users_module")
ELSEWHERE.n = 0
exec("def bump():\n    global n\n    n += 1", vars(ELSEWHERE))


class Stats:
    n, seen = 0, []


class Sub(Stats):
    pass


class Slotted:
    __slots__ = ("__n", "n")

    def __init__(self):
        self.n, self.__n = 0, 0

    def count(self):
        self.n += 1
        self.__n += 1
        return self.__n


@dataclasses.dataclass(slots=True)
class Data:
    n: int = 0


class Color(enum.Enum):
    RED = 1


class Listed(collections.UserList):
    """A list of one's own, and a property over a slot."""

    @property
    def n(self):
        return SLOTTED.n


class Counting(logging.Handler):
    n = 0

    def emit(self, record):
        self.n += 1


class Function(torch.autograd.Function):
    n = 0


def attribute():
    attribute.n = getattr(attribute, "n", 0) + 1
    return attribute.n


def _closed():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


@functools.lru_cache
def drawn():
    return random.random()


def defaulted(seen=[]):  # noqa: B006
    seen.append(1)
    return len(seen)


N, SLOTTED, DATA, CLOSED, TOTALS = 0, Slotted(), Data(), _closed(), {"n": [0]}
VARIABLE = contextvars.ContextVar("n", default=0)
LOCAL, WEAK, USER_DICT = threading.local(), weakref.WeakKeyDictionary(), collections.UserDict(n=0)
LOCAL.n = 0
C_INT, ARRAY, BYTES, NUMBERS = ctypes.c_int(0), array.array("d", [0]), bytearray(1), np.zeros(2)
LISTED, REF = Listed([0]), weakref.ref(HELD := Stats())
QUEUE, LAST = collections.deque([0], maxlen=1), torch.zeros(2)
TORCHS, PYTHONS, NUMPYS = torch.Generator(), random.Random(0), np.random.default_rng(0)
ITERATOR, GENERATOR, FILE, WRITER = itertools.count(), (x for x in range(99)), io.StringIO(), csv.writer(io.StringIO())
SEEDS, PARTIAL, EMA = np.random.SeedSequence(0), functools.partial(print), nn.Linear(1, 1, bias=False)
LOGGER, METER = logging.getLogger("users.own"), nn.Module()
METER.total, METER.n = torch.zeros(1), 0
SOCKET, THREAD, QUEUED = socket.socket(), threading.Thread(target=print), queue.Queue()


def _global():
    global N
    N += 1
    return N


def _add(held, name="n"):
    setattr(held, name, getattr(held, name, 0) + 1)
    return getattr(held, name)


def _entry(held, key="n"):
    held[key] = (held.get(key, 0) if hasattr(held, "get") else held[key]) + 1
    return held[key]


def _in_list(held):
    held.append(1)
    return len(held)


# How a module's forward counts: what it writes, and what reads that without writing.
PUT_BACK = {
    "a global": (lambda m: _global(), lambda m: N),
    "an attribute of a class": (lambda m: _add(Stats), lambda m: Stats.n),
    "a list of a class": (lambda m: _in_list(Stats.seen), lambda m: len(Stats.seen)),
    "an inherited attribute": (lambda m: _add(Sub), lambda m: vars(Sub).get("n")),
    "a Python module": (lambda m: _add(ELSEWHERE), lambda m: ELSEWHERE.n),
    "a Python module's function": (lambda m: ELSEWHERE.bump(), lambda m: ELSEWHERE.n),
    "a function's attribute": (lambda m: attribute(), lambda m: getattr(attribute, "n", 0)),
    "a closure": (lambda m: CLOSED(), lambda m: CLOSED.__closure__[0].cell_contents),
    "slots": (lambda m: SLOTTED.count(), lambda m: (SLOTTED.n, SLOTTED._Slotted__n)),
    "a dataclass": (lambda m: _add(DATA), lambda m: DATA.n),
    "an enum": (lambda m: _add(Color.RED), lambda m: getattr(Color.RED, "n", 0)),
    "an autograd function": (lambda m: _add(Function), lambda m: Function.n),
    "nested containers": (lambda m: _entry(TOTALS["n"], 0), lambda m: TOTALS["n"][0]),
    "a list of one's own": (lambda m: _entry(LISTED, 0), lambda m: (LISTED[0], LISTED.n)),
    "a weak reference": (lambda m: _add(REF()), lambda m: REF().n),
    "an attribute of a partial": (lambda m: _add(PARTIAL), lambda m: getattr(PARTIAL, "n", 0)),
    "a default list": (lambda m: defaulted(), lambda m: len(defaulted.__defaults__[0])),
    "an average of weights": (lambda m: EMA.weight.data.mul_(0.5), lambda m: float(EMA.weight)),
    "a meter that is a module": (lambda m: (METER.total.add_(1), _add(METER)), lambda m: (float(METER.total), METER.n)),
    "a deque": (lambda m: QUEUE.append(QUEUE[0] + 1), lambda m: QUEUE[0]),
    "a tensor": (lambda m: LAST.add_(1), lambda m: float(LAST[0])),
    "an array": (lambda m: NUMBERS.__iadd__(1), lambda m: NUMBERS[1]),
    "array.array": (lambda m: _entry(ARRAY, 0), lambda m: ARRAY[0]),
    "a bytearray": (lambda m: _entry(BYTES, 0), lambda m: BYTES[0]),
    "threading.local": (lambda m: _add(LOCAL), lambda m: LOCAL.n),
    "WeakKeyDictionary": (lambda m: _entry(WEAK, m), lambda m: WEAK.get(m)),
    "UserDict": (lambda m: _entry(USER_DICT), lambda m: USER_DICT["n"]),
    "torch.Generator": (lambda m: torch.rand(1, generator=TORCHS), lambda m: TORCHS.get_state().tolist()),
    "random.Random": (lambda m: PYTHONS.random(), lambda m: PYTHONS.getstate()),
    "a Generator of numpy": (lambda m: NUMPYS.random(), lambda m: NUMPYS.bit_generator.state),
    "default generators": (
        lambda m: (torch.rand(1), random.random()),
        lambda m: (torch.get_rng_state().tolist(), random.getstate()),
    ),
    "lru_cache": (lambda m: drawn(), lambda m: drawn.cache_info()),
    "an attribute": (lambda m: _add(m), lambda m: getattr(m, "n", 0)),
    "an underscored attribute": (lambda m: _add(m, "_n"), lambda m: getattr(m, "_n", 0)),
    "a configuration": (lambda m: _add(m.config, "my_n"), lambda m: getattr(m.config, "my_n", 0)),
    "a buffer": (lambda m: m.count.add_(1), lambda m: float(m.count)),
    "a weight": (lambda m: m.weight.data.mul_(0.98), lambda m: float(m.weight)),
}
SAID = {
    "an iterator": lambda m: next(ITERATOR),
    "a generator": lambda m: next(GENERATOR),
    "a file": lambda m: FILE.write("x"),
    "a CSV writer": lambda m: WRITER.writerow([1]),
    "a seed sequence": lambda m: SEEDS.spawn(1),
    "a handler of logs": lambda m: LOGGER.warning("x"),
    "a socket": lambda m: SOCKET.fileno(),
    "a thread": lambda m: THREAD.is_alive(),
    "a queue": lambda m: QUEUED.qsize(),
    "ctypes": lambda m: _add(C_INT, "value"),
    "an iterator of its own": lambda m: next(m.lines),
}


class Own(nn.Module):
    """A module whose forward is one of the functions above."""

    def __init__(self, forward):
        super().__init__()
        self.weight, self.config, self.lines = nn.Parameter(torch.ones(())), PretrainedConfig(), None
        self.register_buffer("count", torch.zeros(()))
        self.forward = forward


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with without_other_tests(__name__):
        yield


@pytest.mark.parametrize("what", PUT_BACK)
def test_what_a_forward_writes_is_put_back(what):
    forward, read = PUT_BACK[what]
    model = nn.Sequential(Own(forward))
    drawn.cache_clear()
    before = read(model[0])
    state = State(model, own_code(model, [Link(None)]))  # an object may stand for a function of attention
    assert not state.unknown
    for _ in range(2):
        forward(model[0])
        forward(model[0])
        assert repr(read(model[0])) != repr(before)
        state.restore()
        assert repr(read(model[0])) == repr(before)
    assert not state.lost


@pytest.mark.parametrize("what", SAID)
def test_what_cannot_be_put_back_is_said(what):
    model = nn.Sequential(Own(SAID[what]))
    if what == "a handler of logs":
        LOGGER.addHandler(Counting())
    if what == "an iterator of its own":
        model[0].lines = iter([1, 2])
    assert State(model, own_code(model)).unknown


def test_a_function_of_the_users_in_a_librarys_class_is_followed(monkeypatch):
    """As Liger patches classes; what it closes over is put back."""
    generator = torch.Generator()
    monkeypatch.setattr(nn.Identity, "forward", lambda self, x: (_global(), torch.rand(1, generator=generator))[1])
    model = nn.Sequential(nn.Identity())
    state, before = State(model, own_code(model)), (N, generator.get_state().tolist())
    model(None)
    assert (N, generator.get_state().tolist()) != before
    state.restore()
    assert (N, generator.get_state().tolist()) == before


def test_a_writer_of_summaries_is_said(tmp_path):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(tmp_path)
    model = nn.Sequential(Own(lambda m: writer.add_scalar("x", 0.0)))
    assert "SummaryWriter" in State(model, own_code(model)).unknown
    writer.close()


def test_a_weight_that_is_too_large_to_keep_is_said(monkeypatch):
    monkeypatch.setattr("ringtile.first_batch.state._LARGEST", 0)
    model = nn.Sequential(Own(lambda m: m.weight.data.mul_(0.98)))
    state = State(model, own_code(model))
    with torch.no_grad():
        model[0].weight.mul_(0.98)
    state.restore()
    assert "weight" in state.lost


def test_without_code_of_the_users_nothing_of_theirs_is_touched():
    model = tiny_model().train()
    assert own_code(model) == []
    Stats.n = 1
    state = State(model, [])
    Stats.n, model.model.layers[0].lines = 2, iter([1])
    state.restore()
    assert Stats.n == 2
    assert not state.unknown


class Link:
    def __init__(self, behind):
        self.behind, self.n = behind, 0


def test_long_chains_of_functions_are_no_trouble():
    """Each of which names the next one; the last one names a file."""
    text = "\n".join(f"def f{i}():\n    return f{i + 1}()" for i in range(2000)) + "\ndef f2000():\n    FILE.write('')"
    space = {"__name__": __name__, "FILE": io.StringIO()}
    exec(text, space)
    model = nn.Sequential(Own(space["f0"]))
    assert State(model, own_code(model)).unknown == f"{__name__}.FILE is a StringIO"


def test_long_chains_and_large_arrays_of_the_users_are_no_trouble(monkeypatch):
    monkeypatch.setattr("ringtile.first_batch.state._LARGEST", 1 << 10)
    module = Own(lambda m: _add(m.last))
    module.last = None
    for _ in range(5000):
        module.last = Link(module.last)
    state = State(module, own_code(module))
    assert not state.unknown
    module.forward(module)
    state.restore()
    assert module.last.n == 0
    module.data = np.zeros(1 << 10)
    assert State(module, own_code(module)).unknown == "Own.data is a ndarray"
