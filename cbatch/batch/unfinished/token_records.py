"""Records of a token journal: some tokens of an answer, as a line with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from cbatch.base.outputs import KnownOutput, TokenLogprobs

CHECK_BYTES = 8


class TokenRecord(NamedTuple):
    """Some tokens of an answer.

    line:    index of the row's line
    row_key: the row's key
    request: which of the row's requests it is: a key of all that decides its tokens
    output:  which of the request's outputs
    start:   how many tokens the output has before these
    tokens:  with their log-probabilities, if the row wants any
    """

    line: int
    row_key: str
    request: str
    output: int
    start: int
    tokens: KnownOutput


def format_record(record: TokenRecord) -> bytes:
    """A record as a line, with the line end."""
    tokens, logprobs = record.tokens
    fields: dict[str, Any] = {**record._asdict(), "tokens": list(tokens)}
    if logprobs:
        fields["logprobs"] = [(one.logprob, one.top) for one in logprobs]
    data = json.dumps(fields, separators=(",", ":")).encode()
    return b"%s %s\n" % (_checksum(data), data)


def parse_record(line: bytes) -> TokenRecord:
    """Raises ValueError, KeyError or TypeError for what is no record, or a damaged one."""
    check, _, data = line.removesuffix(b"\n").partition(b" ")
    if check != _checksum(data):
        raise ValueError("the checksum is another one")
    fields = json.loads(data)
    tokens = fields["tokens"]
    known = KnownOutput(tokens, _logprobs(tokens, fields.get("logprobs", ())))
    return TokenRecord(fields["line"], fields["row_key"], fields["request"], fields["output"], fields["start"], known)


def _logprobs(tokens: Sequence[int], packed: Sequence[Any]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token, logprob, [(other, value) for other, value in top])
        for token, (logprob, top) in zip(tokens, packed, strict=bool(packed))
    ]


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECK_BYTES).hexdigest().encode()
