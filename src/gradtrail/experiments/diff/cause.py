"""The most likely cause of a difference in time, as one sentence.

Specific causes come before general ones: a float64 in one line before an edit of a file, an edit before another
machine. If the programs are the same, the part of the run that took longer decides.
"""

from collections.abc import Iterator

from gradtrail.experiments.diff.compare import Comparison, FunctionPair, Pair

_LEAST_SECONDS, _LEAST_SHARE = 0.5, 0.1  # smaller differences occur between runs of one state
_SEEDS = (".seed",)
_FLAGS = ("environment.xla_flags", "switches.XLA_FLAGS", "switches.LIBTPU_INIT_ARGS")
_CORES = {"processor.cores_allowed": "", "processor.cores_quota": " by the limit of a container"}
_VERSIONS = "packages."


def most_likely_cause(comparison: Comparison) -> str:
    """Return one sentence; it begins with `No cause` if no recorded difference explains the times."""
    names = (
        _program_causes(comparison)
        if any(_is_other(pair) for pair in comparison.functions)
        else _machine_causes(comparison)
    )
    cause = next(names, "")
    return f"{_totals(comparison)}{cause or _no_cause(comparison)}"


def _totals(comparison: Comparison) -> str:
    if not (totals := comparison.totals):
        return ""
    before, after = totals
    word = "slower" if after > before else "faster"
    if abs(after - before) < max(_LEAST_SECONDS, _LEAST_SHARE * before):
        return f"About the same time ({before:.1f} s, {after:.1f} s). "
    return f"{max(totals) / min(totals):.2f} × {word} ({before:.1f} s, then {after:.1f} s). "


def _is_other(pair: FunctionPair) -> bool:
    """Whether the two runs compiled different programs."""
    if pair.verdict == "program not stored":
        flops = pair.ratio("flops")
        return flops is not None and flops != 1.0
    return pair.verdict.startswith(("other", "only"))


def _program_causes(comparison: Comparison) -> Iterator[str]:
    """Yield causes that change a program, the most specific one first."""
    pair = _most_changed(comparison)
    work = _work(pair)
    flags = _flags(comparison)
    params = _params(comparison)
    versions = {key: change for key, change in comparison.environment.items() if key.startswith(_VERSIONS)}
    for function in comparison.functions:
        if lines := function.float64_lines():
            yield f"float64 in {function.name}, unlike the first run, from {lines[0] or 'XLA itself'}{work}."
    if not (params or flags):
        yield from _lost_donations(comparison, work)
    also = f"; the code changed too ({_some(comparison.code)}){_gained(pair)}" if comparison.code else ""
    if params:
        yield f"{_listed(params)}{also}{work}."
    if flags:
        yield f"XLA's flags changed from {flags[0][0]} to {flags[0][1]}: {pair.name} is another program{also}{work}."
    if comparison.code:
        yield f"the code changed ({_some(comparison.code)}){_gained(pair)}{work}."
    if versions:
        yield f"other versions ({_listed(versions)}) made another program of {pair.name}{work}."
    if machine := comparison.environment.get("machine"):
        yield f"another kind of machine ({machine[0]}, then {machine[1]}) has another program of {pair.name}{work}."


def _lost_donations(comparison: Comparison, work: str) -> Iterator[str]:
    for pair in comparison.functions:
        before, after = pair.numbers("donated_buffers")
        if before and after is not None and after < before:
            lost = f"{before - after:.0f} donated argument{'s' * (before - after > 1)}"
            code = f"; the code changed ({_some(comparison.code)})" if comparison.code else ""
            yield f"{pair.name} no longer reuses the memory of {lost} ({before:.0f}, then {after:.0f}){code}{work}."


def _gained(pair: FunctionPair) -> str:
    """Return the opcode that became more frequent, and its source line, as the middle of a sentence."""
    if not pair.changes:
        return ""
    first = next((change for change in pair.changes if change.after > change.before), pair.changes[0])
    count, word = abs(first.after - first.before), "more" if first.after > first.before else "fewer"
    return f": {pair.name} has {count} × `{first.opcode}` {word}{f', from {first.line}' if first.line else ''}"


