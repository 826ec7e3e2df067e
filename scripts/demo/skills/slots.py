"""Facts about users: how they are told, echoed and asked for."""

from dataclasses import dataclass

from scripts.demo.text import Forms


@dataclass(frozen=True)
class Slot:
    """Something a user tells about themselves: how it is told, echoed and asked for."""

    noun: str
    tell: tuple[str, ...]
    echo: str
    ask: Forms
    tell_held: tuple[str, ...] = ()


def recall_forms(noun: str, *more: str, held: tuple[str, ...] = ()) -> Forms:
    """Recall questions around a noun such as 'name'."""
    return Forms(
        np=(f"my {noun}", f"my {noun}"),
        do=(f"say my {noun}", f"repeat my {noun} for me"),
        ask=(f"what is my {noun}", f"what's my {noun}", f"do you remember my {noun}", f"do you know my {noun}",
             f"what did i say my {noun} is", f"what did i say my {noun} was", f"can you remember my {noun}",
             f"what {noun} did i tell you", f"do you still know my {noun}", f"do you have my {noun} in mind",
             f"did you keep my {noun}",
             f"have you noted my {noun}", f"can you repeat my {noun}", f"what is my {noun} again",
             f"what was my {noun}", *more),
        held=(f"have you kept my {noun} in mind?", f"my {noun} is what again?", f"repeat my {noun}, please", *held),
    )  # fmt: skip


SLOTS: dict[str, Slot] = {
    "name": Slot(
        "name",
        ("my name is {v}", "i am {v}", "i'm {v}", "call me {v}", "you can call me {v}", "they call me {v}",
        "most people call me {v}", "my friends call me {v}", "my name's {v}", "this is {v}",
         "people call me {v}", "i am called {v}", "the name is {v}", "hi, i am {v}", "hello, my name is {v}",
         "hi i'm {v}"),
        "your name is {v}",
        recall_forms("name", "who am i", "how am i called", "what am i called", "who am i again",
        "who do you talk to", "with whom are you talking",
                     held=("who is talking to you?",)),
        ("i go by {v}", "everyone calls me {v}"),
    ),
    "age": Slot(
        "age",
        ("i am {v} years old", "i'm {v} years old", "my age is {v}", "i have lived for {v} years",
        "i am {v} years of age", "i am {v}", "i turned {v} this year"),
        "you are {v} years old",
        recall_forms("age", "how old am i", "how old did i say i am", held=("how many years old am i?",)),
        ("i have been alive for {v} years",),
    ),
    "city": Slot(
        "city",
        ("i live in {v}", "my city is {v}", "my home is {v}", "{v} is my home", "{v} is where i live",
        "my home is in {v}", "i am from {v}", "i come from {v}", "my home town is {v}",
         "i moved to {v}"),
        "you live in {v}",
        recall_forms("city", "where do i live", "where is home for me", "what place do i live in",
        "what place is my home", "which city do i live in", "where am i from", "where is my home",
                     "in which city do i live", held=("in what place is my home?",)),
        ("home for me is {v}",),
    ),
    "colour": Slot(
        "favourite colour",
        ("my favourite colour is {v}", "my favorite color is {v}", "i like the colour {v} most",
        "{v} is my favourite colour",
         "the colour i love most is {v}", "the best colour is {v}", "{v} is the colour i like best",
         "no colour is as nice as {v}", "i love {v} more than other colours"),
        "your favourite colour is {v}",
        recall_forms("favourite colour", "what is my favorite color", "which colour do i like",
        "which colour do i love",
                     "what colour do i like most", "whats my favorite color", held=("which color did i say i love?",)),
        ("no colour is better than {v} for me",),
    ),
    "number": Slot(
        "lucky number",
        ("my lucky number is {v}", "my favourite number is {v}", "{v} is my lucky number", "my number is {v}",
        "i like the number {v}", "{v} is the number i like",
         "remember the number {v}", "keep the number {v} in mind"),
        "your lucky number is {v}",
        recall_forms("lucky number", "what is my favourite number", "what is my number",
        "which number did i tell you", "which number was it", "what was my number",
                     "what number did i tell you", "which number should you remember", held=("what was the number?",)),
        ("the number i like is {v}",),
    ),
    "food": Slot(
        "favourite food",
        ("my favourite food is {v}", "i love to eat {v}", "the best food is {v}", "{v} is the best meal for me",
        "no food is as good as {v}", "i like {v} most of all food", "my favorite food is {v}"),
        "your favourite food is {v}",
        recall_forms("favourite food", "what do i love to eat", "what do i like to eat",
        "what food should you give me", "what meal is the best for me", "what is my favorite food",
                     "which food do i like", held=("what should you cook for me?",)),
        ("no meal is better than {v}",),
    ),
    "job": Slot(
        "job",
        ("i am a {v}", "i work as a {v}", "i make my money as a {v}", "my work is {v}", "my job is {v}", "i'm a {v}"),
        "you are a {v}",
        recall_forms("job", "what do i do for work", "how do i make money", "how do i make my money",
        "what is my work", "what do i work as", "what job do i have",
                     held=("how do i earn my money?",)),
        ("i earn my money as a {v}",),
    ),
    "hobby": Slot(
        "hobby",
        ("my hobby is {v}", "on weekends i like {v}", "{v} is my hobby", "{v} is what i like to do", "i like {v}",
        "i enjoy {v}", "in my free time i like {v}"),
        "your hobby is {v}",
        recall_forms("hobby", "what do i like to do", "what do i do in my free time", "what do i do on weekends",
        "how do i spend my free time", "what do i enjoy",
                     held=("how do i spend my weekends?",)),
        ("{v} is what i do on weekends",),
    ),
}  # fmt: skip


