"""The demo model's tokenizer, and dialogues as token ids with loss weights."""

import random
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.demo.data import Dialogue, training_dialogues

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# A space sticks to a word in lower case only: names, digits and quoted words look the same wherever they stand.
SPLIT = r" ?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Lu}\p{Ll}+|\p{N}|\s|[^\s\p{L}\p{N}]+|\p{L}"


VOCABULARY = 1024


CONTEXT = 1024


CHUNK = 4096
END_WEIGHT = 0.5
"""Loss weight of the end token at least: where to stop is the hard part of counting."""


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE over a sample of the dialogues."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text
        for dialogue in training_dialogues(seed, 5 * CHUNK)
        for turn in dialogue.turns
        # reversed words would waste merges
        for text in ((turn.user,) if turn.by_char else (turn.user, turn.answer))
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_pieces(tokenizer: Tokenizer) -> list[str]:
    """The vocabulary's pieces in plain lower case, to be glued into words to spell."""
    pieces = {token.lstrip("Ġ").lower() for token in tokenizer.get_vocab()}
    return sorted(piece for piece in pieces if piece.isascii() and piece.isalpha())


@dataclass
class Sample:
    """Token ids and the loss weight of each."""

    ids: list[int]
    weights: list[float]


class Encoder:
    """Dialogues to samples; only answers carry loss."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start, self.end = tokenizer.encode(START + END).ids
        self.newline = tokenizer.encode("\n").ids
        roles = ("system", "user", "assistant")
        self.roles = {role: [self.start, *tokenizer.encode(role + "\n").ids] for role in roles}

    def ids(self, text: str, by_char: bool = False) -> list[int]:
        """Ids of a text, character by character for reversed words."""
        if by_char:
            return [token for char in text for token in self.tokenizer.encode(char).ids]
        return self.tokenizer.encode(text).ids

    def encode(self, dialogue: Dialogue) -> Sample:
        """One training sample, cut at the context length."""
        sample = Sample([], [])
        if dialogue.system:
            self.add(sample, "system", self.ids(dialogue.system), 0.0)
        last = len(dialogue.turns) - 1
        for at, turn in enumerate(dialogue.turns):
            self.add(sample, "user", self.ids(turn.user), 0.0)
            # an earlier reversed word reads as the tokenizer cuts it, so some are shown that way, without loss
            as_read = turn.by_char and at < last and len(turn.answer) % 2 == 0
            answer = self.ids(turn.answer, turn.by_char and not as_read)
            self.add(sample, "assistant", answer, 0.0 if as_read else (len(answer) + 1) ** -0.5)
        return Sample(sample.ids[:CONTEXT], sample.weights[:CONTEXT])

    def add(self, sample: Sample, role: str, content: list[int], weight: float) -> None:
        """Append one message."""
        head = self.roles[role]
        sample.ids += head + content + [self.end] + self.newline
        # short answers would drown in stories if all tokens counted the same
        weights = [weight] * len(content) + [max(weight, END_WEIGHT) if weight else 0.0]
        sample.weights += [0.0] * len(head) + weights + [0.0] * len(self.newline)


def micro_batches(samples: list[Sample], tokens: int, rng: random.Random) -> list[list[Sample]]:
    """Samples of like length together, in random order of the groups."""
    groups: list[list[Sample]] = [[]]
    for sample in sorted(samples, key=lambda sample: len(sample.ids)):
        if groups[-1] and len(sample.ids) * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(sample)
    rng.shuffle(groups)
    return groups


def tensors(group: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights padded on the right; causal attention needs no mask then."""
    width = max(len(sample.ids) for sample in group)
    ids = torch.tensor([sample.ids + [0] * (width - len(sample.ids)) for sample in group])
    weights = torch.tensor([sample.weights + [0.0] * (width - len(sample.weights)) for sample in group])
    return ids, weights
