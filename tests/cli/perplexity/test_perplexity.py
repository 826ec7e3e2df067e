"""`cbatch perplexity` gives what plain torch computes, with the windows of llama.cpp and of transformers."""

from __future__ import annotations

import io
import json
import math
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from cbatch.cli.main import run_command
from cbatch.cli.perplexity import measure
from cbatch.sample import output
from tests.support.model_folder import save_model

TEXT = "The system helps the assistant; hello world, said the user, and é😀 too. " * 3


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@cache
def network_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logprobs(network: Any, ids: list[int]) -> Tensor:
    """[N - 1, vocabulary] float64, of the tokens after each but the last."""
    return torch.log_softmax(network(torch.tensor([ids])).logits[0, :-1].double(), -1)


def ids_of(folder: Path, text: str = TEXT) -> list[int]:
    return list(AutoTokenizer.from_pretrained(folder).encode(text))


def halves(folder: Path, context: int) -> list[tuple[list[int], int]]:
    """Windows of llama.cpp's `perplexity`: the tokens, and the first that is scored."""
    ids = ids_of(folder)
    windows = [ids[at * context : (at + 1) * context] for at in range(len(ids) // context)]
    return [([0, *window[1:]], context // 2 + 1) for window in windows]


def strides(ids: list[int], context: int, stride: int) -> list[tuple[list[int], int]]:
    """Windows of transformers' recipe, https://huggingface.co/docs/transformers/perplexity."""
    found, previous = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window, targets = ids[begin:end], end - previous
        found.append((window, max(len(window) - targets, 1)))
        previous = end
        if end == len(ids):
            break
    return found


def nll_of(network: Any, windows: list[tuple[list[int], int]]) -> Tensor:
    """Of all scored tokens [N]."""
    parts = []
    for ids, start in windows:
        chosen = logprobs(network, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        parts.append(-chosen[start - 1 :])
    return torch.cat(parts)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The figures. Nothing else is on stdout."""
    assert run_command(["perplexity", *map(str, arguments), "--json", "-q"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def options_of(folder: Path) -> tuple[object, ...]:
    return "-m", folder, "--device", "cpu", "--dtype", "float32"


def check(found: dict[str, Any], nll: Tensor, name: str = "perplexity") -> None:
    value, error = math.exp(nll.mean()), float(nll.std()) / math.sqrt(len(nll))
    assert found[name] == pytest.approx(value, rel=1e-5)
    assert found[f"{name}_error"] == pytest.approx(value * error, rel=1e-4)


@pytest.mark.parametrize("context", [64, 31])
def test_windows_of_llama_cpp(context: int, model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards which tokens are scored, BOS at each window's start, and the standard error; several steps per window."""
    found = run(capsys, text, "--context", context, *options_of(model_folder), "--max-batch-tokens", 40)
    windows = halves(model_folder, context)
    nll = nll_of(network_of(model_folder), windows)
    check(found, nll)
    assert (found["scored_tokens"], found["windows"]) == (len(nll), len(windows))
    assert found["scored_tokens"] == len(windows) * (context - context // 2 - 1) and found["tokens_per_s"] > 0
    limited = run(capsys, text, "--context", context, *options_of(model_folder), "--limit", 1)
    check(limited, nll_of(network_of(model_folder), windows[:1]))


@pytest.mark.parametrize(("before", "after"), [([], []), ([1], []), ([1], [2]), ([], [2])])
def test_special_tokens_of_windows(before: list[int], after: list[int]) -> None:
    """Guards BOS in each window, if the tokenizer puts one before texts, and none for an EOS behind them."""

    def encode(text: str, *, raw: bool) -> list[int]:
        return [*before, *range(10, 10 + len(text)), *after]

    engine: Any = SimpleNamespace(encode=encode)
    first, second = list(measure.text_windows(engine, b"x" * 10, 5, None))[:2]
    both = [*before, *range(10, 20)]
    assert list(first.ids) == both[:5] and list(second.ids) == [*before, *both[5 + len(before) : 10]]


@pytest.mark.parametrize("stride", [64, 63, 24, 1])
def test_windows_of_transformers(
    stride: int, model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards that each token is scored once, in the window that sees most before it, also at the text's end."""
    limit = 9 if stride == 1 else 99
    found = run(capsys, text, "--context", 64, "--stride", stride, *options_of(model_folder), "--limit", limit)
    windows = strides(ids_of(model_folder), 64, stride)
    nll = nll_of(network_of(model_folder), windows[:limit])
    check(found, nll)
    assert found["scored_tokens"] == len(nll)


@torch.no_grad()
def test_the_recipe_of_transformers(model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards figures beside those of the recipe as published, which weighs each window by one token less."""
    found = run(capsys, text, "--context", 64, "--stride", 32, *options_of(model_folder))
    ids, network = torch.tensor([ids_of(model_folder)]), network_of(model_folder)
    nll_sum = n_tokens = previous = 0
    for begin in range(0, ids.shape[1], 32):
        end = min(begin + 64, ids.shape[1])
        inputs = ids[:, begin:end]
        targets = inputs.clone()
        targets[:, : -(end - previous)] = -100
        num_loss_tokens = int((targets != -100).sum()) - 1
        nll_sum += float(network(inputs, labels=targets).loss) * num_loss_tokens
        n_tokens += num_loss_tokens
        previous = end
        if end == ids.shape[1]:
            break
    assert found["perplexity"] == pytest.approx(math.exp(nll_sum / n_tokens), rel=0.03)


def test_rows(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards rows: each begins anew, in each of its forms, and a long one takes windows that overlap by half."""
    rows: list[dict[str, Any]] = [
        {"text": "hello world"},
        {"prompt": TEXT, "other": 5},
        {"prompt_token_ids": [7, 8, 9]},
        {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = run(capsys, path, "--context", 40, *options_of(model_folder))
    chat = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    chat_ids = AutoTokenizer.from_pretrained(model_folder).encode(chat, add_special_tokens=False)
    all_ids = [ids_of(model_folder, "hello world"), ids_of(model_folder), [7, 8, 9], list(chat_ids)]
    windows = [window for ids in all_ids for window in strides(ids, 40, 20)]
    check(found, nll_of(network_of(model_folder), windows))


def test_a_row_without_a_score_is_told(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a figure that hides rows: they are counted, and the exit code is 1; of such rows alone, 2."""
    wrong = ['{"text": ""}', '{"text": 5}', "{", '{"other": 1}', '{"prompt_token_ids": [1.5, 2]}']
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"text": "hello world"}', *wrong]))
    arguments = ["perplexity", str(path), "--json", *map(str, options_of(model_folder))]
    assert run_command(arguments) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["row_errors"] == len(wrong)
    assert "5 rows cannot be scored; the first: line 2: there is no token to score." in shown.err
    path.write_text("\n".join(wrong))
    assert run_command(arguments) == 2
    shown = capsys.readouterr()
    assert not shown.out and "line 1: there is no token to score" in shown.err


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `model_folder` with other numbers."""
    folder = save_model(tmp_path_factory.mktemp("other"))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    network.save_pretrained(folder)
    return folder


def check_comparison(found: dict[str, Any], tested: Any, base: Any, windows: list[tuple[list[int], int]]) -> None:
    """Against plain torch."""
    nll, base_nll = nll_of(tested, windows), nll_of(base, windows)
    check(found, nll)
    check(found, base_nll, "base_perplexity")
    check(found, nll - base_nll, "ratio")
    left, right = (
        torch.cat([logprobs(network, ids)[start - 1 :] for ids, start in windows]) for network in (base, tested)
    )
    kl = torch.nn.functional.kl_div(right, left, reduction="none", log_target=True).sum(-1)
    assert found["kl_divergence"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found["kl_divergence_error"] == pytest.approx(float(kl.std()) / math.sqrt(len(kl)), rel=1e-4)
    same = (left.argmax(-1) == right.argmax(-1)).double().mean()
    assert 0 < same < 1 and found["same_top"] == pytest.approx(float(same))
    assert found["logprob_difference"] == pytest.approx(float((nll - base_nll).abs().mean()), rel=1e-4)
    change = (-nll).exp() - (-base_nll).exp()
    assert found["rms_probability_difference"] == pytest.approx(float(change.square().mean().sqrt()), rel=1e-4)


@pytest.mark.parametrize("form", [(), ("--stride", 24)])
def test_against_another_model(
    form: tuple[object, ...],
    model_folder: Path,
    other_folder: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards divergence, equal top tokens and errors; in pieces of a step and of the vocabulary's rows."""
    monkeypatch.setattr(measure, "MAX_ELEMENTS", 300 * 3)
    options = *options_of(model_folder), "--context", 64, "--max-batch-tokens", 40, *form
    found = run(capsys, text, *options, "--against", other_folder)
    windows = strides(ids_of(model_folder), 64, 24) if form else halves(model_folder, 64)
    check_comparison(found, network_of(model_folder), network_of(other_folder), windows)
    assert found["against"]["model"] != found["model"] and "tokens_per_s" not in found


def test_against_a_dtype(model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards what the base is: unquantized, with a plain cache; so float32 has no divergence from itself."""
    options = "-m", model_folder, "--device", "cpu", "--context", 64
    same = run(capsys, text, *options, "--dtype", "float32", "--against", "float32")
    assert same["kl_divergence"] == pytest.approx(0, abs=1e-9) and same["same_top"] == same["ratio"] == 1
    lossy = run(capsys, text, *options, "--quantize", "int8", "--kv-dtype", "u8", "--against", "float32")
    assert lossy["base_perplexity"] == pytest.approx(same["perplexity"], rel=1e-6)
    assert 1e-6 < lossy["kl_divergence"] < 0.1 and lossy["bits_per_weight"] < lossy["against"]["bits_per_weight"]
    assert lossy["against"]["kv_dtype"] == "float32" != lossy["kv_dtype"]


def test_a_shift_by_one_token_is_seen(
    model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the comparison itself: logits of the place before are another distribution."""
    kept, calls = measure.divergence, [0]

    def shifted(base: Tensor, logits: Tensor) -> Tensor:
        calls[0] += 1
        return kept(base, logits.roll(1, 0))

    options = *options_of(model_folder), "--context", 64, "--against", "float32"
    assert run(capsys, text, *options)["kl_divergence"] < 1e-9
    monkeypatch.setattr(measure, "divergence", shifted)
    found = run(capsys, text, *options)
    assert calls[0] and found["kl_divergence"] > 0.1 and found["same_top"] < 0.9


def test_lines_and_stdin(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards people: a line for each figure with its error on stdout, and the rest on stderr; a BOM is no text."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + TEXT.encode())))
    assert run_command(["perplexity", "--context", "64", *map(str, options_of(model_folder))]) == 0
    shown = capsys.readouterr()
    value = math.exp(nll_of(network_of(model_folder), halves(model_folder, 64)).mean())
    (line,) = [line for line in shown.out.splitlines() if line.startswith("perplexity ")]
    _, found, sign, error = line.split()
    assert float(found) == pytest.approx(value, rel=1e-4) and sign == "±" and 0 < float(error) < value
    assert "parameters:" in shown.err and "parameters:" not in shown.out


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (b"", (), "shorter than a window"),
        (b"hello", ("--context", "64"), "shorter than a window"),
        (b"", ("--stride", "8"), "shorter than a window"),
        (b"", ("--format", "jsonl"), "there are no rows"),
        (b"\xff" * 99, (), "The text, byte 1: not valid UTF-8"),
        (b"a", ("--context", "257"), "the model's 256 tokens"),
        (b"a", ("--context", "8", "--stride", "9"), "less than --stride"),
        (b"a", ("--against", "no/such/model"), "no/such/model"),
    ],
)
def test_what_gives_no_figure(
    data: bytes,
    arguments: tuple[str, ...],
    message: str,
    model_folder: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards against a figure of nothing, and windows that cannot be."""
    text.write_bytes(data)
    assert run_command(["perplexity", str(text), *map(str, options_of(model_folder)), *arguments]) == 2
    shown = capsys.readouterr()
    assert not shown.out and message in shown.err


def test_no_such_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the message, before a model is loaded for it."""
    assert run_command(["perplexity", str(tmp_path / "none.txt"), "-m", "no/such/model"]) == 2
    assert "none.txt: No such file or directory" in capsys.readouterr().err


def test_other_tokens_are_not_compared(
    model_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against comparing models whose tokenizers differ."""
    folder = save_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.save_pretrained(folder)
    arguments = ["perplexity", str(text), "--against", str(folder), *map(str, options_of(model_folder))]
    assert run_command([*arguments, "--context", "64"]) == 2
    assert "their tokens of this text differ" in capsys.readouterr().err


def test_logits_that_are_no_numbers(
    model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a perplexity of NaN."""
    kept = output._score

    def broken(logits: Tensor, *others: Any) -> Any:
        return kept(logits.fill_(math.nan), *others)

    monkeypatch.setattr(output, "_score", broken)
    assert run_command(["perplexity", str(text), "--context", "64", *map(str, options_of(model_folder))]) == 3
    assert "not a number" in capsys.readouterr().err
