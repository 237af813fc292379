"""Clipped AdamW on float32 weights, also where the model's own are bfloat16.

A step of a millionth is lost in the rounding of a bfloat16 weight. So 16 more bits lie beside each, and the two are put
together to a float32 weight while it is stepped, one tensor at a time; whole copies would take as much again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from apportion.core.errors import ApportionError, Diverged
from apportion.core.update import Adam

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def join(weight: Tensor, rest: Tensor) -> Tensor:
    """The float32 tensor of which `split` made a bfloat16 one and a rest."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + rest).view(torch.float32)


def split(wide: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Write a float32 tensor as the nearest bfloat16 one, and the int16 difference of their bits.

    Half way between two bfloat16 numbers the last bit may be lost, as 16 bits hold no 32,768.
    """
    weight.copy_(wide)
    rest.copy_((wide.view(torch.int32) - (weight.view(torch.int16).to(torch.int32) << 16)).clamp_(max=32767))


class Optimiser:
    """AdamW with the numbers of an `Adam`. named: the parameters that are trained, float32 or bfloat16.

    What lives longer than a batch, moments and summed gradients, lies in one piece of memory each: many small ones
    between the activations that come and go would leave holes that no later tensor fits into.

    Raises ApportionError where there is no parameter.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], rule: Adam, weight_decay: float = 0.0) -> None:
        if not named:
            raise ApportionError("the model has no parameter that requires a gradient, so nothing would be trained")
        self.named, self.rule, self.weight_decay = named, rule, weight_decay
        narrow = [(name, p) for name, p in named if p.dtype != torch.float32]
        self.rest = {name: torch.zeros_like(p, dtype=torch.int16, requires_grad=False) for name, p in narrow}
        mean, square = self._zeros(), self._zeros()
        self.moments = {name: (torch.zeros((), device=p.device), mean[name], square[name]) for name, p in named}
        self._sums = self._zeros()
        self._touched: set[str] = set()

    def _zeros(self) -> dict[str, Tensor]:
        """Float32 zeros for every parameter, by name."""
        sizes = [p.numel() for _, p in self.named]
        parts = torch.zeros(sum(sizes), device=self.named[0][1].device).split(sizes)
        return {name: part.view(p.shape) for (name, p), part in zip(self.named, parts, strict=True)}

    @torch.no_grad()
    def weight(self, name: str) -> Tensor:
        """A parameter in float32: itself, or put together."""
        p = dict(self.named)[name]
        return join(p, self.rest[name]) if name in self.rest else p

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The float32 sums of what backward passes have left, of the parameters that were in them."""
        return {name: self._sums[name] for name, _ in self.named if name in self._touched}

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """While backward passes run: gradients add up in float32; those of bfloat16 weights go there one by one."""

        def take(name: str, p: Tensor) -> None:
            self._touched.add(name)
            if name in self.rest:
                assert p.grad is not None
                self._sums[name] += p.grad
                p.grad = None

        hooks = [p.register_post_accumulate_grad_hook(lambda p, name=name: take(name, p)) for name, p in self.named]
        for name, p in self.named:
            p.grad = None if name in self.rest else self._sums[name]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for _, p in self.named:
                p.grad = None
            for grad in self.gradients.values():  # where a step was not taken
                grad.zero_()
            self._touched.clear()

    def move(self, rate: float) -> float:
        """One step on what has been gathered since the last; the gradient's norm before it was clipped.

        Raises Diverged, without a step, for a norm that is not finite.
        """
        grads = self.gradients
        norm = float(torch.nn.utils.get_total_norm(list(grads.values())))
        if not math.isfinite(norm):
            raise Diverged(
                f"the gradient's norm is {norm}, so no step was taken; lower update.learning_rate or set "
                "update.max_grad_norm"
            )
        limit = self.rule.max_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(list(grads.values()), limit / norm)
        for name, p in self.named:
            if name in grads:
                self._step(name, p, grads[name], rate)
                grads[name].zero_()
        self._touched.clear()
        return norm

    @torch.no_grad()
    def _step(self, name: str, p: torch.nn.Parameter, grad: Tensor, rate: float) -> None:
        wide = self.weight(name)
        step, mean, square = self.moments[name]
        adamw(
            [wide],
            [grad],
            [mean],
            [square],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=self.rule.b1,
            beta2=self.rule.b2,
            lr=rate,
            weight_decay=self.weight_decay,
            eps=self.rule.eps,
            maximize=False,
        )
        if name in self.rest:
            split(wide, p, self.rest[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Everything but the weights themselves, by name; the rest of bfloat16 weights included."""
        state = {f"rest.{name}": x for name, x in self.rest.items()}
        for name, moments in self.moments.items():
            state |= {f"adam.{name}.{key}": x for key, x in zip(MOMENTS, moments, strict=True)}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state_dict`, beside the weights of then. Raises ApportionError where it is of other ones."""
        keys = {name: [f"adam.{name}.{key}" for key in MOMENTS] for name, _ in self.named}
        known = {key for each in keys.values() for key in each} | {f"rest.{name}" for name in self.rest}
        if strange := sorted(set(state) - known):
            raise ApportionError(f"the learner's state holds {strange[0]}, which this model does not have")
        if lacking := sorted(known - set(state)):
            raise ApportionError(f"the learner's state lacks {lacking[0]}; it is of another model or version")
        for name, rest in self.rest.items():
            rest.copy_(state[f"rest.{name}"])
        for name, moments in self.moments.items():
            for key, own in zip(keys[name], moments, strict=True):
                own.copy_(state[key])
