"""Embeddings as an array of numpy. The journal stays beside it: an array has no place for ids, keys and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from cbatch.base.errors import ConfigError
from cbatch.batch.tables.columns import Rows
from cbatch.requests.embeddings import embeddings_in


def write_npy(file: IO[bytes], rows: Rows) -> None:
    """Writes an array [rows, D] float32 in the order of the rows; that of an error row is NaN.

    Raises ConfigError for a row that holds something else, or embeddings of another size.
    """
    sizes = [len(vector) for vector in _vectors(rows) if vector is not None]
    if sizes and min(sizes) != max(sizes):
        raise ConfigError(f"Embeddings of {min(sizes)} and of {max(sizes)} numbers do not fit into one array.")
    size, count = max(sizes, default=0), sum(1 for _ in rows())
    npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count, size)})
    for vector in _vectors(rows):
        file.write((np.full(size, np.nan) if vector is None else vector).astype("<f4").tobytes())


def _vectors(rows: Rows) -> Iterator[Any]:
    for row in rows():
        fields = json.loads(row)
        found = embeddings_in(fields)
        if fields.get("error") is None and (found is None or len(found) != 1):
            what = "no embedding" if found is None else f"{len(found)} embeddings"
            raise ConfigError(f"Row {fields['index']} has {what}, and each row of an array is one; take another form.")
        yield None if found is None else found[0]
