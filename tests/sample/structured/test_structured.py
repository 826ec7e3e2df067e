"""Whatever is drawn under the masks, the text keeps to its constraint, and no pattern can hang or end the process."""

from __future__ import annotations

import gc
import itertools
import json
import random
import re
import resource
import string
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cbatch.base.errors import RequestError
from cbatch.base.params import Constraint, Kind
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerDied
from cbatch.model.load_plan import DEMO_MODEL
from cbatch.sample.structured import compiler as compiler_module
from cbatch.sample.structured.compiler import ConstraintCompiler
from cbatch.sample.structured.grammar import GrammarState
from cbatch.sample.structured.lark import to_lark
from cbatch.sample.structured.masks import MaskFiller, Place, TokenMasks
from cbatch.sample.structured.reasoning import ReasoningState
from cbatch.sample.structured.sandbox import TRIAL_LIMITS
from cbatch.sample.structured.token_bitmask import bitmask_size, full_bitmask, to_bools
from cbatch.text.loading import of_transformers
from cbatch.text.tokenizer import ChatTokenizer, ThinkingPlace
from tests.support.faults import wait_until

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

WIDTH = 1030  # of the demo model's logits, were they wider than its tokenizer's vocabulary of 1,024
STOP = 2
CLOSERS = [b"}", b"]", b'"', b","]


