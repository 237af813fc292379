"""Control: JAX simulators, policies and training."""
