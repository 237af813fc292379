"""Layers put in place of a model's own: the same results and gradients, and none where a model computes otherwise."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from apportion.lm import layers, packing, tiny
from lm import plain

DTYPES = [torch.float32, torch.bfloat16]


def kinds(model):
    return {type(m) for m in model.modules() if hasattr(m, "instead_of")}


def test_a_models_layers_stay_what_they_are():
    made = tiny.model(width=32)
    assert kinds(made.model) == {layers.Linear, layers.RMSNorm, layers.Gated}
    linear = made.model.model.layers[0].mlp.up_proj
    assert isinstance(linear, torch.nn.Linear)
    assert repr(linear).startswith("Linear(in_features=32")
    again = copy.deepcopy(made.model)
    assert kinds(again) == kinds(made.model)
    assert again.state_dict().keys() == made.model.state_dict().keys()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients_are_the_models_own(dtype):
    """Each layer by itself, against what it stands in place of; 16-bit numbers to their rounding."""
    model = plain.model().model.to(dtype)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    draw = torch.Generator().manual_seed(0)
    for layer in (m for m in model.modules() if isinstance(m, layers.RMSNorm | layers.Gated)):
        own = copy.deepcopy(layer)
        own.__class__ = layer.instead_of
        with torch.no_grad():
            for a, b in zip(layer.parameters(), own.parameters(), strict=True):
                b.copy_(a.mul_(0.5 + torch.rand(a.shape, generator=draw)))
        given = torch.randn(2, 5, 32, generator=draw).to(dtype)
        x, y = given.clone().requires_grad_(), given.clone().requires_grad_()
        found, wanted = layer(x), own(y)
        with torch.no_grad():
            torch.testing.assert_close(layer(given), wanted.detach(), **near)
        torch.testing.assert_close(found, wanted, **near)
        slope = torch.randn(found.shape, generator=draw).to(dtype)
        found.backward(slope)
        wanted.backward(slope)
        torch.testing.assert_close(x.grad, y.grad, **near)
        for a, b in zip(layer.parameters(), own.parameters(), strict=True):
            size = float(b.grad.abs().max())
            torch.testing.assert_close(a.grad / size, b.grad / size, **near)


def test_what_is_another_layer_is_left_alone():
    """Gemma's norm multiplies by 1 + weight, its gate is a GELU; a frozen weight gets no gradient."""
    shape = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**shape))
    layers.use(model)
    assert kinds(model) == {layers.Linear}
    frozen = tiny.model(width=32).model.model.norm.requires_grad_(False)
    x = torch.ones(3, 32, requires_grad=True)
    frozen(x).sum().backward()
    assert x.grad is not None
    assert frozen.weight.grad is None


@pytest.mark.parametrize("P", [0, 4])
def test_attention_written_out_is_pytorchs(P):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, h, n, 8, generator=draw) for h, n in ((6, 5), (2, 5 + P), (2, 5 + P)))
    mask = torch.ones(5, 5 + P, dtype=torch.bool).tril(P) if P else None
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    torch.testing.assert_close(packing._plain_attention(q, k, v, mask, None), wanted)