def token_bytes() -> list[bytes]:
    """The demo's tokens as bytes, from its tokenizer.json alone: the printable characters stand for the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    meaning = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
    vocabulary = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [b""] * 1024
    for text, token in vocabulary.items():
        tokens[token] = b"" if token < 3 else bytes(meaning[character] for character in text)
    return tokens


TOKENS = token_bytes()


@pytest.fixture(scope="module")
def demo() -> ChatTokenizer:
    return ChatTokenizer(of_transformers(AutoTokenizer.from_pretrained(DEMO_MODEL)))


@pytest.fixture(scope="module")
def compiler(demo: ChatTokenizer) -> Iterator[ConstraintCompiler]:
    with closing(ConstraintCompiler(demo, WIDTH)) as made:
        yield made


def start(
    compiler: ConstraintCompiler, kind: Kind, source: Any = "", *, ends: Any = (STOP,), **options: Any
) -> GrammarState:
    text = source if isinstance(source, str) else json.dumps(source)
    return GrammarState(compiler.compile(Constraint(kind, text)), list(ends), **options)


def fill_masks(states: list[GrammarState]) -> TokenMasks:
    """The masks of some states, one after the other."""
    rows = []
    for state in states:
        bitmask = np.zeros(bitmask_size(state.vocab_size), np.int32)
        state.error = state.error or state.fill(bitmask)
        rows.append(bitmask if state.error is None else full_bitmask(state.vocab_size))
    return TokenMasks(torch.from_numpy(np.stack(rows)), [state.error for state in states])


def bools(masks: TokenMasks, width: int = WIDTH) -> torch.Tensor:
    """The allowed tokens [G, width] of masks, in which no bit past the vocabulary is set."""
    bitmasks = masks.bitmasks.numpy()
    every = to_bools(bitmasks, 32 * bitmasks.shape[1])
    assert not every[:, width:].any()
    return torch.from_numpy(every[:, :width])


def allowed_tokens(state: GrammarState) -> list[int]:
    masks = fill_masks([state])
    assert masks.errors == [None]
    return bools(masks, state.vocab_size)[0].nonzero()[:, 0].tolist()


def nearest_end(allowed: list[int], rng: random.Random) -> int:
    """The token that leads to an end soonest: of JSON, where braces inside of strings do not close anything."""
    places = {TOKENS[token]: token for token in allowed if token < 1024}
    order = [b'"'] if b"z" in places else CLOSERS
    return STOP if STOP in allowed else next((places[text] for text in order if text in places), rng.choice(allowed))


def draw(state: GrammarState, rng: random.Random, soft_limit: int = 40) -> bytes:
    """A random output under the masks; past `soft_limit` tokens, the ones that lead to an end are preferred."""
    output = b""
    for step in range(soft_limit + 400):
        allowed = allowed_tokens(state)
        assert (STOP in allowed) == state.is_complete
        assert not {0, 1, *range(1024, WIDTH)} & set(allowed), "a special token, or one that is none, is allowed"
        token = rng.choice(allowed)
        if step > soft_limit:
            token = nearest_end(allowed, rng)
        state.accept(token)
        if token == STOP or state.is_finished:
            return output if token == STOP else output + TOKENS[token]
        output += TOKENS[token]
    raise AssertionError(f"no end: {output[:300]!r}")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of what the library knows; deeper ones are simpler."""

    def inner() -> dict[str, Any]:
        return random_schema(rng, depth + 1)

    low = rng.randint(-300, 300)
    size = rng.randint(0, 3)
    simple: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
        {"type": "number", "minimum": low / 8, "maximum": low / 8 + 3},
        {"type": "string", "minLength": size, "maxLength": size + rng.randint(0, 5)},
        {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]+$", "^(a|b)+$", "[aeiou]", r"^\w{1,4}-\d{2}$"])},
        {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])},
        {"enum": [low, "two words", None, 'é\n"q"', {"a": [1, 2]}, 1.5][: size + 1]},
        {"const": rng.choice(["x", 7, True, [1, {"b": None}]])},
        {"type": ["boolean", "null"]},
        {"type": "integer", "multipleOf": rng.randint(2, 12)},
    ]
    if depth > 2 or rng.random() < 0.3:
        return rng.choice(simple)
    names = rng.sample(["name", "an age", "é", "x.y", 'q"', "b"], rng.randint(1, 4))
    return rng.choice(
        [
            {"type": "array", "items": inner(), "minItems": size, "maxItems": size + 2},
            {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2},
            {"anyOf": [inner(), inner()]},
            {
                "type": "object",
                "properties": {name: inner() for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": rng.choice([False, {"type": "integer"}]),
            },
            {"allOf": [{"$ref": "#/$defs/t"}], "$defs": {"t": inner()}} if depth == 0 else inner(),
        ]
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_outputs_are_valid_for_random_schemas(compiler: ConstraintCompiler, seed: int) -> None:
    """Guards every keyword we say is kept, in combination, against a second opinion on what is valid."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, of the extra `dev`, is not installed")
    rng = random.Random(seed)
    schema = random_schema(rng)
    for _ in range(3):
        text = draw(start(compiler, "json_schema", schema), rng).decode()
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_blanks_in_json_end(compiler: ConstraintCompiler) -> None:
    """Guards the token budget against a model that only writes blanks, wherever JSON has room for them."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    state = start(compiler, "json_schema", schema | {"required": ["a"], "additionalProperties": False})
    blanks = {token for token, text in enumerate(TOKENS) if text and not text.strip()}
    run, output, rng = 0, b"", random.Random(0)
    for _ in range(300):
        allowed = allowed_tokens(state)
        choice = [token for token in allowed if token in blanks and len(TOKENS[token]) == 1]
        run = run + 1 if choice else 0
        assert run <= 43, output
        token = choice[0] if choice else nearest_end(allowed, rng)
        output += TOKENS[token]
        state.accept(token)
        if state.is_finished:
            return
    raise AssertionError("the output did not end")


PATTERNS = [
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"^\d{1,3}(\.\d{1,3}){3}$",
    r"(yes|no|may be), (I|you) (can|will)(\n|!)?",
    r"[^\x00-\x7f]{1,5}",
    r"(?i)abc/def\/[a-z]{0,3}?\\",
    r".{3,12}",
    r"(?s:.{2,6})\r\n",
    r"[äöü€😀]+x?",
]


CHOICES = ["yes", "yes, please", "a.b*c|d", "\\n\n\t", "(?i)[x]", "/", "é", "ê😀", '"', " ", "#-&~"]
GRAMMAR = 'start: sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[1-9][0-9]{0,2}/\n'
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}},
    "required": ["v"],
    "additionalProperties": False,
}


def is_tree(value: Any) -> bool:
    return (
        isinstance(value["v"], int)
        and value.keys() <= {"v", "next"}
        and ("next" not in value or is_tree(value["next"]))
    )


@pytest.mark.parametrize(
    ("kind", "source", "is_valid", "num_kinds"),
    [
        ("json_object", "", lambda text: isinstance(json.loads(text), dict), 2),
        ("json_schema", TREE, lambda text: is_tree(json.loads(text)), 2),
        ("choice", CHOICES, CHOICES.__contains__, 7),
        ("grammar", GRAMMAR, lambda text: isinstance(eval(text), int), 2),
    ],
    ids=["any object", "a schema of itself", "choices", "a grammar"],
)
def test_random_outputs_are_what_was_asked_for(
    compiler: ConstraintCompiler, kind: Kind, source: Any, is_valid: Callable[[str], bool], num_kinds: int
) -> None:
    """Guards objects, recursion, choices with whatever patterns give a meaning to, and parentheses that close."""
    seeds = range(80 if kind == "choice" else 10)
    outputs = {draw(start(compiler, kind, source), random.Random(seed), soft_limit=20).decode() for seed in seeds}
    assert all(map(is_valid, outputs)) and len(outputs) >= num_kinds


