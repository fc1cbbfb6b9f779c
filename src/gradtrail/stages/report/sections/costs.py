"""What the report says of compiled functions: their costs by the compiler's account, which no clock has touched."""

from gradtrail.stages.report.components import Cells, Picture, Section, Table, count, flops, size
from gradtrail.stages.report.inputs import CsvTable, Sources

_HEADER = (
    "function",
    "FLOPs",
    "bytes read and written",
    "memory in between",
    "memory in all",
    "instructions",
    "fusions",
)
_STEP = "train_step"


def costs_section(sources: Sources) -> Section:
    """Say what the configured functions compute, move and hold, and how that changes in other forms."""
    costs = sources.table("profile/costs")
    configured = [row for row in _numbered(costs) if _is_configured(sources, row)]
    return Section(
        id="costs",
        title="Compile costs",
        text=(_step(sources), _doubling(sources)),
        tables=(
            Table(
                caption=_caption(sources), header=_HEADER, rows=[(row["function"], *_cells(row)) for row in configured]
            ),
            _of_stages(sources),
            _forms(costs),
        ),
        pictures=_pictures(sources, costs),
    )


def _step(sources: Sources) -> str:
    batch = int(sources.param("train.batch_size"))
    steps, held = sources.figure("profile", f"{_STEP}_flops"), sources.figure("profile", f"{_STEP}_total_bytes")
    between = sources.figure("profile", f"{_STEP}_temporary_bytes")
    predict = sources.figure("profile", "predict_flops") / batch
    return (
        f"By the compiler's account a training step of {count(batch)} examples takes {flops(steps)}, "
        f"{flops(steps / batch)} an example, and {size(held)} of memory with its arguments, {size(between)} of it "
        f"for what lies in between; to predict an example takes {flops(predict)}. What a clock says differs from run "
        "to run, and stands in MLflow."
    )


def _doubling(sources: Sources) -> str:
    table = sources.table("profile/doubling")
    names = ("batch_size", "doubled", "flops", "total_bytes")
    rows = list(zip(table.text("function"), *(table.numbers(name) for name in names), strict=True))
    said = [
        f"from {count(small)} to {count(large)} multiplies its FLOPs by {work:.2f} and its memory by {memory:.2f}"
        for name, small, large, work, memory in rows
        if name == _STEP
    ]
    return f"Doubling the batch of a step {'; '.join(said)}." if said else "No two batch sizes were compared."


def _caption(sources: Sources) -> str:
    remat = ", with remat" if sources.param("train.remat") else ""
    batch = count(int(sources.param("train.batch_size")))
    return f"As configured: {sources.param('train.precision')}, batch of {batch}{remat}"


def _numbered(table: CsvTable) -> list[dict[str, str]]:
    """Return the rows; raise UserError where a figure that is shown is no number."""
    for name in ("flops", "touched_bytes", "temporary_bytes", "total_bytes", "hlo_instructions", "hlo_fusions"):
        table.numbers(name)
    for name in ("function", "precision", "batch_size", "remat"):
        table.text(name)
    return table.rows


def _is_configured(sources: Sources, row: dict[str, str]) -> bool:
    keys = ("precision", "batch_size", "remat")
    return all(row[key] == str(sources.param(f"train.{key}")) for key in keys)


def _cells(row: dict[str, str]) -> Cells:
    return (
        flops(float(row["flops"])),
        *(size(float(row[name])) for name in ("touched_bytes", "temporary_bytes", "total_bytes")),
        *(count(float(row[name])) for name in ("hlo_instructions", "hlo_fusions")),
    )


def _of_stages(sources: Sources) -> Table:
    """Return the costs of every function that a stage compiled for its own work."""
    rows = []
    for stage, metrics in sources.metrics.items():
        for key in sorted(metrics):
            if key.startswith("compile/") and key.endswith("/flops"):
                name = key.removeprefix("compile/").removesuffix("/flops")
                read, held, program = (
                    sources.figure(stage, f"compile/{name}/{figure}")
                    for figure in ("bytes_accessed", "total_bytes", "hlo_instructions")
                )
                rows.append((name, stage, flops(sources.figure(stage, key)), size(read), size(held), count(program)))
    return Table(
        caption="Every function that the stages compiled for their own work",
        header=("function", "stage", "FLOPs", "bytes read and written", "memory in all", "instructions"),
        rows=rows,
    )


def _forms(costs: CsvTable) -> Table:
    rows = [
        (row["function"], row["precision"], row["batch_size"], "yes" if row["remat"] == "True" else "no", *_cells(row))
        for row in _numbered(costs)
    ]
    header = (_HEADER[0], "precision", "batch size", "remat", *_HEADER[1:])
    return Table(caption="Every form that was compared", header=header, rows=rows, folded=True)


def _pictures(sources: Sources, costs: CsvTable) -> tuple[Picture, ...]:
    names = ", ".join(dict.fromkeys(costs.text("function")))
    sizes = costs.numbers("batch_size")
    step = {
        figure: sources.figure("profile", f"{_STEP}_{figure}") for figure in ("hlo_instructions", "jaxpr_equations")
    }
    return (
        Picture(
            png=sources.picture("profile/costs"),
            caption="Costs over the batch size, in each form",
            alt=(
                f"FLOPs and bytes an example, and memory, of {names} over batch sizes from "
                f"{min(sizes, default=0):g} to {max(sizes, default=0):g}. A training step as configured takes "
                f"{flops(sources.figure('profile', f'{_STEP}_flops'))}."
            ),
        ),
        Picture(
            png=sources.picture("profile/fusions"),
            caption="What the compiler made of each program, by its form",
            alt=(
                f"Bars of equations as traced, instructions as compiled and fusions among them, of {names}. A training "
                f"step as configured has {count(step['jaxpr_equations'])} equations and "
                f"{count(step['hlo_instructions'])} instructions."
            ),
        ),
    )
