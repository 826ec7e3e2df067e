"""Text inside of blocks: emphasis, code, links, images."""

from __future__ import annotations

from functools import lru_cache

from markdown_it.token import Token

from cbatch.cli.chat.markdown.markup import StyledLine, append_text
from cbatch.cli.chat.markdown.parser import PARSER
from cbatch.cli.common.console import safe

CACHED = 300
"""Characters up to which a text is cached. The many versions of a long paragraph that grows would fill the memory."""

_STYLES = {"strong": "class:strong", "em": "class:emphasis", "s": "class:strike"}


def inline_lines(text: str, base_style: str = "") -> list[StyledLine]:
    """Lines of the text as they are in the source, not wrapped. Do not change them: they may be cached."""
    return _cached_lines(text, base_style) if len(text) <= CACHED else _parse_lines(text, base_style)


@lru_cache(maxsize=1024)
def _cached_lines(text: str, base_style: str) -> list[StyledLine]:
    return _parse_lines(text, base_style)


def _parse_lines(text: str, base_style: str) -> list[StyledLine]:
    writer = _Writer(base_style)
    tokens = PARSER.inline.parse(text, PARSER, {}, [])
    for number, token in enumerate(tokens):
        if token.type == "link_open":
            writer.open_link(str(token.attrs["href"]), _link_text(tokens, number))
        else:
            writer.add(token)
    return writer.lines


def _link_text(tokens: list[Token], opening: int) -> str:
    texts = []
    for token in tokens[opening + 1 :]:
        if token.type == "link_close":
            break
        texts.append(token.content)
    return "".join(texts)


class _Writer:
    """Writes tokens as fragments, with the styles of all that they are inside of."""

    def __init__(self, base_style: str) -> None:
        self.lines: list[StyledLine] = [[]]
        self._styles = [base_style] if base_style else []
        self._url = ""

    def open_link(self, url: str, text: str) -> None:
        """Begins a link. One whose text is its URL shows it once."""
        self._url = "" if url in (text, f"mailto:{text}") else url
        self._styles.append("" if self._url else "class:link")

    def add(self, token: Token) -> None:
        if token.tag in _STYLES:
            if token.nesting > 0:
                self._styles.append(_STYLES[token.tag])
            else:
                self._styles.remove(_STYLES[token.tag])
        elif token.type == "link_close":
            self._styles.remove("" if self._url else "class:link")
            self._write_url(self._url)
        elif token.type == "code_inline":
            self._write(token.content, "class:code")
        elif token.type == "image":
            self._write(f"[image: {_alternative(token)}]")
            self._write_url(str(token.attrs["src"]))
        elif token.type in ("softbreak", "hardbreak"):
            self.lines.append([])
        else:
            for number, line in enumerate(token.content.split("\n")):
                if number:
                    self.lines.append([])
                self._write(line)

    def _write(self, text: str, style: str = "") -> None:
        text = _one_line(text)
        if text:
            append_text(self.lines[-1], " ".join(filter(None, [*self._styles, style])), text)

    def _write_url(self, url: str) -> None:
        if url:
            self._write(" (")
            self._write(url, "class:link")
            self._write(")")


def _alternative(image: Token) -> str:
    return "".join(token.content for token in image.children or [])


def _one_line(text: str) -> str:
    """Removes what entities such as `&#9;` bring in after the source was cleaned."""
    return safe(text).replace("\n", " ").replace("\t", " ")