FINITE = [r"a{0,3}b?", r"(ab|é)(ab|é)?", r"(e|é|ê){2}", r"a(b(a(b)?)?)?", r"(a|ab)(b|ba)?", r"[beéê]b|a{2}b?|a{4}b?"]


@pytest.mark.parametrize("pattern", FINITE)
def test_masks_equal_brute_force(compiler: ConstraintCompiler, pattern: str) -> None:
    """Guards the masks against a token too many or too few, inside characters too: some completion must match."""
    texts = ("".join(letters) for length in range(6) for letters in itertools.product("abeéê", repeat=length))
    words = [text.encode() for text in texts if re.fullmatch(pattern, text)]
    rng = random.Random(0)
    for _ in range(6):
        state, prefix = start(compiler, "regex", pattern), b""
        while True:
            expected = {t for t, b in enumerate(TOKENS) if b and any(word.startswith(prefix + b) for word in words)}
            ends = {STOP} if prefix in words else set()
            assert set(allowed_tokens(state)) == expected | ends
            assert state.is_complete == bool(ends)
            if not expected:
                assert state.is_finished
                break
            token = rng.choice(sorted(expected))
            state.accept(token)
            prefix += TOKENS[token]


def test_byte_fallback_tokens() -> None:
    """Guards tokenizers of the SentencePiece kind: bytes as tokens of their own, and spaces written as a letter."""
    names = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.ascii_lowercase]
    backend = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], byte_fallback=True, unk_token="<s>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = ChatTokenizer(of_transformers(PreTrainedTokenizerFast(tokenizer_object=backend)))
    with closing(ConstraintCompiler(tokenizer, len(names))) as made:
        for seed in range(10):
            state, ids, rng = start(made, "choice", ["hi é\n", "日 x"], ends=[]), [], random.Random(seed)
            while not state.is_finished:
                ids.append(rng.choice(allowed_tokens(state)))
                state.accept(ids[-1])
            assert backend.decode(ids) in ("hi é\n", "日 x")


def test_a_vocabulary_wider_than_the_model(demo: ChatTokenizer) -> None:
    """Guards the other mismatch: a tokenizer with tokens that the model has no logits for."""
    with closing(ConstraintCompiler(demo, 300)) as made:
        assert int(bools(fill_masks([start(made, "regex", "[a-z]*")]), 300).sum()) > 26


def test_a_token_that_is_not_allowed_fails_its_request_only(compiler: ConstraintCompiler) -> None:
    """Guards the other outputs of a grammar, and says what happened."""
    wrong, right = (start(compiler, "choice", ["yes", "no"]) for _ in range(2))
    with pytest.raises(RequestError, match="token 67 is not allowed") as caught:
        wrong.accept(67)
    assert caught.value.code == "invalid_row" and not wrong.is_complete and not wrong.is_finished
    masks = fill_masks([wrong, right])
    assert masks.errors[0] is not None and masks.errors[1] is None and bools(masks)[0].all()
    allowed = {TOKENS[token] for token in bools(masks)[1].nonzero()[:, 0].tolist()}
    assert allowed == {b"y", b"ye", b"yes", b"n", b"no"} & {*TOKENS}


def test_the_text_of_a_special_token_is_text(compiler: ConstraintCompiler) -> None:
    """Guards control tokens: a pattern that spells one is matched by plain tokens only."""
    state = start(compiler, "regex", r"(<\|im_end\|>)+", ends=[])
    output = b""
    while len(output) < 25:
        allowed = allowed_tokens(state)
        assert not {0, 1, 2} & set(allowed)
        output += TOKENS[allowed[0]]
        state.accept(allowed[0])
    assert output.startswith(b"<|im_end|><|im_end|>")


