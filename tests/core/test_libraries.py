"""The same arithmetic in every array library: array-api-strict, NumPy, JAX (also under `jit`) and torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from apportion.core import catalogue as c
from apportion.core.parts import (
    KL,
    BatchStd,
    Cap,
    Clip,
    Constant,
    KeepAccepted,
    LeaveOneOut,
    SequenceMean,
    SequenceRatio,
    SiblingMean,
    Total,
)
from apportion.core.rollouts import Rollouts
from apportion.core.weigh import Ledger, advantages, weights
from core.books import for_method, rollouts

OTHERS = [
    c.ppo.replace(trust=Clip(0.2, 0.2, dual=1.5), scale=BatchStd(center=False)),
    c.cispo.replace(trust=Cap(high=1.2, low=0.8), baseline=LeaveOneOut(), aggregate=Constant(7.0)),
    c.grpo.replace(kl=KL("loss", "k3", beta=0.1, corrected=True), ratio=SequenceRatio(geometric=False)),
    c.rloo.replace(kl=KL("reward", "k2"), aggregate=SequenceMean()),
    c.gpg.replace(baseline=SiblingMean(leave_one_out=True)),
    c.reinforce.replace(credit=Total(gamma=0.9)).set("sampler.keep", KeepAccepted()),
]
METHODS = [*c.METHODS.values(), *OTHERS]
ROWS = [f.name for f in fields(Ledger)]


def compute(method: Any, book: dict[str, Any], convert: Any) -> dict[str, Any]:
    """Every row of the final ledger."""
    ledger = weights(method, advantages(method, rollouts(book, convert)), convert(book["logp"]))
    return {name: getattr(ledger, name) for name in ROWS if getattr(ledger, name) is not None}


def converter(library: Any, dtype: str) -> Any:
    """NumPy array to the library's, floats in `dtype`."""

    def convert(x: np.ndarray) -> Any:
        return library.asarray(x.astype(dtype) if x.dtype.kind == "f" else x)

    return convert


def agree(ours: dict[str, Any], numpy: dict[str, Any], dtype: str) -> None:
    assert ours.keys() == numpy.keys()
    tolerance = 1e-12 if dtype == "float64" else 2e-4
    for name, x in ours.items():
        if name != "mask":
            assert str(x.dtype).endswith(dtype), f"{name} is {x.dtype}, not {dtype}"
        np.testing.assert_allclose(np.asarray(x), numpy[name], rtol=tolerance, atol=tolerance, err_msg=name)


def books(method: Any) -> list[dict[str, Any]]:
    """Ragged with a row unscored; and the same with the mass of each group given."""
    first, second = for_method(method, 1), for_method(method, 2)
    first["scored"] = np.arange(first["mask"].shape[1])[None] + np.zeros((3, 1)) != 1
    second["mass"] = np.array([0.5, 0.3, 0.2])
    return [first, second]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", ["array_api_strict", "numpy", "torch", "jax.numpy"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_libraries_agree_and_keep_the_type(method, library, dtype):
    import jax

    xp = pytest.importorskip(library)
    with jax.enable_x64(dtype == "float64" and library == "jax.numpy"):
        for book in books(method)[: 1 if library == "jax.numpy" else 2]:
            reference = compute(method, book, lambda x: x)
            agree(compute(method, book, converter(xp, dtype)), reference, dtype)


def test_one_jitted_program_for_the_whole_family():
    """Both halves trace without a concrete value; all methods in one program, so that it compiles once."""
    import jax

    pairs = [(m, books(m)[1]) for m in METHODS]

    @jax.jit
    def run(arrays):
        return [compute(m, b | a, lambda x: x) for (m, b), a in zip(pairs, arrays, strict=True)]

    with jax.enable_x64(True):
        arrays = [{k: v for k, v in b.items() if isinstance(v, np.ndarray)} for _, b in pairs]
        for (method, book), ours in zip(pairs, run(arrays), strict=True):
            agree(ours, compute(method, book, lambda x: x), "float64")


def test_beta_may_be_traced():
    import jax

    book = for_method(c.grpo, 0)
    with jax.enable_x64(True):

        @jax.jit
        def w(beta):
            r = rollouts(book, jax.numpy.asarray)
            return weights(c.grpo, advantages(c.grpo, r, beta), jax.numpy.asarray(book["logp"]), beta).w

        ledger = advantages(c.grpo, rollouts(book), 0.3)
        np.testing.assert_allclose(w(0.3), weights(c.grpo, ledger, book["logp"], 0.3).w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_torch_weights_carry_no_gradient_of_the_arithmetic_when_detached(method):
    """The one loss line: gradient of -(sg[w] · log pi).sum() is -w exactly."""
    torch = pytest.importorskip("torch")
    book = for_method(method, 0)
    logp = torch.from_numpy(book["logp"]).requires_grad_()
    ledger = advantages(method, rollouts(book, torch.from_numpy))
    w = weights(method, ledger, logp.detach()).w
    assert not w.requires_grad
    (-(w * logp).sum()).backward()
    np.testing.assert_array_equal(logp.grad, -w)


def test_the_rollouts_are_not_touched():
    book = for_method(c.grpo, 5)
    before = {k: v.copy() for k, v in book.items() if isinstance(v, np.ndarray)}
    for method in METHODS:
        if method is not c.dpo:
            compute(method, book, lambda x: x)
    for name, x in before.items():
        np.testing.assert_array_equal(book[name], x)
    with pytest.raises(AttributeError):
        Rollouts(book["reward"], book["mask"], book["logq"]).reward = 0
