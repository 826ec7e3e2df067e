"""What a request asks its output to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output as a whole must be.

    json_object  any JSON object; `source` is empty
    json_schema  JSON that is valid for a schema; `source` is the schema as JSON text. Properties come in the order of
                 the schema. The parts are separated by nothing, one space, or a line break and up to 40 blanks.
    regex        text that a pattern matches as a whole, in the syntax of Rust's regex crate, without look-around
                 and backreferences; \\d is 0 to 9
    choice       one of several strings; `source` is a JSON list of them
    grammar      text of a context-free grammar with a rule `start`, in llguidance's dialect of Lark
    """

    kind: Kind
    source: str = ""
