"""Measures what each format of a model costs: the table of docs/perplexity.md.

python -m scripts.format_costs [--limit WINDOWS] [--speed]     prints it
python -m scripts.format_costs --write                         writes it into the page, too

Runs `cbatch perplexity` on SmolLM2, which `python -m scripts.real_model` fetches, and on prose of this documentation.
`--speed` adds tokens a second, which need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.real_model import CONVERTER, SMOLLM2
from tests.support.real_models import prose

PAGE = Path(__file__).parents[1] / "docs" / "perplexity.md"
TABLE = re.compile(r"^\| format \|(.*\n)(\|.*\n)+", re.MULTILINE)

FORMATS: list[tuple[str, str, list[str]]] = [
    ("float32", "hf", ["--dtype", "float32"]),
    ("bfloat16", "hf", ["--dtype", "bfloat16"]),
    ("float32, KV cache `u8`", "hf", ["--dtype", "float32", "--kv-dtype", "u8"]),
    ("bfloat16, KV cache `u8`", "hf", ["--dtype", "bfloat16", "--kv-dtype", "u8"]),
    ("`int8`", "hf", ["--quantize", "int8"]),
    ("`int8`, activations `bf16`", "hf", ["--quantize", "int8", "--activations", "bf16"]),
    ("GGUF Q8_0", "q8_0", []),
    ("GGUF Q4_1", "gguf", []),
    ("`int4`", "hf", ["--quantize", "int4"]),
    ("`int4`, activations `bf16`", "hf", ["--quantize", "int4", "--activations", "bf16"]),
]
"""Names in the table, files, and options."""


def measure(options: list[str]) -> dict[str, Any]:
    """The figures of one `cbatch perplexity`, in a process of its own."""
    command = [sys.executable, "-m", "cbatch", "perplexity", "--json", "-q", "--device", "cpu", *options]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def row(name: str, options: list[str], *, speed: bool) -> str:
    found = measure([*options, "--against", str(SMOLLM2.folder)])
    cells = [
        name,
        f"{found['bits_per_weight']:.1f}",
        f"{found['perplexity']:.3f}",
        f"{found['ratio']:.4f} ± {found['ratio_error']:.4f}",
        f"{found['kl_divergence']:.5f} ± {found['kl_divergence_error']:.5f}",
        f"{found['same_top']:.1%}",
    ]
    if speed:
        cells.append(f"{measure(options)['tokens_per_s']:,.0f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=16, help="windows of 512 tokens")
    parser.add_argument("--speed", action="store_true", help="add tokens a second")
    parser.add_argument("--write", action="store_true", help="put the table into docs/perplexity.md")
    asked = parser.parse_args()
    titles = ["format", "bits", "perplexity", "ratio", "divergence (nats)", "same token", *["tokens/s"] * asked.speed]
    lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    print("\n".join(lines), flush=True)
    with TemporaryDirectory() as folder:
        text, q8_0 = Path(folder) / "text.txt", Path(folder) / "q8_0.gguf"
        text.write_text(prose())
        converted = [sys.executable, str(CONVERTER), str(SMOLLM2.folder), "--outtype", "q8_0", "--outfile", str(q8_0)]
        subprocess.run(converted, check=True, capture_output=True)
        files = {"hf": SMOLLM2.folder, "gguf": SMOLLM2.gguf, "q8_0": q8_0}
        for name, file, options in FORMATS:
            shared = [str(text), "-m", str(files[file]), "--limit", str(asked.limit)]
            lines.append(row(name, [*shared, *options], speed=asked.speed))
            print(lines[-1], flush=True)
    if asked.write:
        table = "\n".join(lines) + "\n"
        written, count = TABLE.subn(lambda _: table, PAGE.read_text())
        if count != 1:
            raise SystemExit(f"{PAGE} has no table to replace.")
        PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
