"""`cbatch run --lora`: rows of several adapters in one file, their errors, and resuming when an adapter has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbatch import Engine
from cbatch.base.params import SamplingParams
from tests.support.adapters import draw_adapter, save_adapter
from tests.support.command import Command
from tests.support.model_folder import make_tokenizer
from tests.support.tiny_models import make_network

ROWS: list[dict[str, Any]] = [
    {"id": "base", "prompt_token_ids": [5, 6, 7]},
    {"id": "own", "prompt_token_ids": [5, 6, 7], "lora": "sql"},
    {"custom_id": "api", "url": "/v1/completions", "body": {"model": "sql", "prompt": [5, 6, 7], "max_tokens": 8}},
    {"id": "typo", "prompt_token_ids": [5, 6, 7], "lora": "sgl"},
]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_sql(tmp_path / "sql", seed=1)


def save_sql(folder: Path, seed: int) -> Path:
    network = make_network("llama", vocab_size=len(make_tokenizer()), max_position_embeddings=256, head_dim=16)
    return save_adapter(folder, draw_adapter(network, seed=seed))


def test_rows_choose_their_adapter(command: Command, adapter: Path) -> None:
    """Guards the field, the OpenAI way, an unknown name, keys that follow the weights, and the same from Python."""
    command.options += ("--device", "cpu", "--max-tokens", "8", "--token-ids", "-q", "--lora", f"sql={adapter}")
    code, (base, own, api, typo) = command.answer(ROWS)
    assert code == 1 and own["token_ids"] != base["token_ids"] and own["key"] != base["key"]
    body = api["response"]["body"]
    assert body["model"] == "sql" and body["choices"][0]["token_ids"] == own["token_ids"]
    assert typo["error"]["message"] == "line 4: there is no LoRA adapter 'sgl': there are sql"
    with Engine(str(command.model), device="cpu", dtype="float32", lora={"sql": str(adapter)}) as engine:
        prompts = [[5, 6, 7], {"prompt_token_ids": [5, 6, 7], "lora": ""}]
        made = engine.generate(prompts, SamplingParams(max_tokens=8, lora="sql"))
        assert [list(one.token_ids) for one in made] == [own["token_ids"], base["token_ids"]]
        text = [5, 6, 7, 8]
        assert engine.score(text, lora="sql").logprob != engine.score(text).logprob
        assert "sql: " in engine.core.describe()["adapters"]
    assert command("--lora", f"new={adapter}", "--resume") == 1
    save_sql(adapter, seed=2)
    command.said()
    assert command("--resume") == 2 and "LoRA adapter of the line" in command.said()
