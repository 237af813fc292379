"""From a collection to a step: `advantages` once, then epochs of minibatches through the one loss line.

All parameters live in one flat vector: an optimiser over twenty small arrays is twenty tiny kernels a step,
and on small networks those, not the matrix products, are the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from apportion.control.policy import Parameters, Policy
from apportion.core.method import Method
from apportion.core.update import Adam, NaturalGradient
from apportion.core.weigh import Ledger, weights

CHUNK = 2048
"""Decisions a ragged collection is worked through at a time; the gradient does not depend on it."""


class Rows(NamedTuple):
    """Decisions of a collection as flat rows [B ...].

    weight is each decision's share in the plain means (value regression, entropy); 0 where masked.
    """

    observation: jax.Array
    action: jax.Array
    logq: jax.Array
    advantage: jax.Array
    share: jax.Array
    weight: jax.Array
    target: jax.Array
    old_value: jax.Array

    def pack(self) -> jax.Array:
        """All columns in one matrix [B D]: shuffling gathers rows once, not once per column."""
        columns = (x.reshape(x.shape[0], -1).astype(jnp.float32) for x in self)
        return jnp.concatenate(tuple(columns), axis=1)

    def unpack(self, matrix: jax.Array) -> Rows:
        """Rows [C ...] of a cut [C D] of the packed matrix."""
        columns, at = [], 0
        for like in self:
            width = max(like.reshape(like.shape[0], -1).shape[1], 1)
            part = matrix[:, at : at + width].reshape(-1, *like.shape[1:])
            columns.append(part.astype(like.dtype))
            at += width
        return Rows(*columns)


class Signals(NamedTuple):
    """Means over the decisions of an update, for the log."""

    entropy: jax.Array
    clip_fraction: jax.Array
    kl: jax.Array
    value_loss: jax.Array
    grad_norm: jax.Array


def optimiser(update: Adam | NaturalGradient) -> optax.GradientTransformation:
    """Adam without its learning rate, which is annealed by environment steps and applied by hand.

    With a natural gradient, the critic's: at Adam's usual constants.
    """
    if isinstance(update, NaturalGradient):
        update = Adam()
    clip = [] if update.max_grad_norm is None else [optax.clip_by_global_norm(update.max_grad_norm)]
    return optax.chain(*clip, optax.scale_by_adam(b1=update.b1, b2=update.b2, eps=update.eps))


def shuffle(key: jax.Array, size: int) -> jax.Array:
    """A random order of `size` rows, [size].

    One sort of random bits with the row's number in their low end: on a CPU several times faster than
    `jax.random.permutation`, which would take a third of a PPO update. Rows whose random bits tie (the fewer bits
    are left, the more do) keep their order among themselves, which moves no row between distant minibatches.
    """
    low = jnp.uint32((1 << max(size - 1, 1).bit_length()) - 1)
    bits = jax.random.bits(key, (size,), jnp.uint32) & ~low
    return (jax.lax.sort(bits | jnp.arange(size, dtype=jnp.uint32), is_stable=False) & low).astype(jnp.int32)


def orders(key: jax.Array, size: int, count: int) -> jax.Array:
    """`count` random orders of `size` rows, [count, size], from one sort.

    Each is one and the same shuffle read at a random stride (coprime to `size`, so that every row comes once) from a
    random start. Each order by itself is uniformly random; a sort for each would be a tenth of a PPO update.
    """
    shuffle_key, stride_key, start_key = jax.random.split(key, 3)
    first = shuffle(shuffle_key, size)
    most = max(min(size, (2**31 - 1) // size), 2)
    strides = jnp.asarray([k for k in range(1, min(most, 4096)) if math.gcd(k, size) == 1], jnp.int32)
    stride = jax.random.choice(stride_key, strides, (count, 1))
    start = jax.random.randint(start_key, (count, 1), 0, size)
    return first[(stride * jnp.arange(size, dtype=jnp.int32) % size + start) % size]


def as_ledger(rows: Rows) -> Ledger:
    """The rows `weights` reads, in the form it reads them (the account up to the advantage is closed)."""
    zero, one = jnp.zeros_like(rows.share), jnp.ones_like(rows.share)
    return Ledger(rows.advantage, zero, rows.advantage, zero, one, rows.share, rows.share > 0, rows.logq)


@dataclass(frozen=True, eq=False)
class Learner:
    """One update of a method: static description; every array is an argument."""

    method: Method
    policy: Policy
    unravel: Callable[[jax.Array], Parameters]

    def loss(self, flat: jax.Array, rows: Rows, w: jax.Array | None, cuts: float) -> tuple[jax.Array, jax.Array]:
        """-(stop_gradient(w) · log pi).sum(), plus the extras that have no (q, w) form.

        cuts: number of minibatches, so that each one's loss is a mean although shares are of the collection.
        Beside the loss: entropy, clipped or not, KL to the sampler and value loss of each row, [4 B].
        """
        parameters, method = self.unravel(flat), self.method
        logp, entropy = self.policy.log_prob(parameters, rows.observation, rows.action, method.sampler.temperature)
        frozen = jax.lax.stop_gradient(logp)
        ledger = weights(method, as_ledger(rows), frozen) if w is None else None
        weight = w if ledger is None else ledger.w
        assert weight is not None
        loss = -cuts * jnp.sum(jax.lax.stop_gradient(weight) * logp)
        if method.entropy:
            loss = loss - method.entropy * cuts * jnp.sum(rows.weight * entropy)
        error = jnp.zeros_like(logp)
        if method.value_loss is not None:
            error = self._value_error(parameters, rows, method.value_loss.clip)
            loss = loss + method.value_loss.coefficient * cuts * jnp.sum(rows.weight * error) / 2
        shut = jnp.zeros_like(logp) if ledger is None or ledger.gate is None else 1.0 * (ledger.gate != 1)
        log_ratio = frozen - rows.logq
        each = jnp.stack([entropy, shut, jnp.exp(log_ratio) - 1 - log_ratio, error / 2])
        return loss, jax.lax.stop_gradient(each)

    def _value_error(self, parameters: Parameters, rows: Rows, clip: float | None) -> jax.Array:
        """Squared error of the critic, [B], the larger of it and the clipped one when clipping."""
        value = self.policy.value(parameters, rows.observation)
        error = (value - rows.target) ** 2
        if clip is None:
            return error
        near = rows.old_value + jnp.clip(value - rows.old_value, -clip, clip)
        return jnp.maximum(error, (near - rows.target) ** 2)

    def step(self, flat: jax.Array, state: Any, gradient: jax.Array, rate: jax.Array) -> tuple[jax.Array, Any]:
        """One optimiser step along the descent of the loss."""
        direction, state = optimiser(self.method.update).update(gradient, state)
        return flat - rate * direction, state

    def even(
        self, flat: jax.Array, state: Any, rows: Rows, key: jax.Array, rate: jax.Array
    ) -> tuple[jax.Array, Any, Signals]:
        """Epochs over a collection without masked rows: shuffle, cut into equal minibatches, step on each."""
        cuts, epochs = self.method.sampler.minibatches, self.method.sampler.epochs
        size = rows.share.shape[0]

        packed = rows.pack()

        def minibatch(carry: tuple[jax.Array, Any], cut: jax.Array) -> tuple[tuple[jax.Array, Any], Any]:
            flat, state = carry
            gradient, each = jax.grad(self.loss, has_aux=True)(flat, rows.unpack(cut), None, float(cuts))
            return self.step(flat, state, gradient, rate), (each, jnp.sqrt(jnp.sum(gradient**2)))

        def epoch(carry: tuple[jax.Array, Any], order: jax.Array) -> tuple[tuple[jax.Array, Any], Any]:
            return jax.lax.scan(minibatch, carry, packed[order].reshape(cuts, size // cuts, -1))

        order = orders(key, size, epochs) if cuts > 1 else jnp.broadcast_to(jnp.arange(size), (epochs, size))
        (flat, state), (each, norms) = jax.lax.scan(epoch, (flat, state), order)
        # Every row weighs the same here, so the means over all updates wait until the end and cost one reduction.
        means = jnp.mean(each, axis=(0, 1, 3))
        return flat, state, Signals(means[0], means[1], means[2], means[3], jnp.mean(norms))

    def ragged(
        self, flat: jax.Array, state: Any, rows: Rows, valid: jax.Array, key: jax.Array, rate: jax.Array
    ) -> tuple[jax.Array, Any, Signals]:
        """Epochs over a masked collection; masked decisions cost nothing.

        valid: [N G T] bool. Rows are flat in that order. Each epoch orders the valid decisions (whole trajectories
        together where the ratio needs them whole), cuts them into minibatches, and works through each in chunks.
        """
        cuts, epochs = self.method.sampler.minibatches, self.method.sampler.epochs

        def epoch(carry: tuple[jax.Array, Any], key: jax.Array) -> tuple[tuple[jax.Array, Any], Signals]:
            order, bounds = self._order(valid, key, cuts)

            def minibatch(carry: tuple[jax.Array, Any], k: jax.Array) -> tuple[tuple[jax.Array, Any], Signals]:
                flat, state = carry
                gradient, means = self._gradient(flat, rows, valid.shape, order, bounds[k], bounds[k + 1])
                signals = Signals(means[0], means[1], means[2], means[3], jnp.sqrt(jnp.sum(gradient**2)))
                moved = self.step(flat, state, gradient, rate)
                # A collection whose groups all agree says nothing: no step, not even Adam's momentum.
                silent = bounds[k] >= bounds[k + 1]
                kept = jax.tree.map(lambda old, new: jnp.where(silent, old, new), (flat, state), moved)
                return kept, signals

            return jax.lax.scan(minibatch, carry, jnp.arange(cuts))

        (flat, state), signals = jax.lax.scan(epoch, (flat, state), jax.random.split(key, epochs))
        return flat, state, jax.tree.map(jnp.mean, signals)

    def _order(self, valid: jax.Array, key: jax.Array, cuts: int) -> tuple[jax.Array, jax.Array]:
        """Random order of the rows, valid ones first, and the minibatches' bounds [cuts + 1] in it."""
        trajectories, flat = valid.reshape(-1, valid.shape[-1]), valid.reshape(-1)
        if self.method.ratio.per_sequence:
            rank = jax.random.permutation(key, trajectories.shape[0])
            lengths = jnp.zeros(rank.shape, jnp.int32).at[rank].set(trajectories.sum(-1, dtype=jnp.int32))
            starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)])
            at = [starts[k * rank.shape[0] // cuts] for k in range(cuts + 1)]
            place = jnp.broadcast_to(rank[:, None], trajectories.shape).reshape(-1).astype(jnp.float32)
        else:
            count = jnp.sum(flat, dtype=jnp.int32)
            at = [k * count // cuts for k in range(cuts + 1)]
            place = jax.random.uniform(key, flat.shape) if cuts > 1 else jnp.zeros(flat.shape)
        return jnp.argsort(jnp.where(flat, place, jnp.inf)), jnp.stack([jnp.asarray(x, jnp.int32) for x in at])

    def _gradient(
        self, flat: jax.Array, rows: Rows, shape: tuple[int, ...], order: jax.Array, low: jax.Array, high: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Gradient of the loss over rows order[low:high], chunk by chunk, and the means of `loss`'s rows [4]."""
        size = order.shape[0]
        chunk = min(CHUNK, size)
        cuts = float(self.method.sampler.minibatches)

        def chunks(body: Callable[[jax.Array, jax.Array, Any], Any], start: Any) -> Any:
            def turn(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                at, total = carry
                position = at + jnp.arange(chunk)
                return at + chunk, body(order[jnp.minimum(position, size - 1)], position < high, total)

            return jax.lax.while_loop(lambda carry: carry[0] < high, turn, (low, start))[1]

        w = None
        if self.method.ratio.per_sequence:
            temperature = self.method.sampler.temperature

            def forward(index: jax.Array, inside: jax.Array, logp: jax.Array) -> jax.Array:
                seen, _ = self.policy.log_prob(
                    self.unravel(flat), rows.observation[index], rows.action[index], temperature
                )
                return logp.at[jnp.where(inside, index, size)].set(seen, mode="drop")

            logp = chunks(forward, rows.logq).reshape(shape)
            w = weights(self.method, as_ledger(rows).map(lambda x: x.reshape(shape)), logp).w
            assert w is not None
            w = w.reshape(-1)

        def backward(index: jax.Array, inside: jax.Array, total: Any) -> Any:
            cut = jax.tree.map(lambda x: x[index], rows)
            cut = cut._replace(share=cut.share * inside, weight=cut.weight * inside)
            own = None if w is None else w[index] * inside
            gradient, each = jax.grad(self.loss, has_aux=True)(flat, cut, own, cuts)
            return total[0] + gradient, total[1] + cuts * (each @ cut.weight)

        return chunks(backward, (jnp.zeros_like(flat), jnp.zeros(4)))
