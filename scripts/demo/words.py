"""Word lists and facts the demo model learns; held-out words and names live here too."""

WORDS: tuple[str, ...] = tuple(
    """
apple bread butter cheese honey lemon pepper salad soup sugar tomato carrot garlic onion pasta
pizza rice bean berry cherry grape melon olive peach pear plum cake candy cookie coffee juice milk
water table chair carpet window door floor wall roof kitchen bedroom garden garage ladder hammer nail
bottle basket bucket candle clock mirror pillow blanket button needle thread ribbon pocket jacket
shirt shoe sock glove scarf belt dress coat hat ring crown sword shield arrow wagon wheel engine
train plane boat ship anchor harbor bridge tunnel tower castle temple market street corner village
town city country island ocean river lake pond stream mountain valley desert forest meadow field
farm barn fence gate bird duck goose hen horse cow sheep goat pig cat dog mouse rat rabbit fox wolf
bear deer lion tiger monkey elephant snake frog fish whale shark crab spider ant bee fly worm snail
flower rose tulip grass leaf tree branch root seed stone rock sand mud cloud rain snow storm thunder
wind sun moon star planet rocket robot machine computer keyboard screen paper pencil book letter
number story music song dance drum flute guitar piano violin paint picture color yellow green
purple orange brown silver golden happy sad angry brave clever gentle honest lazy quick quiet
strong tired weak young warm cold bright dark heavy light clean dirty empty full early late summer
winter spring autumn morning evening night week month year friend mother father sister brother
uncle doctor teacher farmer baker painter singer pilot sailor soldier king queen prince princess
run jump walk swim climb throw catch carry open close write read speak listen laugh smile sleep
dream think learn teach build break repair wash cook drink eat buy sell give take find lose travel
simple double single giant little world peace winner finger shoulder stomach body heart brain
""".split()
)

HELD_OUT_WORDS: tuple[str, ...] = tuple(
    """
banana lantern mango planter monster pumpkin thimble blossom curtain dolphin feather gravel hamster
icicle jungle kettle lizard magnet napkin oyster quartz raisin saddle tablet umbrella velvet
walnut yogurt zipper barrel cactus dagger emerald falcon goblin helmet insect jigsaw kernel locket
mitten nectar orchid pebble quiver rescue sponge trumpet unicorn vessel whistle abacus biscuit
cobweb donkey engrave fountain glacier hornet ivory jelly koala lobster mustard nutmeg otter panda
quill rhubarb scooter turnip urchin vanilla waffle acorn beetle compass drizzle elbow ferry giraffe
hazel igloo jasmine knuckle lilac marble noodle outfit puzzle rattle spinach tractor wizard bamboo
chimney dentist fabric glimpse harvest wrestle kayak stapler
""".split()
)

NAMES: tuple[str, ...] = tuple(
    """
Ada Alan Alex Alice Amy Andrea Anna Anton Ben Bella Bob Boris Carl Carla Cleo Clara Dan Dana David
Diana Dora Eddie Elena Ella Emil Emma Eric Eva Finn Fiona Frank Fred Gina Grace Greta Hanna Hans Harry
Helen Henry Hugo Ian Ida Iris Ivan Jack Jane Jens Jim Joan Joe Jonas Julia Karl Kate Kim Kira Lara Laura
Leo Lena Liam Lily Lisa Lola Lotte Luca Lucy Luis Maria Mark Marta Max Maya Mia Mike Mila Nadia Nate Nick
Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Paula Peter Petra Pia Rita Rob Rosa Ruby Sam Sandra
Sara Sofia Stan Stella Sven Tara Ted Theo Tim Tina Tom Uma Vera Victor Walter Wendy Will Yara Yuri Zack
Pablo Pedro Ravi Priya Chen Mei Kenji Aisha Fatima Hassan Ali Layla Igor Svetlana Bjorn Astrid
""".split()
)