def test_ends(compiler: ConstraintCompiler) -> None:
    """Guards what may end an output: text that a row stops at, only once it is complete; nothing follows an end."""
    a, y = TOKENS.index(b"a"), TOKENS.index(b"y")
    state = start(compiler, "regex", "(a|y)a?", ends=[a])
    assert allowed_tokens(state) == [y]
    state.accept(y)
    assert allowed_tokens(state) == [a] and state.is_finished
    state.accept(a)
    assert state.is_finished
    empty = start(compiler, "regex", "", ends=[])
    assert empty.is_complete and allowed_tokens(empty) == [] and empty.is_finished, "as with ignore_eos"
    ended = start(compiler, "regex", "a*")
    ended.accept(STOP)
    assert ended.is_finished and allowed_tokens(ended) == [STOP]
    with pytest.raises(RequestError):
        ended.accept(a)


WRONG: list[tuple[Kind, str, str]] = [
    ("json_schema", "[" * 5000, "nested too deeply"),
    ("json_schema", "3", "must be a JSON object"),
    ("json_schema", '{"type": "objekt"}', "no type 'objekt' (did you mean 'object'?)."),
    ("json_schema", '{"$ref": "#/nowhere"}', "does not exist"),
    ("json_schema", '{"$ref": "http://example.com/x"}', "does not fetch"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
    ("json_schema", '{"$ref": "#"}', "No text can match"),
    ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "Unsatisfiable"),
    ("json_schema", '{"type": "string", "format": "made-up"}', "Unknown format: made-up"),
    ("regex", "(a", "regex cannot be used: unclosed group"),
    ("regex", "a(?=b)", "look-around"),
    ("regex", r"(a)\1", "backreferences are not supported"),
    ("regex", "a\\", "ends with a backslash"),
    ("regex", "a\ud800", "lone surrogate"),
    ("regex", "a" * 2_000_000, "at most 1048576 are read"),
    ("choice", r'["\ud800"]', "lone surrogate"),
    ("grammar", "start: b\nb: c", 'grammar cannot be used: line 2: unknown name: "c"'),
    ("grammar", "", "no start rule"),
    ("grammar", "start: <|im_end|>", "special token"),
]


@pytest.mark.parametrize(("kind", "source", "sentence"), WRONG)
def test_what_is_wrong_is_said(compiler: ConstraintCompiler, kind: Kind, source: str, sentence: str) -> None:
    """Guards rows with a mistake: an error of the row, in a sentence, the first time and from the cache."""
    for _ in range(2):
        with pytest.raises(RequestError, match=re.escape(sentence)) as caught:
            compiler.compile(Constraint(kind, source))
        assert caught.value.code == "invalid_row" and len(str(caught.value)) < 300 and str(caught.value)[-1] in ".…"


KEYWORDS = (
    "not if then else contains minContains maxContains uniqueItems propertyNames dependentRequired dependentSchemas "
    "dependencies unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef"
).split()
WRONG += [
    ("json_schema", json.dumps({"properties": {"a": {word: {}}}}), f'Unimplemented keys: ["{word}"]')
    for word in KEYWORDS
]


LINKS = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(8000)}
RULES = "\n".join(f'r{n}: "a" r{n + 1}' for n in range(20_000))
TERRIBLE: dict[str, tuple[Kind, Any]] = {
    "nested counts": ("regex", r"((a{1,100}){1,100}){1,100}"),
    "ambiguous": ("regex", r"(x+x+)+y"),
    "alternatives": ("regex", "(" + "|".join("a" * n for n in range(1, 300)) + ")*b"),
    "states": ("regex", r".*[ab].{14}[cd].{14}[ef]"),
    "huge count": ("regex", r"(a{1,4294967295}b){1,4294967295}"),
    "parentheses": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "a million alternatives": ("regex", "ab|" * 300_000 + "c"),
    "deep schema": ("json_schema", '{"items":' * 900 + "{}" + "}" * 900),
    "wide schema": ("json_schema", {"properties": {f"property {n}": {"type": "string"} for n in range(12_000)}}),
    "options": ("json_schema", {"properties": {f"p{n}": {} for n in range(1500)}, "additionalProperties": False}),
    "product": ("json_schema", {"allOf": [{"anyOf": [{"required": [x + str(n)]} for x in "ab"]} for n in range(20)]}),
    "references, which break the library": (
        "json_schema",
        {"$defs": LINKS | {"a8000": {"type": "integer"}}, "$ref": "#/$defs/a0"},
    ),
    "rules, which break the library": ("grammar", f'start: r0\n{RULES}\nr20000: "b"'),
    "ambiguous grammar": ("grammar", 'start: e\ne: e e e | e e | "a"'),
}


