"""Trains the bundled demo model from scratch on dialogues of our own (see data.py).

A run continues from its last checkpoint in --work. The device is accelerate's choice; two CPU cores
need a good hour.
"""

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.demo.data import Overlap, held_out, own_wording, training_dialogues
from scripts.demo.skills.spelling import WORD_MAKER
from scripts.demo.tokens import (
    CHAT_TEMPLATE,
    CHUNK,
    CONTEXT,
    END,
    END_OF_TEXT,
    VOCABULARY,
    Encoder,
    micro_batches,
    tensors,
    train_tokenizer,
    word_pieces,
)


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A small Llama."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=704,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(END),
    )
    return LlamaForCausalLM(config)


def weighted_loss(model: torch.nn.Module, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of the weighted token losses; the head only runs where there is loss."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    wanted = weights[:, 1:] > 0
    losses = torch.nn.functional.cross_entropy(logits[wanted].float(), ids[:, 1:][wanted], reduction="none")
    return (losses * weights[:, 1:][wanted]).sum()


def optimizers(model: torch.nn.Module, rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


@dataclass
class Progress:
    """Where the training stands; saved with every checkpoint."""

    chunk: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """For accelerate's checkpoints."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For accelerate's checkpoints."""
        vars(self).update(state)


def rate_factor(done: float) -> float:
    """Warm up, stay, then fall to zero over the second half."""
    return min(1.0, done / 0.02 + 0.02, max(0.0, (1.0 - done) / 0.5))


def chunk_batches(
    encoder: Encoder, overlap: Overlap, seed: int, args: argparse.Namespace
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The optimizer steps of one chunk of fresh dialogues."""
    samples = [encoder.encode(dialogue) for dialogue in training_dialogues(seed, CHUNK) if not overlap.found(dialogue)]
    # the generator avoids held-out operands and words; only an invented word or a repeated question slips through
    assert len(samples) > 0.99 * CHUNK
    groups = micro_batches(samples, args.micro_tokens, random.Random(seed))
    for at in range(0, len(groups) - args.accumulate + 1, args.accumulate):
        yield [tensors(group) for group in groups[at : at + args.accumulate]]


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optims: list[Any],
    batch: list[tuple[torch.Tensor, torch.Tensor]],
) -> float:
    """One optimizer step over some micro-batches; returns the mean loss."""
    total = sum(float(weights[:, 1:].sum()) for _, weights in batch)
    loss_sum = 0.0
    for ids, weights in batch:
        with accelerator.autocast():
            loss = weighted_loss(model, ids.to(accelerator.device), weights.to(accelerator.device)) / total
        accelerator.backward(loss)
        loss_sum += float(loss.detach())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    for optim in optims:
        optim.step()
        optim.zero_grad()
    return loss_sum


def run(accelerator: Accelerator, args: argparse.Namespace, tokenizer: Tokenizer, overlap: Overlap) -> LlamaForCausalLM:
    """The training loop."""
    model = build_model(tokenizer)
    if args.start:
        model = LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    if args.compile:
        model.compile(dynamic=True)
    rates = (args.rate, args.adam_rate)
    model, *optims = accelerator.prepare(model, *optimizers(model, *rates))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    checkpoint = args.work / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    encoder = Encoder(tokenizer)
    bar = tqdm(total=args.steps, initial=progress.step, unit="step", mininterval=10)
    saved = last = time.monotonic()
    while progress.step < args.steps and progress.seconds < 60 * args.minutes:
        seed = args.seed + progress.chunk * accelerator.num_processes + accelerator.process_index
        for batch in chunk_batches(encoder, overlap, seed, args):
            done = max(progress.step / args.steps, progress.seconds / (60 * args.minutes))
            for optim, rate in zip(optims, rates, strict=True):
                optim.param_groups[0]["lr"] = rate * rate_factor(done)
            loss = train_step(accelerator, model, optims, batch)
            progress.step += 1
            progress.tokens += sum(ids.numel() for ids, _ in batch) * accelerator.num_processes
            progress.seconds += time.monotonic() - last
            last = time.monotonic()
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", tokens=f"{progress.tokens / 1e6:.1f}M", done=f"{done:.1%}")
        progress.chunk += 1
        if last - saved > args.save_every:
            saved = last
            save_checkpoint(accelerator, checkpoint)
            write_model(accelerator.unwrap_model(model), tokenizer, args.work / "latest")
    save_checkpoint(accelerator, checkpoint)
    return accelerator.unwrap_model(model)


def average(model: LlamaForCausalLM, other: LlamaForCausalLM) -> None:
    """Move the weights half-way to another model's; better than either where one continues the other.

    (Model soups: https://arxiv.org/abs/2203.05482.)
    """
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.device), 0.5)


def save_checkpoint(accelerator: Accelerator, folder: Path) -> None:
    """Replace the checkpoint in one move, so that a cut-off run keeps the old one."""
    fresh = folder.with_name("checkpoint-new")
    accelerator.save_state(str(fresh))
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """The finished folder: config, weights in bfloat16, tokenizer with chat template."""
    chat = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(
        bos_token_id=chat.bos_token_id, pad_token_id=chat.pad_token_id, eos_token_id=chat.eos_token_id
    )
    copy.save_pretrained(folder)
    chat.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model or an earlier run, else a new one that a resumed run will find again."""
    path = folder / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(seed=0)
    tokenizer.save(str(path))
    return tokenizer


def main() -> None:
    """Train and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "cbatch" / "demo")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "demo-train")
    parser.add_argument("--start", type=Path, help="fine-tune this model instead of starting from scratch")
    parser.add_argument("--average", action="store_true", help="with --start: write the mean of both models' weights")
    parser.add_argument("--steps", type=int, default=5450)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the schedule after this time")
    parser.add_argument("--micro-tokens", type=int, default=3072)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="faster, but needs a C++ compiler on a CPU")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--adam-rate", type=float, default=4e-3)
    parser.add_argument("--save-every", type=float, default=300.0, help="seconds between checkpoints")
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(args.seed)
    overlap = Overlap(held_out() + own_wording())
    tokenizer = load_tokenizer(args.start or args.work)
    WORD_MAKER.pieces = word_pieces(tokenizer)
    model = run(accelerator, args, tokenizer, overlap)
    if args.start and args.average:
        average(model, LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32))
    if accelerator.is_main_process:
        write_model(model, tokenizer, args.out)
        print(json.dumps({"written": str(args.out)}))


if __name__ == "__main__":
    main()