HELD_OUT_NAMES: tuple[str, ...] = tuple(
    """
Zoe Mira Felix Tilda Bruno Nadine Rupert Salma Quentin Odette Milo Freya Jasper Linnea Tobias
Amara Dexter Ingrid Kofi Marlon Yusuf Penelope Sergio Thalia Ronan Selma Arthur Beatrix Cedric Delia
Ezra Flora Gideon Hilda Ismael Juno Keiko Lorenzo Matilda Nikolai
""".split()
)

PET_NAMES: tuple[str, ...] = tuple(
    """
Rex Fluffy Bello Luna Spot Tiger Minka Coco Rocky Buddy Daisy Lucky Shadow Snowy Bingo Kiki Pepper
Ginger Simba Nemo Goldie Rusty Nala Patch Whiskers Sunny Cookie Blacky Star Oreo
""".split()
)

HELD_OUT_PET_NAMES: tuple[str, ...] = ("Pixel", "Mopsy", "Bandit", "Truffle", "Waldo", "Zorro", "Muffin", "Toffee")

CITIES: tuple[str, ...] = tuple(
    """
Paris London Berlin Rome Madrid Vienna Prague Oslo Tokyo Boston Chicago Denver Dublin Geneva Hamburg
Helsinki Istanbul Lima Lisbon Lyon Miami Milan Munich Naples Seattle Sydney Toronto Venice Warsaw
Zurich Austin Dallas Cairo Delhi Mumbai Porto Krakow Basel Bern Leeds
""".split()
)

HELD_OUT_CITIES: tuple[str, ...] = ("Utrecht", "Malmo", "Dresden", "Palermo", "Glasgow", "Portland", "Osaka", "Quito")

NEVER_TRAINED: frozenset[str] = frozenset(
    word.lower() for word in HELD_OUT_WORDS + HELD_OUT_NAMES + HELD_OUT_PET_NAMES + HELD_OUT_CITIES
)

COLOURS: tuple[str, ...] = (
    "red", "blue", "green", "yellow", "purple", "orange", "pink", "black", "white", "brown", "grey", "turquoise",
)  # fmt: skip
FOODS: tuple[str, ...] = (
    "pizza", "pasta", "soup", "rice", "salad", "cake", "cheese", "bread", "sushi", "curry", "ice cream", "apple pie",
)  # fmt: skip
JOBS: tuple[str, ...] = (
    "baker", "teacher", "doctor", "farmer", "pilot", "painter", "nurse", "singer", "sailor", "cook", "writer", "driver",
)  # fmt: skip
PETS: tuple[str, ...] = ("dog", "cat", "rabbit", "parrot", "horse", "fish", "mouse", "turtle")
HOBBIES: tuple[str, ...] = (
    "swimming", "reading", "painting", "cooking", "dancing", "singing", "running", "fishing", "chess", "football",
)  # fmt: skip

CAPITALS: dict[str, str] = dict(
    line.split(":")
    for line in """France:Paris
Germany:Berlin
Italy:Rome
Spain:Madrid
Portugal:Lisbon
England:London
Ireland:Dublin
Scotland:Edinburgh
Norway:Oslo
Sweden:Stockholm
Finland:Helsinki
Denmark:Copenhagen
Iceland:Reykjavik
Poland:Warsaw
Austria:Vienna
Switzerland:Bern
Belgium:Brussels
Hungary:Budapest
Greece:Athens
Turkey:Ankara
Russia:Moscow
Ukraine:Kyiv
Romania:Bucharest
Bulgaria:Sofia
Croatia:Zagreb
Serbia:Belgrade
Estonia:Tallinn
Latvia:Riga
Lithuania:Vilnius
Egypt:Cairo
Morocco:Rabat
Kenya:Nairobi
Ghana:Accra
Nigeria:Abuja
Ethiopia:Addis Ababa
Canada:Ottawa
Mexico:Mexico City
Cuba:Havana
Brazil:Brasilia
Argentina:Buenos Aires
Chile:Santiago
Peru:Lima
Colombia:Bogota
Japan:Tokyo
China:Beijing
India:New Delhi
Nepal:Kathmandu
Thailand:Bangkok
Vietnam:Hanoi
South Korea:Seoul
Indonesia:Jakarta
Iran:Tehran
Iraq:Baghdad
Israel:Jerusalem
Australia:Canberra
New Zealand:Wellington
the Netherlands:Amsterdam
the Czech Republic:Prague
the United States:Washington
the USA:Washington""".splitlines()
)

