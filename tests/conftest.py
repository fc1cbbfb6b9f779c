"""What holds for every test: JAX at its strictest, shapes in signatures checked, no telemetry.

The import hook must be in place before anything of `gradtrail` is imported; so pytest reads this file first.
"""

import gc
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook
from xla_flags import OLDER_EMITTERS

if TYPE_CHECKING:
    from gradtrail.core.data import Split

os.environ["DVC_NO_ANALYTICS"] = "true"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["MPLBACKEND"] = "Agg"

# A shell that runs the tests in the background has this ignored, and whatever they start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

COMPILED, MOST_BYTES = Path(__file__).parents[1] / ".gradtrail" / "tests", 2**29
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

if not IS_WORKER and sum(path.stat().st_size for path in COMPILED.rglob("*")) > MOST_BYTES:
    shutil.rmtree(COMPILED)
if IS_WORKER or "-n" not in sys.argv:  # the process that only starts workers runs no test
    # Most of the time goes into compiling what runs once: here the compiler does not optimize, in the stages it does.
    # `make test` also takes XLA's older emitters, which compile in a third of the time; they round float16 otherwise.
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    flags += OLDER_EMITTERS * ("COMPILE_FAST" in os.environ)
    inherited = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([inherited, *flags])
    import jax

    jax.devices()  # which reads the flags; what the tests start shall not inherit them
    os.environ["XLA_FLAGS"] = inherited
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_traceback_in_locations_limit", 0)  # which take 8 % of the time
    with install_import_hook("gradtrail.core", "typechecking.check"):
        from gradtrail.core.evaluate import evaluate_logits  # noqa: F401
        from gradtrail.core.profile import benchmark  # noqa: F401 - between them, all of core
        from gradtrail.core.train.augmentation import augment  # noqa: F401
    from gradtrail.stages.common.environment import processor_digest

    # A program is compiled in the first run of the tests only: then JAX's cache has it, by code, version and flags.
    jax.config.update("jax_compilation_cache_dir", str(COMPILED / processor_digest()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# No test depends on the speed of the machine. `--hypothesis-profile=random` draws other examples each time.
settings.register_profile("fixed", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("random", max_examples=25, deadline=None, print_blob=True)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def digits() -> "Split":
    """The first 600 of scikit-learn's real digits, 8 × 8, pixels 0 to 255."""
    from factories import split_of
    from sklearn.datasets import load_digits  # type: ignore[import-untyped] # late: it takes seconds

    bunch = load_digits()
    images = np.round(bunch.images[:600] * (255 / 16)).astype(np.uint8)
    labels = bunch.target[:600].astype(np.int32)
    return split_of(images, labels)


# Two workers take the modules in this order (with `--no-loadscope-reorder`): first the one that makes the finished
# project; what needs none, while it is made; the long modules; and at the end the short ones, so that both end at about
# the same time.
ORDER = (
    ("tests/pipeline/test_stages",),
    ("tests/core",),
    ("tests/contracts", "tests/pipeline"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the modules as above; within each the order stays."""
    items.sort(key=place_of)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported, and let it run less often: it took 8 % of the processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def place_of(item: pytest.Item) -> int:
    return next((place for place, begins in enumerate(ORDER) if item.nodeid.startswith(begins)), len(ORDER))
