"""Detects compilations during a request: there must be none once a model is warmed up."""

import threading
from collections.abc import Callable

COMPILED = "/jax/core/compile/backend_compile_duration"  # one per program, also on a hit of the compile cache


def watch_compilations(report: Callable[[float], None], thread_prefix: str) -> Callable[[], None]:
    """Call `report` with the seconds of each compilation in a thread that answers requests.

    JAX reports a compilation in the thread that causes it (`jax.monitoring`). Each model answers in its own thread, and
    is compiled in another one before.

    Args:
        report: Function that is called in the thread of the compilation.
        thread_prefix: Prefix of the names of the threads that answer.

    Returns:
        A function that stops the reports.
    """
    import jax.monitoring

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED and threading.current_thread().name.startswith(thread_prefix):
            report(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: jax.monitoring.unregister_event_duration_listener(listen)
