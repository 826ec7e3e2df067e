"""Forms of files of rows, and the endings of names that tell them."""

from __future__ import annotations

from typing import Literal, get_args

InputForm = Literal["jsonl", "text", "csv", "tsv", "json", "parquet"]
OutputForm = Literal["jsonl", "csv", "tsv", "parquet"]
Compression = Literal["gz", "zst"]

INPUT_FORMS: tuple[InputForm, ...] = get_args(InputForm)
OUTPUT_FORMS: tuple[OutputForm, ...] = get_args(OutputForm)

TABLES = frozenset(["csv", "tsv", "parquet"])
"""Forms whose rows have columns that the file names once."""

_INPUTS: dict[str, InputForm] = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "csv": "csv",
    "tsv": "tsv",
    "tab": "tsv",
    "json": "json",
    "parquet": "parquet",
    "pq": "parquet",
}
_OUTPUTS: dict[str, OutputForm] = {"csv": "csv", "tsv": "tsv", "tab": "tsv", "parquet": "parquet", "pq": "parquet"}
_COMPRESSIONS: dict[str, Compression] = {"gz": "gz", "zst": "zst", "zstd": "zst"}


def input_form(name: str) -> InputForm:
    """The form of an input, from its name: `data.csv.gz` is CSV. Other endings are JSON Lines."""
    return _INPUTS.get(_endings(name)[0], "jsonl")


def output_form(name: str) -> OutputForm:
    """The form of an output, from its name. Other endings, such as `.json`, are JSON Lines."""
    return _OUTPUTS.get(_endings(name)[0], "jsonl")


def compression(name: str) -> Compression | None:
    """How an output is compressed, from its name. How an input is, its first bytes say."""
    return _endings(name)[1]


def unit_of(form: InputForm) -> str:
    """What the index of a row counts, for messages."""
    return "line" if form in ("jsonl", "text") else "row"


def _endings(name: str) -> tuple[str, Compression | None]:
    """The ending of a name without the one of its compression, in lower case, and that compression."""
    stem, dot, ending = name.lower().rpartition(".")
    found = _COMPRESSIONS.get(ending) if dot else None
    return (stem.rpartition(".")[2] if found else ending), found
