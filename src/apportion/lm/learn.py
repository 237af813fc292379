"""From a collection to a step: `advantages` once, then epochs of minibatches through the one loss line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from apportion.core.errors import ApportionError, InvalidMethod
from apportion.core.method import Method
from apportion.core.parts import KL
from apportion.core.rollouts import Rollouts
from apportion.core.update import Adam
from apportion.core.weigh import Ledger, advantages, needs
from apportion.lm.account import Account, Ragged, Signals, Terms, dense
from apportion.lm.generate import Completions
from apportion.lm.memory import release
from apportion.lm.models import LanguageModel
from apportion.lm.optimiser import Optimiser
from apportion.lm.passes import batches, logprobs, score

LARGE = 10_000_000
"""Weights of a model from which on freed memory is given back."""


def rollouts(
    completions: Completions,
    reward: np.ndarray,
    *,
    scored: np.ndarray | None = None,
    logref: Ragged | None = None,
    step: Ragged | None = None,
    greedy_return: np.ndarray | None = None,
    mask_truncated: bool = False,
    horizon: int | None = None,
) -> Rollouts:
    """The book of a collection, NumPy float64, dense on [N G T] with T the longest response.

    reward: [N G], paid at each response's last token, or [N G T], paid where it stands (0 beyond a response).
    scored: [N G] bool, false where the reward function failed. logref: [N][G] arrays, from `reference_logprobs`.
    step: [N][G] bool arrays, the tokens that close a step (process rewards). greedy_return: [N], for ReMax.
    mask_truncated: responses cut at the limit keep their reward in the baseline but teach nothing (DAPO's overlong
        filtering). horizon: the constant of Dr. GRPO; None takes the sampler's max_tokens.

    Raises InvalidData (from `Rollouts`) where the shapes do not fit.
    """
    lengths = completions.lengths
    T = int(lengths.max())
    exists = np.arange(T) < lengths[..., None]
    last = np.arange(T) == lengths[..., None] - 1
    reward = np.asarray(reward, np.float64)
    paid = np.where(last, reward[..., None], 0.0) if reward.ndim == 2 else reward
    mask = exists & ~(completions.truncated[..., None] & mask_truncated)
    return Rollouts(
        reward=paid,
        mask=mask,
        logq=dense(completions.logq, exists),
        terminated=last & completions.terminated[..., None],
        truncated=last & completions.truncated[..., None],
        logref=None if logref is None else dense(logref, exists),
        step=None if step is None else dense(step, exists) > 0,
        scored=scored,
        greedy_return=None if greedy_return is None else np.asarray(greedy_return, np.float64),
        horizon=completions.sampling.max_tokens if horizon is None else horizon,
    )


class Learner:
    """The optimiser's side of a method: weights, gradient, step.

    method: any catalogue entry without a critic. reference: the frozen model of the KL penalty (or teacher); a model
    with a LoRA adapter is its own reference. seed: of the minibatches' order. tokens: that go through the model at a
    time, for memory (None: 512 on a CPU, 16384 on a GPU); the gradient does not depend on it. checkpointing: work
    activations out again in the backward pass. weight_decay: AdamW's.

    old: whose log-probabilities the ratio divides by. "sampler" takes `Rollouts.logq`; "trainer" this model's own
    before the first step, so that rounding between sampler and trainer does not enter the ratio: free where a
    collection is used once, one pass more otherwise. None: the sampler's for float32 weights without correction.
    correction: multiply each advantage by min(pi_old / q, cap), for a sampler that is not quite the trainer's policy:
    "token", or "sequence" for the product over the response. Known as truncated importance sampling (TIS).

    Raises InvalidMethod for a method that this domain cannot run, ApportionError for a reference that is missing.
    """

    def __init__(
        self,
        method: Method,
        language_model: LanguageModel,
        reference: LanguageModel | None = None,
        *,
        seed: int = 0,
        tokens: int | None = None,
        old: Literal["sampler", "trainer"] | None = None,
        correction: Literal["token", "sequence"] | None = None,
        cap: float = 2.0,
        checkpointing: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        _refuse(method, language_model, reference)
        if old == "sampler" and correction:
            raise ApportionError("correction weighs trainer against sampler, so old must be 'trainer'")
        self.method, self.language_model, self.reference = method, language_model, reference
        self.seed, self.tokens = seed, tokens or (512 if language_model.device.type == "cpu" else 16384)
        self.named = [(name, p) for name, p in language_model.model.named_parameters() if p.requires_grad]
        exact = all(p.dtype == torch.float32 for _, p in self.named)
        self.terms = Terms(old or ("sampler" if exact and not correction else "trainer"), correction, cap)
        assert isinstance(method.update, Adam)
        self.optimiser = Optimiser(self.named, method.update, weight_decay)
        self._large = sum(p.numel() for p in language_model.model.parameters()) >= LARGE
        self.collections = 0
        self.beta = method.kl.beta
        self.checkpointing = checkpointing
        if checkpointing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of its next name, which older versions do not have
                language_model.causal.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def needs_reference(self) -> bool:
        """Whether the method reads `Rollouts.logref`."""
        return "logref" in needs(self.method)

    def old_logprobs(self, completions: Completions) -> list[list[np.ndarray]]:
        """Log-probabilities [N][G] of the responses under the model now."""
        return logprobs(self.language_model, completions, self.tokens)

    def reference_logprobs(self, completions: Completions) -> list[list[np.ndarray]]:
        """Log-probabilities [N][G] of the responses under the reference, or the model without its adapter."""
        if self.reference is not None:
            return logprobs(self.reference, completions, self.tokens)
        with self.language_model.frozen() as reference:
            return logprobs(reference, completions, self.tokens)

    def step(self, completions: Completions, rollouts: Rollouts, done: float = 0.0) -> Signals:
        """All updates of one collection: `sampler.epochs` passes, each in `sampler.minibatches` cuts.

        rollouts: of these completions, from `rollouts`. done: fraction of the run that lies behind, for the
        learning-rate schedule. A cut keeps whole groups where there are enough of them. Responses without weight
        (a group whose siblings agree) go through no pass; where none has any, no step is taken at all.

        Raises InvalidData for numbers that cannot be weighed, ApportionError for a gradient that is not finite.
        """
        ledger = advantages(self.method, rollouts, self.beta)
        index = self._live(ledger)
        cuts = self.method.sampler.minibatches
        once = self.method.sampler.epochs * cuts == 1
        account = Account(self.method, completions, ledger, self.beta, self.terms)
        if self.terms.old == "trainer" and not once and index:
            exists = np.arange(ledger.mask.shape[-1]) < completions.lengths[..., None]
            account.take_old(dense(self.old_logprobs(completions), exists), exists)
        rate = self.optimiser.rule.rate(min(max(done, 0.0), 1.0))
        norms: list[float] = []
        with self._training(), self.optimiser.gathering():
            for epoch in range(self.method.sampler.epochs):
                for cut, scale in _cuts(index, cuts, [self.seed, self.collections, epoch]):
                    self._tidy()
                    self._gradient(account, cut, scale, fresh=not norms)
                    self._tidy()
                    norms.append(self.optimiser.move(rate))
        self.collections += 1
        signals = account.signals(len(index), norms, rate)
        kl = self.method.kl
        if isinstance(kl, KL) and kl.adaptive is not None:
            drift = float((rollouts.logq - rollouts.logref)[rollouts.mask].sum())
            rows = completions.terminated.size
            self.beta = kl.adaptive(self.beta, drift / rows, rows)
        return signals

    def _live(self, ledger: Ledger) -> list[tuple[int, int]]:
        """The responses (n, g) whose weight can be other than 0."""
        pull = ledger.share * (ledger.advantage != 0)
        kl = self.method.kl
        if (isinstance(kl, KL) and kl.place == "loss") or self.method.entropy:
            pull = ledger.share + bool(self.method.entropy) * ledger.mask
        return [(int(n), int(g)) for n, g in np.argwhere(((pull != 0) & ledger.mask).any(-1))]

    def _tidy(self) -> None:
        """What sampling or a gradient has freed goes back to the system before more is taken."""
        if self._large and self.language_model.device.type == "cpu":
            release()

    def _gradient(self, account: Account, index: Sequence[tuple[int, int]], scale: float, fresh: bool) -> None:
        """Add the gradient of `scale` times the loss over some responses to the parameters, batch by batch."""
        shared = self.language_model.packed
        for batch in batches(account.completions, index, self.tokens, shared=shared):
            scores = score(self.language_model, batch.rows, account.completions.sampling)
            w, spread = account.weigh(batch, scores.logp.detach(), scores.entropy.detach(), fresh)
            # The one loss line: -(stop_gradient(w) · log pi).sum(), and the bonus that has no (q, w) form.
            loss = -scale * (w * scores.logp).sum()
            if self.method.entropy:
                loss = loss - scale * self.method.entropy * (spread * scores.entropy).sum()
            loss.backward()

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Checkpointing asks for training mode; dropout stays off, or trainer and sampler would differ."""
        model = self.language_model.model
        if self.checkpointing:
            model.train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.eval()
        try:
            yield
        finally:
            model.eval()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything but the weights themselves, by name."""
        beta = torch.tensor(self.beta, dtype=torch.float64)
        return {"collections": torch.tensor(self.collections), "beta": beta} | self.optimiser.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state_dict` (the weights come from the model's folder).

        Raises ApportionError where it is not of this model.
        """
        own = {name: x for name, x in state.items() if name not in ("collections", "beta")}
        self.optimiser.load_state_dict(own)
        self.collections, self.beta = int(state["collections"]), float(state["beta"])