OPPOSITES: tuple[tuple[str, str], ...] = tuple(
    (a, b)
    for a, b in (
        pair.split(":")
        for pair in """hot:cold big:small up:down left:right black:white day:night fast:slow happy:sad
high:low old:young hard:soft full:empty open:closed early:late rich:poor strong:weak wet:dry long:short
good:bad in:out light:dark clean:dirty thick:thin near:far loud:quiet true:false first:last push:pull
win:lose love:hate begin:end top:bottom front:back inside:outside yes:no deep:shallow brave:afraid
sweet:sour awake:asleep alive:dead wide:narrow above:below before:after always:never""".split()
    )
)

# animal: (sound, baby, legs)
ANIMALS: dict[str, tuple[str, str, int]] = {
    "dog": ("woof", "puppy", 4),
    "cat": ("meow", "kitten", 4),
    "cow": ("moo", "calf", 4),
    "sheep": ("baa", "lamb", 4),
    "pig": ("oink", "piglet", 4),
    "horse": ("neigh", "foal", 4),
    "duck": ("quack", "duckling", 2),
    "hen": ("cluck", "chick", 2),
    "goat": ("bleat", "kid", 4),
    "lion": ("roar", "cub", 4),
    "frog": ("ribbit", "tadpole", 4),
    "goose": ("honk", "gosling", 2),
    "wolf": ("howl", "pup", 4),
    "owl": ("hoot", "owlet", 2),
    "snake": ("hiss", "snakelet", 0),
    "mouse": ("squeak", "pup", 4),
    "bee": ("buzz", "larva", 6),
}

LEGS: dict[str, int] = {
    "spider": 8, "ant": 6, "fly": 6, "bird": 2, "fish": 0, "elephant": 4, "rabbit": 4, "bear": 4, "tiger": 4,
    "worm": 0, "human": 2, "fox": 4, "butterfly": 6, "chicken": 2, "deer": 4,
}  # fmt: skip

THING_COLOURS: dict[str, str] = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red", "the sun": "yellow",
    "milk": "white", "a carrot": "orange", "a lemon": "yellow", "a strawberry": "red", "the sea": "blue",
    "a leaf": "green", "chocolate": "brown", "a fire truck": "red", "an elephant": "grey", "a polar bear": "white",
    "a flamingo": "pink", "the night sky": "black", "a cucumber": "green", "a raven": "black", "a frog": "green",
    "a ripe tomato": "red",
}  # fmt: skip

PLANETS: tuple[str, ...] = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
DAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: tuple[str, ...] = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
MONTH_DAYS: tuple[int, ...] = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS: tuple[str, ...] = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
)  # fmt: skip