@pytest.mark.parametrize("name", TERRIBLE)
def test_nothing_hangs_or_ends_the_process(compiler: ConstraintCompiler, name: str) -> None:
    """Guards the engine against patterns made to break it: refused, or served at an ordinary pace."""
    begun, rng = time.thread_time(), random.Random(0)
    try:
        state = start(compiler, *TERRIBLE[name])
        for _ in range(40):
            masks = fill_masks([state])
            if masks.errors[0] or state.is_finished:
                break
            state.accept(rng.choice(bools(masks)[0].nonzero()[:, 0].tolist()))
    except RequestError as error:
        assert error.code == "invalid_row"
    assert time.thread_time() - begun < 3
    assert allowed_tokens(start(compiler, "choice", ["y"])) == [TOKENS.index(b"y")]


def test_a_grammar_that_takes_too_long_ends() -> None:
    """Guards the limit of time on what the library's own limits do not reach; the next grammar is tried as ever."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with closing(Sandbox(compiler_module.TRIAL, limits=TRIAL_LIMITS._replace(cpu_seconds=0.2))) as sandbox:
        with pytest.raises(WorkerDied, match="does not end"):
            sandbox.call("check", to_lark(Constraint("regex", ".?" * 8000)))
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2
        assert sandbox.call("check", to_lark(Constraint("regex", "a"))) is None


def test_constraints_are_compiled_once(demo: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a batch in which every row has the same schema, and the memory of one in which each has its own."""
    monkeypatch.setattr(compiler_module, "CACHE_SIZE", 2)
    a, b, c = (Constraint("choice", f'["{text}"]') for text in "abc")
    with closing(ConstraintCompiler(demo, WIDTH)) as made:
        first, second = made.compile(a), made.compile(b)
        assert made.compile(a) is first
        made.compile(c)
        assert made.compile(a) is first and made.compile(b) is second, "somebody holds it"
        was = weakref.ref(second)
        del second
        made.compile(a)
        made.compile(c)
        assert was() is None, "nobody does"


@pytest.mark.parametrize("constraint", [Constraint("regex", "("), Constraint("json_schema", "3")])
def test_a_remembered_error_keeps_no_caller(compiler: ConstraintCompiler, constraint: Constraint) -> None:
    """Guards the memory of an engine that is dropped: the traceback of a wrong constraint held all of it."""

    def ask(caller: set[int]) -> None:
        with pytest.raises(RequestError):
            compiler.compile(constraint)

    caller = {1}
    was = weakref.ref(caller)
    ask(caller)
    del caller
    gc.collect()
    assert was() is None


