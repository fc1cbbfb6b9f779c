"""Counts compilations that a request waited for: there must be none once a model is warmed up."""

import threading
from collections.abc import Callable

COMPILED = "/jax/core/compile/backend_compile_duration"  # one per program, on a hit of the compile cache too


def watch_compilations(tell: Callable[[float], None], thread_prefix: str) -> Callable[[], None]:
    """Call `tell` with the seconds of each compilation in a thread that answers requests; return what ends it.

    JAX reports a compilation in the thread that causes it (`jax.monitoring`), and a model answers in a thread of its
    own, while models are compiled in another one before they answer.

    Args:
        tell: is called in that thread.
        thread_prefix: of the names of the threads that answer.
    """
    import jax.monitoring

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED and threading.current_thread().name.startswith(thread_prefix):
            tell(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: jax.monitoring.unregister_event_duration_listener(listen)