# told as "my {noun} is called {v}" and the like
RELATIVES = ("sister", "brother", "friend", "mother", "father", "teacher", "boss", "son", "daughter", "aunt", "uncle",
"neighbour")  # fmt: skip


THINGS = ("car", "boat", "school", "street", "team", "horse", "doll", "house", "band", "bike", "shop", "robot")


OTHER_TELL = (
    "my {n} is called {v}", "my {n}'s name is {v}", "the name of my {n} is {v}", "i have a {n} called {v}",
    "i have a {n} named {v}", "my {n} is {v}", "i've got a {n} called {v}",
)  # fmt: skip


OTHER_TELL_HELD = ("there is my {n}, called {v}", "{v} is the name of my {n}")


SECRETS = ("code", "password", "magic word", "secret word", "pin", "room number", "door code", "key word")


SECRET_TELL = (
    "the {n} is {v}",
    "my {n} is {v}",
    "remember the {n} {v}",
    "remember that the {n} is {v}",
    "note: the {n} is {v}",
)


SECRET_TELL_HELD = ("keep in mind that {v} is the {n}",)


TELL_FRAMES = (
    "{}", "{}", "{}", "{}", "{}.", "{}.", "{}.", "{}!", "hello, {}.", "hey, {}", "remember: {}",
    "please remember that {}.",
    "{}. remember it.", "{}. remember that!", "{}, remember that please", "note that {}", "by the way, {}.", "ok, {}",
    "you should know that {}.", "do not forget: {}", "never forget that {}.", "for you to know, {}.",
    "let me tell you: {}.", "here is a fact: {}", "a fact about me: {}", "i tell you something: {}.", "{}, ok?",
    "just so you know, {}.", "well, {}.",
)  # fmt: skip


TELL_FRAMES_HELD = ("don't forget: {}", "fun fact: {}", "for your information, {}.", "let me tell you that {}.")


CORRECT_FRAMES = (
    "actually, {}.", "sorry, {}.", "no, {}.", "i was wrong, {}.", "wait, {}.", "correction: {}.",
    "i made a mistake, {}.",
    "i changed my mind, {}.", "actually {}", "no wait, {}", "oh no, {}.", "sorry, i meant {}.", "from now on {}.",
    "now {}.", "change that: {}.", "forget that, {}.", "let me correct that: {}.", "i must correct this: {}.",
    "that was wrong, {}.", "not right, {}.", "forget it, {}.",
)  # fmt: skip


CORRECT_FRAMES_HELD = ("oops, {}.", "forget what i said, {}.", "i have to correct myself: {}.")


ALL_KNOWN = Forms(
    do=("tell me everything you know about me", "tell me what you know about me", "repeat what i told you",
        "list what you know about me", "summarise what you know about me"),
    ask=("what do you know about me", "what did i tell you about me", "what do you remember about me",
         "what have i told you"),
    held=("which things have i told you about me?",),
)  # fmt: skip
