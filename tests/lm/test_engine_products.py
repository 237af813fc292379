"""Products through oneDNN: those of torch.nn.functional.linear with its gradient, wherever they are used."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from apportion.lm import products


@pytest.fixture(params=[True, False], ids=["oneDNN", "PyTorch's own"])
def way(request, monkeypatch):
    if request.param and not products.wide():
        pytest.skip("no AVX-512, so no oneDNN")
    monkeypatch.setattr(products, "wide", lambda: request.param)


@pytest.mark.parametrize("shape", [(7,), (1, 5), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trained", ["x", "weight", "x weight bias"])
def test_a_layer_is_torchs(way, shape, bias, trained):
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=draw) for s in ((*shape, 6), (9, 6), (9,))]
    found, wanted = (
        [t.clone().requires_grad_(n in trained.split()) for t, n in zip(given, ("x", "weight", "bias"), strict=True)]
        for _ in range(2)
    )
    ours = products.linear(found[0], found[1], found[2] if bias else None)
    plain = torch.nn.functional.linear(wanted[0], wanted[1], wanted[2] if bias else None)
    torch.testing.assert_close(ours, plain)
    with torch.no_grad():
        torch.testing.assert_close(products.linear(found[0], found[1], found[2] if bias else None), plain.detach())
    slope = torch.randn(ours.shape, generator=draw)
    ours.backward(slope)
    plain.backward(slope)
    for a, b in zip(found, wanted, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_layouts_and_16_bit_numbers(way):
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 8, generator=draw), torch.randn(8, 3, generator=draw)
    torch.testing.assert_close(products.multiply(x, w.T), x @ w)
    torch.testing.assert_close(products.multiply(x[:, :3], w[:, 1:].T[:, :3]), x[:, :3] @ w[:3, 1:])
    half = products.linear(x.bfloat16(), w.T.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, torch.nn.functional.linear(x.bfloat16(), w.T.bfloat16()))


def test_a_version_without_the_operator_multiplies_plainly(monkeypatch):
    def absent(*_):
        raise AttributeError("no such operator")

    monkeypatch.setattr(products, "_multiply", absent)
    products.wide.cache_clear()
    assert not products.wide()
    assert products.linear(torch.ones(2, 3), torch.ones(4, 3)).tolist() == [[3.0] * 4] * 2
    monkeypatch.undo()
    products.wide.cache_clear()
