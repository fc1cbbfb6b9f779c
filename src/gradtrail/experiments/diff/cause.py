"""The most likely cause of a difference in time, as one sentence.

What is specific comes before what is general: a float64 in one line before an edit of a file, an edit before another
machine. Where the programs are the same, the part of the run that took longer decides.
"""

from collections.abc import Iterator

from gradtrail.experiments.diff.compare import Comparison, FunctionPair, Pair

_LEAST_SECONDS, _LEAST_SHARE = 0.5, 0.1  # below both, a difference in time is what runs of one state differ by
_SEEDS = (".seed",)
_FLAGS = ("environment.xla_flags", "switches.XLA_FLAGS", "switches.LIBTPU_INIT_ARGS")
_CORES = {"processor.cores_allowed": "", "processor.cores_quota": " by the limit of a container"}
_VERSIONS = "packages."


def most_likely_cause(found: Comparison) -> str:
    """Return one sentence; it begins with `No cause` where nothing that is recorded explains a difference."""
    names = _of_program(found) if any(_is_other(pair) for pair in found.functions) else _of_machine(found)
    cause = next(names, "")
    return f"{_totals(found)}{cause or _nothing(found)}"


def _totals(found: Comparison) -> str:
    if not (totals := found.totals):
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


def _of_program(found: Comparison) -> Iterator[str]:
    """Yield causes that change a program, the most specific one first."""
    pair = _most_changed(found)
    work = _work(pair)
    flags = _flags(found)
    params = _params(found)
    versions = {key: change for key, change in found.environment.items() if key.startswith(_VERSIONS)}
    for each in found.functions:
        if lines := each.float64_lines():
            yield f"float64 in {each.name}, where the first run has none, from {lines[0] or 'XLA itself'}{work}."
    if not (params or flags):
        yield from _lost_donations(found, work)
    also = f"; the code changed too ({_some(found.code)}){_gained(pair)}" if found.code else ""
    if params:
        yield f"{_listed(params)}{also}{work}."
    if flags:
        yield f"XLA's flags changed from {flags[0][0]} to {flags[0][1]}: {pair.name} is another program{also}{work}."
    if found.code:
        yield f"the code changed ({_some(found.code)}){_gained(pair)}{work}."
    if versions:
        yield f"other versions ({_listed(versions)}) made another program of {pair.name}{work}."
    if machine := found.environment.get("machine"):
        yield f"another kind of machine ({machine[0]}, then {machine[1]}) has another program of {pair.name}{work}."


def _lost_donations(found: Comparison, work: str) -> Iterator[str]:
    for pair in found.functions:
        before, after = pair.numbers("donated_buffers")
        if before and after is not None and after < before:
            lost = f"{before - after:.0f} donated argument{'s' * (before - after > 1)}"
            code = f"; the code changed ({_some(found.code)})" if found.code else ""
            yield f"{pair.name} no longer reuses the memory of {lost} ({before:.0f}, then {after:.0f}){code}{work}."


def _gained(pair: FunctionPair) -> str:
    """Return the opcode that a program has more of, and where it comes from, as the middle of a sentence."""
    if not pair.changes:
        return ""
    first = next((change for change in pair.changes if change.after > change.before), pair.changes[0])
    count, word = abs(first.after - first.before), "more" if first.after > first.before else "fewer"
    return f": {pair.name} has {count} × `{first.opcode}` {word}{f', from {first.line}' if first.line else ''}"


def _of_machine(found: Comparison) -> Iterator[str]:
    """Yield causes that leave the programs as they are, that of the part that took longer first."""
    params = _params(found)
    slower = any(pair.verdict.startswith("same program, ") for pair in found.functions)
    is_told = slower or _is_notable(found)
    cold = [pair.name for pair in found.functions if pair.before and pair.before.cached and not _cached(pair)]
    warm = [pair.name for pair in found.functions if pair.after and pair.after.cached and not _cached_before(pair)]
    by_compiling = found.seconds("compile")
    is_mostly_compiling = abs(by_compiling) >= abs(found.seconds("compute")) and abs(by_compiling) > _LEAST_SECONDS
    if params and is_told:
        yield f"{_listed(params)}, with the same programs."
    if is_told and (flags := _flags(found)):
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
    if not is_told:
        return
    for key, why in _CORES.items():
        if cores := found.environment.get(key):
            yield f"{cores[1]} core{'s' * (cores[1] != '1')} in place of {cores[0]}{why}; the programs are the same."
    if machine := found.environment.get("machine"):
        yield f"another kind of machine: {machine[0]}, then {machine[1]}; the programs are the same."
    if found.data:
        yield f"other data ({_some([*found.data])}); the programs are the same."
    rest = {key: change for key, change in found.environment.items() if key.startswith((_VERSIONS, "python"))}
    if rest:
        yield f"other versions: {_listed(rest)}; the programs are the same."


def _nothing(found: Comparison) -> str:
    is_alike = found.is_same_state and not found.environment
    what = f"nothing that is recorded {'differs' if is_alike else 'explains a difference'}"
    if not found.functions:
        return f"No cause: {what}, and there is no compile profile to compare."
    longer = max(("imports", "data", "compile", "compute", "tracking"), key=found.seconds)
    if _is_notable(found) and found.seconds(longer) > _LEAST_SECONDS:
        return f"No cause: {what}; {longer} took {found.seconds(longer):.1f} s longer, as by other work on the machine."
    return f"No cause: {what}."


def _is_notable(found: Comparison) -> bool:
    totals = found.totals
    return totals is not None and abs(totals[1] - totals[0]) >= max(_LEAST_SECONDS, _LEAST_SHARE * totals[0])


def _params(found: Comparison) -> dict[str, Pair]:
    return {key: change for key, change in found.params.items() if not key.endswith(_SEEDS) and key not in _FLAGS}


def _flags(found: Comparison) -> list[Pair]:
    return [change for key, change in {**found.params, **found.environment}.items() if key in _FLAGS]


def _most_changed(found: Comparison) -> FunctionPair:
    """Return the function whose change costs most: by its steady time, else by its FLOPs, among those that changed."""

    def cost(pair: FunctionPair) -> tuple[bool, float, float]:
        flops = [number or 0.0 for number in pair.numbers("flops")]
        ratio = pair.ratio("steady_call_seconds")
        return pair.name.startswith("train"), abs((ratio or 1.0) - 1.0), abs(flops[1] - flops[0])

    return max((pair for pair in found.functions if _is_other(pair)), key=cost)


def _work(pair: FunctionPair) -> str:
    """Return what a change does to a function, as the end of a sentence."""
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