def _machine_causes(comparison: Comparison) -> Iterator[str]:
    """Yield causes that do not change the programs, those of the slower part first."""
    params = _params(comparison)
    slower = any(pair.verdict.startswith("same program, ") for pair in comparison.functions)
    is_relevant = slower or _is_notable(comparison)
    cold = [pair.name for pair in comparison.functions if pair.before and pair.before.cached and not _cached(pair)]
    warm = [pair.name for pair in comparison.functions if pair.after and pair.after.cached and not _cached_before(pair)]
    by_compiling = comparison.seconds("compile")
    is_mostly_compiling = abs(by_compiling) >= abs(comparison.seconds("compute")) and abs(by_compiling) > _LEAST_SECONDS
    if params and is_relevant:
        yield f"{_listed(params)}, with the same programs."
    if is_relevant and (flags := _flags(comparison)):
        yield (
            f"XLA's flags changed from {flags[0][0]} to {flags[0][1]}; the optimized HLO is the same, "
            "so what differs is the machine code."
        )
    if is_mostly_compiling and (cold or warm):
        names, word = (cold, "cold") if cold else (warm, "warm")
        yield (
            f"a {word} compilation cache: {_some(names)} {'had to be compiled' if cold else 'came from it'}, "
            f"which made {abs(by_compiling):.1f} s of the difference; the programs are the same."
        )
    if not is_relevant:
        return
    for key, why in _CORES.items():
        if cores := comparison.environment.get(key):
            yield f"{cores[1]} core{'s' * (cores[1] != '1')} in place of {cores[0]}{why}; the programs are the same."
    if machine := comparison.environment.get("machine"):
        yield f"another kind of machine: {machine[0]}, then {machine[1]}; the programs are the same."
    if comparison.data:
        yield f"other data ({_some([*comparison.data])}); the programs are the same."
    rest = {key: change for key, change in comparison.environment.items() if key.startswith((_VERSIONS, "python"))}
    if rest:
        yield f"other versions: {_listed(rest)}; the programs are the same."


def _no_cause(comparison: Comparison) -> str:
    is_alike = comparison.is_same_state and not comparison.environment
    reason = f"no recorded {'value differs' if is_alike else 'difference explains it'}"
    if not comparison.functions:
        return f"No cause: {reason}, and there is no compile profile to compare."
    longer = max(("imports", "data", "compile", "compute", "tracking"), key=comparison.seconds)
    seconds = comparison.seconds(longer)
    if _is_notable(comparison) and seconds > _LEAST_SECONDS:
        return f"No cause: {reason}; {longer} took {seconds:.1f} s longer, for example by other work on the machine."
    return f"No cause: {reason}."


def _is_notable(comparison: Comparison) -> bool:
    totals = comparison.totals
    return totals is not None and abs(totals[1] - totals[0]) >= max(_LEAST_SECONDS, _LEAST_SHARE * totals[0])


def _params(comparison: Comparison) -> dict[str, Pair]:
    return {key: change for key, change in comparison.params.items() if not key.endswith(_SEEDS) and key not in _FLAGS}


def _flags(comparison: Comparison) -> list[Pair]:
    return [change for key, change in {**comparison.params, **comparison.environment}.items() if key in _FLAGS]


def _most_changed(comparison: Comparison) -> FunctionPair:
    """Return the changed function with the largest change of its steady time, or else of its FLOPs."""

    def cost(pair: FunctionPair) -> tuple[bool, float, float]:
        flops = [number or 0.0 for number in pair.numbers("flops")]
        ratio = pair.ratio("steady_call_seconds")
        return pair.name.startswith("train"), abs((ratio or 1.0) - 1.0), abs(flops[1] - flops[0])

    return max((pair for pair in comparison.functions if _is_other(pair)), key=cost)


def _work(pair: FunctionPair) -> str:
    """Return the effect of a change on a function's costs, as the end of a sentence."""
    words = []
    for key, name in (("flops", "FLOPs"), ("bytes_accessed", "bytes"), ("steady_call_seconds", "time")):
        ratio = pair.ratio(key)
        if ratio is not None and not 1 / 1.02 < ratio < 1.02:
            words.append(f"{ratio:.2f} × the {name}")
    return f" ({pair.name}: {', '.join(words)})" if words else ""


def _listed(pairs: dict[str, Pair]) -> str:
    some = [f"{key} {before} → {after}" for key, (before, after) in list(pairs.items())[:3]]
    more = len(pairs) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _cached(pair: FunctionPair) -> bool:
    return bool(pair.after and pair.after.cached)


def _cached_before(pair: FunctionPair) -> bool:
    return bool(pair.before and pair.before.cached)
