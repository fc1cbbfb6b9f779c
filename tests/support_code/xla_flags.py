"""The flag for XLA's older emitters, which compile in a third of the time; JAX 0.12 has only the newer ones."""

from importlib.metadata import version

OLDER_EMITTERS = ["--xla_cpu_use_fusion_emitters=false"] * (version("jax") < "0.12")
