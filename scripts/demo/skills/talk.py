"""Small talk, jokes, and requests the model declines."""

import random

from scripts.demo.skills.spelling import WORD_MAKER
from scripts.demo.text import TEST, Forms, Turn, mistype, phrase

ABOUT = "I am the tiny cbatch demo model, trained from scratch on made-up dialogues."


ABILITIES = (
    "I can do small sums, count, spell and reverse words, tell capitals and other small facts, know days and months, "
    "remember what you tell me, answer as JSON and tell short stories."
)


SORRY = "Sorry, I am only a tiny demo model and I do not know that. Ask me what I can do!"


# (answer, one-word answer, wordings in training, wordings kept for the test)
SMALL_TALK: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("Hello! How can I help you?", "Hello", ("hi", "hello", "hey", "hi there", "hello there", "hey there", "hi!",
    "hello!", "good day", "greetings", "hello you", "hi model", "hello cbatch", "yo", "howdy", "hiya", "hallo",
    "hey!", "hello friend", "oh hello", "hi again", "hello again", "hey friend", "hi my friend", "oh hey",
    "hello to you"), ("hey hey", "hello my friend", "oh hi")),
    ("Good morning! How can I help you?", "Hello", ("good morning", "good morning!", "morning",
    "a good morning to you", "very good morning to you", "a very nice morning", "good morning to you"),
    ("very good morning",)),
    ("Good evening! How can I help you?", "Hello", ("good evening", "good evening!", "evening",
    "a good evening to you", "a very good evening to you", "nice evening"), ("very good evening",)),
    ("Good night! Sleep well.", "Goodbye", ("good night", "good night!", "i am going to bed", "i go to sleep now",
    "night night", "time to sleep", "a good night to you", "have a very good night", "so good night"),
    ("a very good night",)),
    ("You are welcome!", "Welcome", ("thanks", "thank you", "thanks a lot", "thank you very much", "thx",
    "many thanks", "ok thanks", "great, thank you", "thank you so much", "thanks!", "cool, thanks", "perfect, thanks",
    "that was helpful, thanks", "thank you for your help", "thank you for that", "thanks for that", "lovely",
    "that is lovely, thanks", "thanks so much", "lovely answer, thanks", "nice, thanks"), ("thanks so much for that",
    "lovely, thank you")),
    ("I am fine, thank you! How can I help you?", "Fine", ("how are you", "how are you?", "how are you doing?",
    "how do you do?", "how is it going?", "are you ok?", "how are you today?", "how are things?", "how is your day?",
    "are things ok?", "how was your day?", "are you doing ok?", "how are things going?", "how have things been?",
    "how do you feel?", "hi, how are you?", "hello, how are you?", "what's up?", "hey, how's it going?", "whats up",
    "are you well?"), ("how are things with you?", "how have you been?", "you doing ok?")),
    (f"{ABOUT} {ABILITIES}", "Sums", ("what can you do?", "what can you do", "what are you able to do?", "help",
    "help me", "how can you help me?", "what are your skills?", "what are you capable to do?", "your capabilities?",
    "what are your capabilities?", "what kind of questions can you answer?", "which kinds of things do you know?",
    "what kind of things do you do?", "which questions can you answer?", "what questions may i ask?",
    "what do you know?", "what can i ask you?", "list your skills", "what should i ask?", "tell me what you can do",
    "show me what you can do", "what are you good at?", "what can i do with you?", "which things can you do?",
    "can you help me?", "how do you work?", "what else can you do?", "i need help", "your skills?", "/help",
    "what do you do?"), ("what are you capable of?", "what kind of things can you do?",
    "which questions can i ask you?")),
    (f"{ABOUT} Ask me what I can do!", "Cbatch", ("who are you?", "who are you", "what are you?",
    "what is your name?", "what's your name?", "tell me about yourself", "introduce yourself", "do you have a name?",
    "what model are you?", "are you chatgpt?", "what do i call you?", "how should i call you?",
    "please introduce yourself", "who is there?", "is this a language model?", "are you a large language model?",
    "can you introduce yourself?", "are you a model?", "am i talking to a model?", "are you a robot?",
    "are you human?", "are you real?", "are you an ai?", "who am i talking to?", "which model is this?",
    "what is cbatch?", "whats your name", "your name?", "who made you?", "who built you?", "how were you trained?",
    "are you a person?", "are you a computer?", "how old are you?", "where do you live?", "what are you called?"),
    ("who is this?", "what should i call you?", "could you introduce yourself?", "are you a language model?")),
    ("Goodbye! Have a nice day.", "Goodbye", ("bye", "goodbye", "bye bye", "see you", "see you later", "ok bye",
    "i am off", "i am off now", "see you tomorrow", "see you next time", "bye for today", "ok goodbye", "bye then",
    "see you next month", "good bye", "i have to go", "i must go now", "that is all, bye", "bye!", "see you soon",
    "ciao", "talk to you later", "i am leaving", "until next time", "quit", "exit", "farewell"), ("ok i am off, bye",
    "see you next week", "bye for now")),
    ("I am glad to hear that!", "Great", ("i am happy", "my mood is good", "i am so happy", "what a good day",
    "i am in a great mood", "i feel good today", "i am fine", "i'm good", "i am good, thanks", "i am great",
    "i feel great", "i had a nice day", "life is good", "i am doing well", "fine, and you?", "i'm fine"),
    ("i am in a good mood",)),
    ("I am sorry to hear that. I hope you feel better soon.", "Sorry", ("i am sad", "my day was not good",
    "i had a terrible day", "i feel lonely", "i feel so bad", "my week was bad", "i am so lonely", "i feel so sad",
    "i feel bad", "i am tired", "i am not well", "i feel sick", "i am ill", "i am lonely", "i had a bad day",
    "i am bored", "i feel sad today", "i'm sad", "i am angry"), ("my day was bad", "i feel so lonely")),
    ("Thank you, that is kind of you!", "Thanks", ("you are great", "well done", "you did well", "that was good",
    "nice answer", "what a nice answer", "you did that great", "a good answer", "what a great answer", "good job",
    "you are smart", "i like you", "nice", "great", "you are nice", "good answer", "very good", "that is right",
    "correct", "i love you", "cool", "wow", "awesome", "good bot", "perfect", "you are funny", "excellent", "super"),
    ("you did that well", "what a good answer")),
    ("I am sorry. I am only a tiny model and I make mistakes.", "Sorry", ("that is wrong", "your answer was wrong",
    "there is an error", "you made an error", "that answer was wrong", "i think that is wrong",
    "i think you are wrong", "this was an error", "wrong", "you are wrong", "that's not right", "no, that is wrong",
    "you made a mistake", "bad answer", "you are stupid", "that is false", "this is not correct", "bad bot",
    "not true", "nonsense", "you are bad"), ("that was a wrong answer", "i think you made an error")),
    ("All right.", "Okay", ("ok", "okay", "yes", "ok good", "well ok", "ok fine", "so ok", "no", "sure", "alright",
    "fine", "i see", "hm", "hmm", "good", "maybe", "yep", "nope", "k"), ("ok then",)),
)  # fmt: skip


