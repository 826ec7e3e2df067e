"""Resources and reads of a kernel that Triton has compiled; needs no GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton


class Resources(NamedTuple):
    """registers: of a thread; spilled: bytes of a thread's registers that lie in memory"""

    registers: int
    spilled: int


class InnerLoop(NamedTuple):
    """The work of a thread in a round of a kernel's inner loop, or in all of a kernel without products.

    read:  bytes of global memory
    unit:  the instruction of matrix units, such as HMMA; empty if there is none
    """

    instructions: int
    read: int
    unit: str


def resources_of(compiled: Any) -> Resources:
    """Resources of an assembled `CompiledKernel`, as a GPU's driver would report them."""
    (binary,) = (path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", binary]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found is not None, text
    registers, stack, local = map(int, found.groups())
    return Resources(registers, stack + local)


def inner_loop(compiled: Any, *, any_loop: bool = False) -> InnerLoop:
    """The innermost loop that has most instructions, of those with products unless any is meant."""
    (binary,) = (path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", binary]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+ )?(.*?) ?;", text, re.M)
    places = {int(address, 16): number for number, (address, _) in enumerate(found)}
    code = [instruction for _, instruction in found]
    spans = []
    for end, instruction in enumerate(code):
        if jump := re.match(r"BRA\b.*?0x([0-9a-f]+)", instruction):
            begin = places[int(jump[1], 16)]
            spans += [(begin, end)] if begin < end else []
    inner = [one for one in spans if not any(one[0] <= other[0] and other[1] < one[1] for other in spans)]
    bodies = [code[begin : end + 1] for begin, end in inner]
    body = max((body for body in bodies if any_loop or _unit(body)), key=len, default=code)
    return InnerLoop(len(body), sum(map(_bytes_read, body)), _unit(body))


_UNIT = re.compile(r"(?:UTC|HG|[HIQO])\w*MMA")


def _unit(code: Iterable[str]) -> str:
    return next((match[0] for match in map(_UNIT.match, code) if match), "")


def _bytes_read(instruction: str) -> int:
    if not (read := re.match(r"LDG(?:STS)?\b(\S*)", instruction)):
        return 0
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((sizes[word] for word in read[1].split(".") if word in sizes), 4)


def read_sizes(ptx: str, function: Any) -> set[int]:
    """Bytes that a thread's instructions read at once from global memory on behalf of a Triton function."""
    begin = function.starting_line_number
    lines = range(begin, begin + len(function.raw_src))
    file = Path(function.fn.__code__.co_filename).name  # another checkout may have compiled what Triton has kept
    return {size for path, line, size in _reads(ptx) if Path(path).name == file and line in lines}


def waits_first(ptx: str) -> bool:
    """Whether a kernel waits for the one before, and reads and writes no global memory until then."""
    wait = ptx.find("griddepcontrol.wait")
    access = re.search(r"\b(?:ld|st|atom|red)\.global|\bcp\.async\.(?!commit|wait)", ptx)
    return wait >= 0 and (access is None or wait < access.start())


def copies_in_flight(ptx: str) -> int:
    """Most groups of asynchronous copies that a kernel leaves in flight when it waits for others; 0 without any."""
    return max((int(number) for number in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0)


def _reads(ptx: str) -> Iterator[tuple[str, int, int]]:
    """File, line and bytes of each read of global memory."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"', ptx, re.M))
    path, line = "", 0
    for text in ptx.splitlines():
        if place := re.match(r"\s*\.loc\s+(\d+) (\d+)", text):
            path, line = files[place[1]], int(place[2])
        elif copy := re.search(r"cp\.async\.c[ag]\.\S+ \[.*?\], \[.*?\], (0x\w+|\d+)", text):
            yield path, line, int(copy[1], 0)
        elif load := re.search(r"\bld\.global(?:\.(?!v\d|[bsuf]\d)[\w:]+)*(?:\.v(\d))?\.[bsuf](\d+)", text):
            yield path, line, int(load[1] or 1) * int(load[2]) // 8
