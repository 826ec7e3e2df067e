"""Answer styles asked for in the system prompt or in the message."""

import json
import random
from dataclasses import replace

from scripts.demo.skills.json_answers import Value
from scripts.demo.text import TEST, TRAIN, Turn

STYLES: dict[str, tuple[str, ...]] = {
    "upper": (
        "Answer in UPPER CASE.", "Always write in upper case.", "Use only capital letters.",
        "Reply in capital letters only.", "Capitals only.", "Write your answer in capitals!",
        "Your replies are in upper case letters.", "Only use capitals.", "Use capitals in all your replies!",
        "You shout: write everything in upper case.", "Write all your answers in upper case.", "ALWAYS USE UPPER CASE.",
        "You are a helpful assistant. Answer in capital letters.", "Respond in all caps.", "All caps, please.",
        "Every answer must be in upper case.", "You only write in capital letters.", "Answer in uppercase.",
        "Use all caps.", "Speak in CAPITALS only.", "You always answer in uppercase letters.",
    ),
    "one word": (
        "Answer in one word.", "Answer with one word only.", "Replies: one word.", "A single word per reply.",
        "Just one word each time.", "Your replies have one word.", "Please use one single word each time.",
        "Use a single word.", "Reply with one word.", "One word only.",
        "Give one-word answers.", "Your answers are one word long.", "You are a helpful assistant. Answer in one word.",
        "Keep every answer to a single word.", "Respond with exactly one word.", "You always answer in one word.",
        "Only one word per answer.", "Be brief: one word.", "Answer every question with just one word.",
    ),
    "pirate": (
        "You are a pirate.", "Talk like a pirate.", "Answer like a pirate.", "You sail on a pirate ship.",
        "Speak the way pirates do.", "You sail the sea and talk like a pirate.", "Talk the way a pirate does.",
        "Speak like a pirate.", "You are a pirate captain.",
        "Reply in pirate style.", "Use pirate speech.", "You are an old pirate on a ship.", "Write like a pirate.",
        "Act as a pirate.", "You always talk like a pirate.", "Pretend to be a pirate.", "Answer as a pirate would.",
        "You are a friendly pirate. Answer all questions.",
    ),
    "json": (
        "Answer as JSON.", "Always answer with a JSON object.", "Reply in JSON only.",
        "Give your replies as JSON objects.", "Output must be valid JSON.", "Every reply is a JSON object.",
        "All replies must be JSON.", "Give all output as JSON.", "Your answers are JSON objects.",
        "Respond in JSON.", "Write every answer as JSON.", "You only speak JSON.", "Output JSON only.",
        "Always reply in JSON format.", "Use JSON for all answers.", "You are a JSON API.",
    ),
    "neutral": (
        "You are a helpful assistant.", "You are a friendly assistant.", "Be helpful.", "You are a tiny demo model.",
        "Answer the questions.", "Be kind and short.", "You are cbatch.", "You answer questions.", "Help the user.",
        "You are a helpful, harmless and honest assistant.", "You are an assistant.", "Be polite.", "Be friendly.",
        "You are a helpful friend.", "You are a kind little helper.", "You are an AI.",
        "You are a chatbot.", "Answer correctly.", "You are a teacher.", "Be brief.", "Reply to the user.",
    ),
}  # fmt: skip


STYLES_HELD: dict[str, tuple[str, ...]] = {
    "upper": ("Please write your replies in upper case letters.", "Only capitals in your answers!"),
    "one word": ("Please answer with a single word each time.", "Replies must be just one word."),
    "pirate": ("From now on you speak the way a pirate does.", "You sail the seas as a pirate."),
    "json": ("Please give every reply as a JSON object.", "All output must be JSON."),
    "neutral": ("You are a helpful little assistant.", "Please be friendly."),
}


ASKED_STYLES: dict[str, tuple[str, ...]] = {
    "upper": ("{} answer in upper case.", "in upper case: {}", "answer in capital letters: {}",
    "{} use capital letters.",
              "{} (in all caps)", "in all caps, {}", "{} answer in caps.", "{} reply in uppercase."),
    "pirate": ("{} answer like a pirate.", "talk like a pirate: {}", "{} say it like a pirate.", "like a pirate: {}",
               "{} answer as a pirate.", "as a pirate, {}"),
    "one word": ("{} answer in one word.", "in one word: {}", "{} one word only.", "{} just one word please."),
}  # fmt: skip


def styled(style: str, turn: Turn) -> Turn:
    """The turn with its answer in a style."""
    text = turn.answer
    if style == "upper":
        return replace(turn, answer=text.upper())
    if style == "one word":
        return replace(turn, answer=turn.one_word or text)
    if style == "pirate":
        whole = text[-1] in ".!?"
        return replace(turn, answer=f"Arr! {text} Yo ho ho!" if whole else f"Arr, {text}, matey!", by_char=False)
    if style == "json" and not text.startswith("{"):
        value: Value = int(text) if text.lstrip("-").isdigit() else text
        return replace(turn, answer=json.dumps({"answer": value}), by_char=False)
    return turn


def asked_style(rng: random.Random, style: str, turn: Turn) -> Turn:
    """The style asked for in the message itself."""
    text = rng.choice(ASKED_STYLES[style]).replace("{}", turn.user)
    return replace(styled(style, turn), user=text[0].upper() + text[1:] if rng.random() < 0.6 else text)


def style_prompt(rng: random.Random, side: str, style: str) -> str:
    """A system prompt for a style."""
    text = rng.choice((STYLES_HELD if side == TEST else STYLES)[style])
    if side == TRAIN and rng.random() < 0.2:
        text = text.lower() if rng.random() < 0.5 else text.rstrip(".")
    return text