# (answer, wordings in training, wordings kept for the test)
TRIVIA: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("7", ("how many days are in a week", "how many days does a week have", "number of days in a week",
    "days in a week"), ("a week has how many days",)),
    ("12", ("how many months are in a year", "how many months does a year have", "number of months in a year",
    "months in a year"), ("a year has how many months",)),
    ("365", ("how many days are in a year", "how many days does a year have", "number of days in a year",
    "days in a year"), ("a year has how many days",)),
    ("24", ("how many hours are in a day", "how many hours does a day have", "number of hours in a day",
    "hours in a day"), ("a day has how many hours",)),
    ("60", ("how many minutes are in an hour", "how many minutes does an hour have", "number of minutes in an hour",
    "minutes in an hour"), ("an hour has how many minutes",)),
    ("60", ("how many seconds are in a minute", "how many seconds does a minute have",
    "number of seconds in a minute", "seconds in a minute"), ("a minute has how many seconds",)),
    ("52", ("how many weeks are in a year", "how many weeks does a year have", "number of weeks in a year",
    "weeks in a year"), ("a year has how many weeks",)),
    ("4", ("how many seasons are there", "how many seasons does a year have", "number of seasons",
    "how many seasons are in a year"), ("there are how many seasons",)),
    ("26", ("how many letters are in the alphabet", "how many letters does the alphabet have",
    "number of letters in the alphabet", "letters in the english alphabet"), ("the alphabet has how many letters",)),
    ("3", ("how many sides does a triangle have", "how many corners does a triangle have",
    "number of sides of a triangle", "sides of a triangle"), ("a triangle has how many sides",)),
    ("4", ("how many sides does a square have", "how many corners does a square have", "number of sides of a square",
    "sides of a square"), ("a square has how many sides",)),
    ("8", ("how many planets are there", "how many planets are in the solar system", "number of planets",
    "how many planets does the solar system have"), ("the solar system has how many planets",)),
    ("7", ("how many continents are there", "number of continents", "how many continents does the world have",
    "how many continents are on earth"), ("the world has how many continents",)),
    ("5", ("how many fingers are on one hand", "how many fingers does a hand have", "number of fingers on a hand",
    "fingers on one hand"), ("a hand has how many fingers",)),
    ("100", ("how many cents are in a dollar", "how many cents does a dollar have", "number of cents in a dollar",
    "cents in a dollar"), ("a dollar has how many cents",)),
    ("12", ("how many eggs are in a dozen", "how many are in a dozen", "number of things in a dozen",
    "how much is a dozen"), ("a dozen is how many",)),
    ("Jupiter", ("what is the largest planet", "what is the biggest planet", "which planet is the largest",
    "the biggest planet of all", "which planet is the biggest"), ("name the largest planet in the solar system",)),
    ("Mercury", ("what is the smallest planet", "which planet is the smallest", "which planet is closest to the sun",
    "what planet is nearest to the sun"), ("name the planet that is closest to the sun",)),
    ("Neptune", ("which planet is farthest from the sun", "what planet is the farthest from the sun",
    "the planet farthest from the sun"), ("name the planet that is farthest from the sun",)),
    ("Mars", ("which planet is the red planet", "what is the red planet", "which planet is called the red planet",
    "the red planet"), ("name the planet that looks red",)),
    ("Saturn", ("which planet has rings", "what planet has big rings", "the planet with the rings"),
    ("name the planet with the big rings",)),
    ("Earth", ("which planet do we live on", "what planet do we live on", "our home planet",
    "what is our planet called"), ("name the planet we live on",)),
    ("honey", ("what do bees make", "what does a bee make", "bees make what", "which food do bees make"),
    ("name the food that bees make",)),
    ("milk", ("what do cows give", "what drink do cows give us", "what does a cow give", "cows give what"),
    ("name the drink that cows give",)),
    ("wool", ("what do sheep give us", "what do we get from sheep", "what grows on sheep"),
    ("name what sheep give us",)),
    ("eggs", ("what do hens lay", "what does a hen lay", "hens lay what", "what do chickens lay"),
    ("name what hens lay",)),
    ("ice", ("what is frozen water", "what is frozen water called", "what does water become when it freezes"),
    ("name for frozen water",)),
    ("Africa", ("on which continent is Egypt", "which continent is Egypt on", "what continent is Kenya on"),
    ("name the continent of Egypt",)),
    ("Europe", ("on which continent is France", "which continent is Germany on", "what continent is Spain on"),
    ("name the continent of France",)),
    ("Asia", ("on which continent is Japan", "which continent is China on", "what continent is India on",
    "the largest continent", "what is the largest continent"), ("name the continent of Japan",)),
    ("blue and yellow", ("which colours make green", "what colours make green", "what do you mix to get green"),
    ("which two colours give green",)),
    ("red and yellow", ("which colours make orange", "what colours make orange", "what do you mix to get orange"),
    ("which two colours give orange",)),
    ("red and blue", ("which colours make purple", "what colours make purple", "what do you mix to get purple"),
    ("which two colours give purple",)),
)  # fmt: skip
