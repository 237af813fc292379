"""Pytrees and networks in files of a run: one array a leaf ("state.optimiser.1.mu"), refused where it does not fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from apportion.control.normalise import Moments, Normaliser, statistics
from apportion.control.policy import Parameters, Policy
from apportion.core.errors import ApportionError
from apportion.runs.files import CHECKPOINT, CONFIG, POLICY, load_arrays, save_arrays


def named(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree by path: {"state.optimiser.1.mu": leaf}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def save(path: Path, tree: Any, about: dict[str, Any]) -> None:
    """Write every leaf of a pytree, with `about` as metadata. Atomic; raises as `runs.files.write_atomic`."""
    save_arrays(path, named(tree), about)


def restore(path: Path, arrays: dict[str, np.ndarray], template: Any) -> Any:
    """The arrays in the shape of `template` (a pytree of shapes and dtypes).

    Raises ApportionError naming the first array that is missing, not expected, or of another shape or dtype.
    """
    wanted = named(template)
    for name in sorted(wanted.keys() ^ arrays.keys()):
        state = "lacks" if name in wanted else "holds an unexpected"
        raise ApportionError(f"{path} does not fit this run: it {state} {name}")
    for name, leaf in wanted.items():
        found = arrays[name]
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise ApportionError(
                f"{path} does not fit this run: {name} is {found.dtype}{list(found.shape)}, "
                f"not {leaf.dtype}{list(leaf.shape)}"
            )
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in wanted])


def networks_template(policy: Policy) -> Parameters:
    """Shapes and dtypes of a trained policy's parameters, statistics of observations included."""
    trained = _trained(policy)
    if not policy.normalise:
        return trained
    row = jax.ShapeDtypeStruct((policy.observation_size,), np.float32)
    return trained | {"observed": {"mean": row, "scale": row}}


def _trained(policy: Policy) -> Parameters:
    return jax.eval_shape(policy.init, jax.eval_shape(lambda: jax.random.key(0)))


def size(template: Any) -> int:
    """Numbers in a pytree of shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(template))


def unflatten(policy: Policy, flat: Any) -> Parameters:
    """The flat vector [P] of a TrainState as the networks' pytree of NumPy arrays, in `ravel_pytree`'s order."""
    leaves, structure = jax.tree.flatten(_trained(policy))
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    parts = np.split(np.asarray(flat), np.cumsum(sizes)[:-1])
    return jax.tree.unflatten(structure, [p.reshape(leaf.shape) for p, leaf in zip(parts, leaves, strict=True)])


def load_networks(out: Path, policy: Policy, config: dict[str, Any]) -> tuple[dict[str, Any], Parameters]:
    """Metadata and parameters of the run in `out`: its finished policy, or else its last checkpoint.

    Raises ApportionError when there is neither, or when they belong to another task.
    """
    path = next((out / name for name in (POLICY, CHECKPOINT) if (out / name).exists()), None)
    if path is None:
        raise ApportionError(f"{out} holds a run that has saved nothing yet; go on with it by --resume")
    arrays, about = load_arrays(path)
    if about.get("task") != config["task"]:
        raise ApportionError(f"{path} is of task {about.get('task')}, but {out / CONFIG} says {config['task']}")
    if path.name == POLICY:
        return about, restore(path, arrays, networks_template(policy))
    flat, wanted = arrays.get("state.parameters"), size(_trained(policy))
    if flat is None or flat.shape != (wanted,):
        raise ApportionError(f"{path} does not fit {out / CONFIG}: it holds no {wanted:,} parameters")
    networks = unflatten(policy, flat)
    if policy.normalise:
        seen = Moments(*(arrays[f"state.normaliser.observation.{name}"] for name in Moments._fields))
        networks |= statistics(Normaliser(seen, None))
    return about, networks
