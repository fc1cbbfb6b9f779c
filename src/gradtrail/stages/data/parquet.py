"""Tables: reading columns of Parquet files, and writing the names of classes."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from gradtrail.support.errors import UserError, one_line

_OF_CLASSES = ("class", "label", "true_label", "predicted")  # columns that have classes


def with_class_names(table: pd.DataFrame, classes: Sequence[str]) -> pd.DataFrame:
    """Return a table with the names of the classes in place of their numbers."""
    columns = [column for column in _OF_CLASSES if column in table]
    return table.assign(**{column: [classes[number] for number in table[column]] for column in columns})


def read_parquet(path: Path, columns: Sequence[str], *, made_by: str = "dvc repro") -> pd.DataFrame:
    """Read columns of a Parquet table, without the metadata of pandas.

    Args:
        path: the file.
        columns: names of the columns, in the order of the result.
        made_by: the command that makes the file.

    Raises:
        UserError: one line that names the file: there is none, it is damaged, or a column is missing.
    """
    try:
        table = pq.read_table(path, columns=list(columns), use_threads=False)
        return table.to_pandas(ignore_metadata=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `{made_by}` makes it") from None
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        reason = f"not a table of this project: {one_line(error)[:200]}"
        raise UserError(f"{path}: {reason}; `{made_by}` makes it again") from None
