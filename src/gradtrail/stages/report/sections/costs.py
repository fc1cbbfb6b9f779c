"""The report's section on compiled functions: their static costs, as the compiler estimates them."""

from markupsafe import Markup

from gradtrail.stages.report.components import Cells, Figure, Section, Table, count, flops, size
from gradtrail.stages.report.inputs import CsvTable, Sources

_HEADER = (
    "function",
    "FLOPs",
    "bytes read and written",
    "temporary memory",
    "total memory",
    "HLO instructions",
    "fusions",
)
_COSTS = ("flops", "touched_bytes", "temporary_bytes", "total_bytes", "hlo_instructions", "hlo_fusions")
_STEP = "train_step"
_BATCH_SIZES = {("train", _STEP): "train.batch_size", ("evaluate", "predict"): "evaluate.batch_size"}


def costs_section(sources: Sources) -> Section:
    """Describe the FLOPs, bytes and memory of the configured functions, and of other variants."""
    costs = sources.table("profile/costs")
    configured = [row for row in costs.rows if _is_configured(sources, row)]
    return Section(
        id="costs",
        title="Compiling",
        summary=_step(sources),
        text=(_memory(sources), _doubling(sources)),
        tables=(
            Table(
                caption=_caption(sources), header=_HEADER, rows=[(row["function"], *_cells(row)) for row in configured]
            ),
            _stage_costs(sources),
            _forms(costs),
        ),
        figures=_figures(sources, costs),
    )


def _step(sources: Sources) -> str:
    batch = int(sources.param("train.batch_size"))
    steps, predict = (sources.cost("profile", name, "flops") for name in (_STEP, "predict"))
    most = _is_bound(sources, "profile", _STEP)
    parts = (
        f"The compiler estimates {flops(steps, at_most=most)} for a training step with batch size {count(batch)} "
        f"({flops(steps / batch)} per example). A prediction takes {flops(predict / batch)} per example."
    )
    if not most:
        return parts
    return f"{parts} At most: the number of examples in a batch is random, and the largest possible one is counted."


def _is_bound(sources: Sources, stage: str, name: str) -> bool:
    """Return whether the FLOPs of a function are an upper bound."""
    return sources.cost(stage, name, "data_dependent_loops") > 0


def _memory(sources: Sources) -> Markup:
    held, between = (sources.cost("profile", _STEP, name) for name in ("total_bytes", "temporary_bytes"))
    return Markup(
        "A training step takes {held} of memory including arguments and results, {between} of it temporary. Seconds, "
        "what came from the cache on disk, and retraces differ from run to run and are in MLflow only: in the second "
        "view that <code>gradtrail ui</code> links to, and as the table <code>compile/functions.json</code> of each "
        "run. There the description of the <code>profile</code> run says whether another precision pays on the machine."
    ).format(held=size(held), between=size(between))


def _doubling(sources: Sources) -> str:
    table = sources.table("profile/doubling")
    names = ("batch_size", "doubled", "flops", "total_bytes")
    rows = list(zip(table.text("function"), *(table.numbers(name) for name in names), strict=True))
    parts = [
        f"from {count(small)} to {count(large)} multiplies FLOPs by {work:.2f} and total memory by {memory:.2f}"
        for name, small, large, work, memory in rows
        if name == _STEP
    ]
    return (
        f"Doubling the batch size of a training step {'; '.join(parts)}." if parts else "No batch sizes were compared."
    )


def _caption(sources: Sources) -> str:
    remat = ", with remat" if sources.param("train.remat") else ""
    batch = count(int(sources.param("train.batch_size")))
    return f"Compiled by profile: one call on {batch} examples, {sources.param('train.precision')}{remat}"


def _is_configured(sources: Sources, row: dict[str, str]) -> bool:
    keys = ("precision", "batch_size", "remat")
    return all(row[key] == str(sources.param(f"train.{key}")) for key in keys)


def _cells(row: dict[str, str]) -> Cells:
    return (
        flops(float(row["flops"]), at_most=float(row["data_dependent_loops"]) > 0),
        *(size(float(row[name])) for name in ("touched_bytes", "temporary_bytes", "total_bytes")),
        *(count(float(row[name])) for name in ("hlo_instructions", "hlo_fusions")),
    )


def _stage_costs(sources: Sources) -> Table:
    """Return the costs of the functions that the stages compiled; those of `profile` are by variant."""
    rows = []
    for stage, name in [(stage, name) for stage, costs in sources.costs.items() for name in sorted(costs)]:
        work, read, between, held, program, fused = (sources.cost(stage, name, cost) for cost in _COSTS)
        if stage != "profile":
            key = _BATCH_SIZES.get((stage, name))
            batch = count(int(sources.param(key))) if key else "set by the stage"
            sizes = (size(read), size(between), size(held))
            total = flops(work, at_most=_is_bound(sources, stage, name))
            rows.append((name, stage, batch, total, *sizes, count(program), count(fused)))
    return Table(
        caption="Compiled by the other stages: one call each; the same function on more examples costs more",
        header=(_HEADER[0], "stage", "examples in a call", *_HEADER[1:]),
        rows=rows,
    )


def _forms(costs: CsvTable) -> Table:
    rows = [
        (row["function"], row["precision"], row["batch_size"], "yes" if row["remat"] == "True" else "no", *_cells(row))
        for row in costs.rows
    ]
    header = (_HEADER[0], "precision", "batch size", "remat", *_HEADER[1:])
    return Table(caption="All variants compared", header=header, rows=rows, folded=True)


def _figures(sources: Sources, costs: CsvTable) -> tuple[Figure, ...]:
    names = ", ".join(dict.fromkeys(costs.text("function")))
    sizes = costs.numbers("batch_size")
    flop = sources.cost("profile", _STEP, "flops")
    return (
        Figure(
            png=sources.figure("profile/costs"),
            caption="Static costs of each variant over the batch size",
            alt=(
                f"FLOPs and bytes per example, and memory, of {names} for batch sizes from "
                f"{min(sizes, default=0):g} to {max(sizes, default=0):g}. The configured training step takes "
                f"{flops(flop, at_most=_is_bound(sources, 'profile', _STEP))}."
            ),
        ),
    )