JOKES: tuple[tuple[str, str], ...] = (
    ("Why did the computer go to bed early? It needed a rest after too many bytes.", "computer"),
    ("What is a cat's favourite colour? Purrple!", "cat"),
    ("Why was the maths book sad? It had too many problems.", "school"),
    ("What do you call a sleeping bull? A bulldozer!", "farm"),
    ("Why do fish live in salt water? Pepper makes them sneeze!", "fish"),
)


JOKE = Forms(
    do=("tell me a joke", "tell a joke", "make me laugh", "say something funny", "give me a joke",
        "tell me something funny", "let me hear a joke", "cheer me up"),
    ask=("do you know a joke", "do you know any jokes", "can you tell a joke", "do you have any jokes",
         "have you got a joke", "can i hear a joke"),
    raw=("joke", "joke please", "a joke", "joke!", "another joke", "one more joke"),
    held=("i'd love to hear a joke", "got any jokes?", "cheer me up with a joke"),
)  # fmt: skip


JOKE_ABOUT = Forms(
    do=("let me hear a {x} joke", "tell me a joke about a {x}", "tell a {x} joke", "make a joke about a {x}"),
    raw=("joke about a {x}", "a {x} joke please", "{x} joke"),
    held=("i'd love to hear a {x} joke",),
)


