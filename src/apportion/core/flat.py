"""A method as the few lines of NumPy it reduces to, assembled from its parts: `apportion methods NAME --flat`.

The text is a program. A test executes it for every entry of the catalogue and compares with `weigh`.
"""

from __future__ import annotations

import ast

from apportion.core.method import Method
from apportion.core.parts import KL, SequenceRatio

GIVEN = {
    "reward": "[N G T] as the task gave it",
    "mask": "[N G T] true where the policy decided",
    "logq": "[N G T] log-probability when sampled",
    "logp": "[N G T] log-probability now",
    "logref": "[N G T] log-probability under the reference",
    "value": "[N G T] value of the state",
    "next_value": "[N G T] value of the next state",
    "terminated": "[N G T] the task ended here",
    "ended": "[N G T] the task or a time limit ended here",
    "step": "[N G T] the decision closes a rewarded step",
    "greedy_return": "[N] return of the greedy rollout",
    "mass": "[N] probability of each group, 1/N if sampled",
    "horizon": "the most decisions the task allows",
}
"""What the program may read, with the axes N groups, G siblings, T decisions."""

_BACKWARDS = '''\
def backwards(x, decay):
    """y_t = x_t + decay · y_{t+1}; time stands still where masked, and nothing crosses an end."""
    y, later = np.zeros_like(x), np.zeros_like(x[..., 0])
    for t in reversed(range(x.shape[-1])):
        keeps = np.where(mask[..., t], decay, 1) * (1 - ended[..., t])
        y[..., t] = later = x[..., t] + keeps * later
    return y
'''


def _lines(method: Method) -> list[str]:
    kl = method.kl.flat()
    in_loss = isinstance(method.kl, KL) and method.kl.place == "loss"
    pool = method.ratio.flat_pool() if isinstance(method.ratio, SequenceRatio) else None
    return [
        *method.sampler.keep.flat(),
        "rows = mass[:, None] * keep",
        "rows = (rows / rows.sum())[..., None]",
        *(["reward = 0 * reward"] if method.sampler.feedback == "none" else []),
        *([] if in_loss else kl),
        *method.credit.flat(),
        *method.baseline.flat(),
        *method.scale.flat(),
        *method.aggregate.flat(),
        *method.ratio.flat(),
        *method.trust.flat(),
        *(pool or ["w = share * advantage * gate * ratio"]),
        *(kl if in_loss else []),
        "w = w * mask",
    ]


def _given(program: str) -> list[str]:
    """The names that the program reads before it writes them."""
    names = {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}
    return [name for name in GIVEN if name in names]


def _beyond(method: Method) -> list[str]:
    """What the method does besides w, as comments."""
    extras = [f"ascend along (w * grad log pi).sum() with {method.update!r}"]
    if method.entropy:
        extras.append(f"plus {method.entropy} times the gradient of the mean entropy")
    if method.value_loss is not None:
        extras.append(f"the critic descends its own loss: {method.value_loss!r}")
    return [f"# {line}" for line in extras]


def flat(method: Method) -> str:
    """The method as a NumPy program that ends with `w` [N G T]; every sibling counts as scored.

    >>> from apportion.core.catalogue import reinforce
    >>> print(flat(reinforce))  # doctest: +ELLIPSIS
    # REINFORCE
    # reward: [N G T] as the task gave it
    ...
    w = w * mask
    # ascend along (w * grad log pi).sum() with Adam(...)
    """
    lines = _lines(method)
    helper = [_BACKWARDS] if any("backwards(" in line for line in lines) else []
    program = "\n".join([*helper, *lines])
    head = [f"# {method.title or method.name}", *(f"# {name}: {GIVEN[name]}" for name in _given(program))]
    return "\n".join([*head, "import numpy as np", "", program, *_beyond(method)])