def _cuts(
    index: Sequence[tuple[int, int]], cuts: int, seed: Sequence[int]
) -> Iterator[tuple[Sequence[tuple[int, int]], float]]:
    """Minibatches of responses, and what each one's loss is scaled by, so that it is a mean whatever the cut."""
    if cuts == 1:
        if index:
            yield index, 1.0
        return
    groups = sorted({n for n, _ in index})
    whole = len(groups) >= cuts
    units: list[list[tuple[int, int]]] = (
        [[i for i in index if i[0] == n] for n in groups] if whole else [[i] for i in index]
    )
    order = np.random.default_rng(seed).permutation(len(units))
    parts = min(cuts, len(units))
    for part in np.array_split(order, parts) if parts else []:
        yield [i for u in part for i in units[u]], float(parts)


def learnable(method: Method) -> None:
    """Raises InvalidMethod for a method that needs what language models do not have here."""
    rules = [
        (method.sampler.values != "none", "a critic or value rollouts, which language models do not have here"),
        (not isinstance(method.update, Adam), "a natural gradient; set update=Adam()"),
        (method.sampler.start == "stream", "a stream, which a prompt is not; set sampler.start='reset'"),
        (method.sampler.feedback == "preference", "pairs with a preference, which are not sampled here"),
        (method.sampler.proposer == "reference", "a frozen proposer; set sampler.proposer='policy'"),
    ]
    for bad, what in rules:
        if bad:
            raise InvalidMethod(f"{method.name} needs {what}; group methods such as dr_grpo need none of it")


def _refuse(method: Method, language_model: LanguageModel, reference: LanguageModel | None) -> None:
    learnable(method)
    if "logref" in needs(method) and reference is None and not language_model.adapted:
        raise ApportionError(
            f"{method.name} has a KL penalty, so it needs a reference model; give one, train a LoRA adapter "
            "(the model without it is the reference), or take the penalty away with kl=NoKL()"
        )