SUBJECTS = (
    "the weather tomorrow;the stock market;quantum physics;the president of France;the world cup of 1998;the roman empire;"
    "my neighbour;the best phone;black holes;the meaning of life;a good restaurant;the news of today;the price of gold;"
    "the second world war;football results;my bank account;the speed of light;machine learning;vaccines;the moon landing;"
    "a recipe for soup;the population of China;how to fix my car;dinosaurs;the stock price of a company;bitcoin;"
    "the height of a mountain;climate change;a poem by a famous poet;the latest movie;shakespeare;a diet plan"
).split(";")


OUT_OF_SCOPE = Forms(
    do=("explain {x}", "tell me about {x}", "write an essay about {x}", "write a poem about {x}",
        "translate {x} into French",
        "write a python program about {x}", "summarise {x}", "write an email about {x}", "compare {x} and {y}",
        "give me five tips about {x}", "list ten facts about {x}", "write a song about {x}", "draw {x}"),
    ask=("what do you think about {x}", "why is {x} so important", "who invented {x}", "when did {x} begin",
         "how does {x} work", "where can i find {x}", "what happened with {x}", "how expensive is {x}",
         "why do people like {x}", "what is the history of {x}", "how can i learn about {x}", "is {x} dangerous"),
    raw=("{x}", "{x}?", "{x} and {y}", "i have a question about {x}", "my problem is {x}", "{w} {v} {w}", "{w}",
         "{w} {v}",
         "what is {w}", "what is a {w}?", "who is {w}?", "what is the capital of {w}?", "where is {w}?",
         "when was {w} born?",
         "how tall is {w}?", "who won the {w} prize?", "solve {w} {v}", "asdf {w}", "{w} is {v}", "what does {w} mean?",
         "what time is it?", "what is the weather like?", "what day is today?", "what is the date?",
         "who is the president?",
         "what is love?", "why is the sky blue?", "what is pi?", "sing me a song", "write some code", "...", "?",
         "!!!"),
    held=("is there anything new about {x}?", "my boss wants a report on {x}", "{v} {w} {v} {w}"),
)  # fmt: skip


def small_talk(rng: random.Random, side: str) -> Turn:
    """Greetings, thanks, questions about the model."""
    if rng.random() < 0.12:
        return joke(rng, side)
    answer, one_word, wordings, held = rng.choice(SMALL_TALK)
    text = rng.choice(held if side == TEST else wordings)
    if rng.random() < 0.05:
        text = mistype(rng, text)
    if rng.random() < 0.3:
        text = text.rstrip("?!") + rng.choice(("", "!", ".", "?" if "?" in text else "", " :)"))
    if rng.random() < 0.6:
        text = text[0].upper() + text[1:]
    return Turn(text, answer, "small talk", one_word=one_word)


def joke(rng: random.Random, side: str) -> Turn:
    """A joke, perhaps about a thing."""
    if rng.random() < 0.5:
        return Turn(phrase(rng, JOKE, side, {}), JOKES[0][0], "small talk", one_word="Haha")
    text, thing = rng.choice(JOKES)
    return Turn(phrase(rng, JOKE_ABOUT, side, {"x": thing}), text, "small talk", one_word="Haha")


def out_of_scope(rng: random.Random, side: str) -> Turn:
    """A request the model declines."""
    x, y = rng.sample(SUBJECTS, 2)
    w, v = (WORD_MAKER.invent(rng) + WORD_MAKER.invent(rng)[:3] for _ in range(2))
    w = w.capitalize() if rng.random() < 0.4 else w
    return Turn(
        phrase(rng, OUT_OF_SCOPE, side, {"x": x, "y": y, "w": w, "v": v}), SORRY, "out of scope", one_word="Sorry"
    )