def test_what_is_known_waits_for_nothing(compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the engine's thread, which asks for a grammar while another thread compiles something slow."""
    known, begun, go = Constraint("choice", '["known"]'), threading.Event(), threading.Event()
    grammar = compiler.compile(known)
    monkeypatch.setattr(compiler, "_compile", lambda _: (begun.set(), go.wait()) and grammar)
    thread = threading.Thread(target=compiler.compile, args=(Constraint("choice", '["slow"]'),))
    thread.start()
    begun.wait()
    assert compiler.compile(known) is grammar
    go.set()
    thread.join()


def test_the_missing_extra_is_said(demo: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards an installation without the library: rows that ask for it are told what to install."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"needs llguidance: pip install .*\[structured\]'\.$") as caught:
        ConstraintCompiler(demo, WIDTH).compile(Constraint("json_object"))
    assert caught.value.code == "invalid_row"


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_filler_gives_what_fill_gives(compiler: ConstraintCompiler, num_threads: int) -> None:
    """Guards the masks of a step that threads fill, row by row, over many steps and changing numbers of rows."""
    rng = random.Random(0)
    pairs = [[start(compiler, "regex", pattern) for _ in range(2)] for pattern in [*PATTERNS, "[a-z]*"]]
    with closing(MaskFiller(num_threads)) as filler:
        filler.begin([])
        assert filler.result() is None
        for _ in range(8):
            filler.begin([Place(mine) for mine, _ in pairs])
            masks, expected = filler.result(), fill_masks([theirs for _, theirs in pairs])
            assert masks.bitmasks.equal(expected.bitmasks) and masks.errors == expected.errors
            for row, pair in enumerate(pairs):
                token = rng.choice(bools(masks)[row].nonzero()[:, 0].tolist())
                for state in pair:
                    state.accept(token)
            pairs = [pair for pair in pairs if not pair[0].is_finished]


@pytest.mark.parametrize("seed", range(4))
def test_masks_behind_a_draft_are_those_that_follow(compiler: ConstraintCompiler, seed: int) -> None:
    """Guards rows behind drafted tokens: their masks are those of an output that got these tokens; nothing advances."""
    rng, filler = random.Random(seed), MaskFiller(1)
    for pattern in [*PATTERNS, "[a-z]{2,30}"]:
        state, twin = start(compiler, "regex", pattern), start(compiler, "regex", pattern)
        for _ in range(4):
            draft, wanted = [], [bools(fill_masks([twin]))[0]]
            while len(draft) < 5 and wanted[-1].any() and not twin.is_finished:
                draft.append(rng.choice(wanted[-1].nonzero()[:, 0].tolist()))
                twin.accept(draft[-1])
                wanted.append(bools(fill_masks([twin]))[0])
            allowed = state.num_allowed(draft)
            assert allowed == len([token for token in draft if token != STOP])
            filler.begin([Place(state, tuple(draft))])
            masks = filler.result()
            assert masks is not None and masks.errors[0] is None and not state.is_finished
            for place, mask in enumerate(bools(masks)):
                if masks.errors[place] is None:
                    assert mask.equal(wanted[place])
                else:
                    assert not wanted[place].any() or twin.is_finished
            if twin.is_finished:
                break
            for token in draft:
                state.accept(token)
    filler.close()


def until_7(ids: Sequence[int], opened: bool) -> ThinkingPlace:
    """Reasoning that token 7 ends, and that the prompt has opened."""
    return "after" if 7 in ids else "inside"


def after_5(ids: Sequence[int], opened: bool) -> ThinkingPlace:
    """Reasoning that the model opens itself, with token 5."""
    return "before" if 5 not in ids and len(ids) < 3 else until_7(ids, opened) if 5 in ids else "after"


def test_a_budget_counts_from_where_the_model_opens_its_reasoning() -> None:
    """Guards models whose template leaves the tag to them, and those that do not reason at all."""
    state = ReasoningState(WIDTH, [STOP], after_5, opened=False, closing=[7], thinking_budget=2)
    for token in (9, 5, 8):
        assert not state.forced
        state.accept(token)
    state.accept(8)
    assert list(state.forced) == [7]
    none = ReasoningState(WIDTH, [STOP], after_5, opened=False, closing=[7], thinking_budget=0)
    assert not none.forced
    for token in (9, 9, 9):
        assert not none.is_over
        none.accept(token)
    assert none.is_over
    at_once = ReasoningState(WIDTH, [STOP], after_5, opened=False, closing=[7], thinking_budget=0)
    at_once.accept(5)
    assert list(at_once.forced) == [7]


def test_a_constraint_may_begin_after_reasoning(compiler: ConstraintCompiler) -> None:
    """Guards reasoning before JSON: anything but an end, then the form; and drafts, which stop at the border."""
    form = start(compiler, "choice", ["y"])
    state = ReasoningState(WIDTH, [STOP], until_7, opened=True, successor=form)
    rows = np.zeros((3, bitmask_size(WIDTH)), np.int32)
    assert state.fill_ahead(rows, [5, 9]) == [None] * 3
    for allowed in to_bools(rows, WIDTH):
        assert allowed.sum() == WIDTH - 1 and not allowed[STOP]
    assert state.num_allowed([5, 9, 7, 8]) == 2 and state.num_allowed([5, STOP]) == 1 and not state.forced
    for token in (5, 9, 7):
        assert not state.is_over
        state.accept(token)
    assert state.is_over and state.successor is form


def test_reasoning_ends_when_its_budget_does(compiler: ConstraintCompiler) -> None:
    """Guards the budget: after so many tokens only those come that close the reasoning, in masks and in drafts."""
    state = ReasoningState(WIDTH, [STOP], until_7, opened=True, closing=[3, 7], thinking_budget=2)
    assert not state.needs_mask
    for token in (5, 9):
        assert not state.forced
        state.accept(token)
    assert list(state.forced) == [3, 7] and state.needs_mask and state.num_allowed([3, 7]) == 2
    rows = np.zeros((2, bitmask_size(WIDTH)), np.int32)
    state.fill_ahead(rows, [3])
    assert [row.nonzero()[0].tolist() for row in to_bools(rows, WIDTH)] == [[3], [7]]
    state.accept(3)
    assert not state.is_over
    state.accept(7)
    assert state.is_over and state.successor is None
    assert list(ReasoningState(WIDTH, [], until_7, opened=True, closing=[3], thinking_budget=0).forced) == [3]


def test_reasoning_leaves_a_form_its_tokens(compiler: ConstraintCompiler) -> None:
    """Guards JSON behind long reasoning: it begins while the budget still holds it."""
    form = start(compiler, "choice", ["yes, of course"], closes=True)
    state = ReasoningState(WIDTH, [STOP], until_7, opened=True, closing=[7], budget=100, successor=form)
    left = 100
    while not state.is_over and left:
        left -= 1
        state.accept(state.forced[0] if state.forced else 5, left)
    assert form.shortest < left < 60


def test_forced_text_is_queued_as_the_tokenizer_cuts_it(compiler: ConstraintCompiler, demo: ChatTokenizer) -> None:
    """Guards what costs no step: the keys of a schema, token by token, and nothing where there is a choice."""
    schema = {"type": "object", "properties": {"description": {"type": "string"}}, "required": ["description"]}
    state = start(compiler, "json_schema", schema)
    forced = list(state.forced)
    assert len(forced) > 1 and '{"description": "'.startswith(demo.decode(forced))
    assert state.num_allowed(forced) == len(forced) and state.num_allowed([forced[0], 5]) == 1
    rows = np.zeros((2, bitmask_size(state.vocab_size)), np.int32)
    state.fill_ahead(rows, forced[:1])
    assert [row.nonzero()[0].tolist() for row in to_bools(rows, WIDTH)] == [[token] for token in forced[:2]]
    with pytest.raises(RequestError, match="not allowed"):
        start(compiler, "json_schema", schema).accept(forced[-1])
    assert not start(compiler, "choice", ["yes", "no"]).forced
    whole = start(compiler, "choice", ["yes"])
    for token in list(whole.forced):
        whole.accept(token)
    assert whole.is_finished, "the whole of it is forced, to its end"


def test_nobody_waits_for_a_thread_that_cannot_be_started(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a step against waiting forever if the system has no thread left; it can be tried again."""
    state = start(compiler, "choice", '["y"]')
    with closing(MaskFiller(1)) as filler:
        with monkeypatch.context() as patched:
            patched.setattr(threading, "Thread", lambda **_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                filler.begin([Place(state)])
        assert filler.result() is None
        filler.begin([Place(state)])
        masks = filler.result()
    assert masks is not None and masks.bitmasks.equal(fill_masks([state]).bitmasks)


class Broken(GrammarState):
    """A state whose mask fails as told."""

    wait: threading.Event | None = None

    def fill(self, bitmask: np.ndarray) -> str | None:
        if self.wait is not None:
            self.wait.wait()
            return super().fill(bitmask)
        raise ValueError("it broke")


def filling_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "cbatch-masks"}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_state_that_fails_or_stalls_harms_no_other(compiler: ConstraintCompiler) -> None:
    """Guards a step: an exception or a mask without end is an error of that request, and the thread is replaced."""
    grammar = compiler.compile(Constraint("choice", '["y"]'))
    stalled, broken = Broken(grammar, [STOP]), Broken(grammar, [STOP])
    stalled.wait = threading.Event()
    filler, before = MaskFiller(num_threads=1, limit=0.05), filling_threads()
    for _ in range(3):
        good = [start(compiler, "choice", ["y"]) for _ in range(3)]
        filler.begin([Place(state) for state in (good[0], stalled, good[1], broken, good[2])])
        masks = filler.result()
        assert [error is None for error in masks.errors] == [True, False, True, False, True]
        assert "took longer than 0.05 s" in str(masks.errors[1]) and "it broke" in str(masks.errors[3])
        assert bools(masks).sum(dim=1).tolist() == [1, WIDTH, 1, WIDTH, 1]
    assert len(filling_threads() - before) == 2, "a state that stalled was filled again"
    stalled.wait.set()
    filler.begin([Place(start(compiler, "choice", ["y"]))])
    assert bools(filler.result()).sum() == 1 and stalled.error is not None
    filler.close()
    wait_until(lambda: not filling_threads() - before, 5)
