"""The closed world the demo model learns: facts, words and names. Plain data, common knowledge, our own
lists.

A relation maps subjects to objects and says how people ask for it and how the model answers.
"""

from __future__ import annotations

from dataclasses import dataclass


def _pairs(text: str) -> dict[str, str]:
    """Read "subject=object, subject=object" into a dict, in order."""
    return dict(_split_pair(item) for item in text.split(","))


def _split_pair(item: str) -> tuple[str, str]:
    subject, _, value = item.partition("=")
    return " ".join(subject.split()), " ".join(value.split())


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in text.split(",") if word.strip())


CAPITALS = _pairs(
    """France=Paris, Germany=Berlin, Spain=Madrid, Italy=Rome, Portugal=Lisbon, Austria=Vienna,
    Belgium=Brussels, Poland=Warsaw, Greece=Athens, Norway=Oslo, Sweden=Stockholm, Finland=Helsinki,
    Denmark=Copenhagen, Ireland=Dublin, Iceland=Reykjavik, Hungary=Budapest, Romania=Bucharest,
    Bulgaria=Sofia, Croatia=Zagreb, Serbia=Belgrade, Ukraine=Kyiv, Turkey=Ankara, Egypt=Cairo,
    Kenya=Nairobi, Nigeria=Abuja, Ghana=Accra, Morocco=Rabat, Tunisia=Tunis, Ethiopia=Addis Ababa,
    Senegal=Dakar, Japan=Tokyo, China=Beijing, India=New Delhi, Thailand=Bangkok, Vietnam=Hanoi,
    Indonesia=Jakarta, Malaysia=Kuala Lumpur, Nepal=Kathmandu, Pakistan=Islamabad, Iran=Tehran,
    Iraq=Baghdad, Jordan=Amman, Lebanon=Beirut, Mongolia=Ulaanbaatar, Canada=Ottawa, Mexico=Mexico
    City, Cuba=Havana, Jamaica=Kingston, Brazil=Brasilia, Argentina=Buenos Aires, Chile=Santiago,
    Peru=Lima, Colombia=Bogota, Venezuela=Caracas, Ecuador=Quito, Bolivia=Sucre, Uruguay=Montevideo,
    Paraguay=Asuncion, Australia=Canberra, New Zealand=Wellington"""
)
GERMAN = _pairs(
    """France=Frankreich, Germany=Deutschland, Spain=Spanien, Italy=Italien, Portugal=Portugal,
    Poland=Polen, Greece=Griechenland, Norway=Norwegen, Sweden=Schweden, Finland=Finnland,
    Ireland=Irland, Iceland=Island, Hungary=Ungarn, Japan=Japan, Canada=Kanada, Chile=Chile,
    Peru=Peru, Kenya=Kenia, Nepal=Nepal, Ghana=Ghana"""
)
FRENCH = _pairs(
    """France=la France, Germany=l'Allemagne, Spain=l'Espagne, Italy=l'Italie, Poland=la Pologne, Norway=la
    Norvège, Sweden=la Suède, Finland=la Finlande, Ireland=l'Irlande, Iceland=l'Islande, Hungary=la
    Hongrie, Japan=le Japon, Canada=le Canada, Chile=le Chili, Kenya=le Kenya, Ghana=le Ghana,
    Peru=le Pérou, Portugal=le Portugal, Nepal=le Népal, Croatia=la Croatie"""
)
GERMAN_CAPITALS = {
    "Italy": "Rom",
    "Poland": "Warschau",
    "Portugal": "Lissabon",
    "Greece": "Athen",
    "Japan": "Tokio",
}
FRENCH_CAPITALS = {
    "Italy": "Rome",
    "Poland": "Varsovie",
    "Portugal": "Lisbonne",
    "Nepal": "Katmandou",
    "Hungary": "Budapest",
}
SYMBOLS = _pairs(
    """hydrogen=H, helium=He, lithium=Li, carbon=C, nitrogen=N, oxygen=O, fluorine=F, neon=Ne, sodium=Na,
    magnesium=Mg, aluminium=Al, silicon=Si, phosphorus=P, sulfur=S, chlorine=Cl, argon=Ar,
    potassium=K, calcium=Ca, titanium=Ti, chromium=Cr, iron=Fe, cobalt=Co, nickel=Ni, copper=Cu,
    zinc=Zn, silver=Ag, tin=Sn, iodine=I, gold=Au, mercury=Hg, lead=Pb, uranium=U"""
)
YOUNG = _pairs(
    """dog=puppy, cat=kitten, cow=calf, horse=foal, sheep=lamb, goat=kid, pig=piglet, hen=chick,
    duck=duckling, goose=gosling, bear=cub, lion=cub, kangaroo=joey, frog=tadpole, swan=cygnet,
    deer=fawn, owl=owlet, eel=elver"""
)
COLOURS = _pairs(
    """banana=yellow, lemon=yellow, grass=green, the sky=blue, snow=white, coal=black, a tomato=red,
    blood=red, an orange=orange, chocolate=brown, milk=white, an emerald=green, a ruby=red, a
    sapphire=blue, a flamingo=pink, an aubergine=purple"""
)
CURRENCIES = _pairs(
    """Japan=yen, India=rupee, China=yuan, Mexico=peso, Brazil=real, Sweden=krona, Norway=krone,
    Poland=zloty, Hungary=forint, Turkey=lira, Thailand=baht, Vietnam=dong, Israel=shekel,
    Russia=rouble, Peru=sol, South Africa=rand, Switzerland=franc, Ukraine=hryvnia, Kenya=shilling,
    Malaysia=ringgit, Morocco=dirham, Nigeria=naira, South Korea=won, Germany=euro"""
)
AUTHORS = _pairs(
    """Hamlet=William Shakespeare, Faust=Johann Wolfgang von Goethe, Don Quixote=Miguel de Cervantes, Moby
    Dick=Herman Melville, Emma=Jane Austen, Dracula=Bram Stoker, Frankenstein=Mary Shelley, Oliver
    Twist=Charles Dickens, War and Peace=Leo Tolstoy, Ulysses=James Joyce, Candide=Voltaire, The
    Odyssey=Homer, Walden=Henry David Thoreau, Jane Eyre=Charlotte Bronte, Les Miserables=Victor
    Hugo, The Metamorphosis=Franz Kafka, Crime and Punishment=Fyodor Dostoevsky, Treasure
    Island=Robert Louis Stevenson"""
)
OPPOSITES = _pairs(
    """hot=cold, big=small, fast=slow, light=dark, high=low, open=closed, full=empty, wet=dry, old=new,
    hard=soft, loud=quiet, rich=poor, early=late, strong=weak, near=far, happy=sad, heavy=light,
    deep=shallow, thick=thin, sweet=sour, true=false, left=right, up=down, day=night, first=last,
    win=lose"""
)
PLANETS = _pairs(
    """first=Mercury, second=Venus, third=Earth, fourth=Mars, fifth=Jupiter, sixth=Saturn,
    seventh=Uranus, eighth=Neptune"""
)


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact. questions hold {x} for the subject, answer holds {x} and {y}."""

    name: str
    facts: dict[str, str]
    questions: tuple[str, ...]
    answer: str
    note: str


RELATIONS = (
    Relation(
        "capital",
        CAPITALS,
        (
            "What is the capital of {x}?",
            "Which city is the capital of {x}?",
            "Tell me the capital of {x}.",
            "Name the capital of {x}.",
            "What is {x}'s capital?",
            "What's the capital of {x}?",
            "Do you know the capital of {x}?",
            "Capital of {x}?",
            "I would like to know the capital of {x}.",
            "What is the capital city of {x}?",
        ),
        "The capital of {x} is {y}.",
        "capital of {x}: {y}",
    ),
    Relation(
        "country",
        {city: country for country, city in CAPITALS.items()},
        (
            "{x} is the capital of which country?",
            "Which country has the capital {x}?",
            "Of which country is {x} the capital?",
            "What country is {x} the capital of?",
            "Name the country whose capital is {x}.",
            "Tell me which country has {x} as its capital.",
        ),
        "{x} is the capital of {y}.",
        "{x} is in {y}",
    ),
    Relation(
        "symbol",
        SYMBOLS,
        (
            "What is the chemical symbol of {x}?",
            "What is the symbol for {x}?",
            "Which symbol does {x} have?",
            "Give me the chemical symbol for {x}.",
            "Chemical symbol of {x}?",
            "How is {x} written in chemistry?",
            "What's the chemical symbol for {x}?",
        ),
        "The chemical symbol of {x} is {y}.",
        "symbol of {x}: {y}",
    ),
    Relation(
        "young",
        YOUNG,
        (
            "What is a young {x} called?",
            "What do you call a baby {x}?",
            "What is the name for a young {x}?",
            "Tell me what a baby {x} is called.",
            "What's a young {x} called?",
            "Name for a baby {x}?",
        ),
        "A young {x} is called a {y}.",
        "young of a {x}: {y}",
    ),
    Relation(
        "colour",
        COLOURS,
        (
            "What colour is {x}?",
            "Which colour does {x} have?",
            "Tell me the colour of {x}.",
            "What color is {x}?",
            "What is the colour of {x}?",
            "Name the colour of {x}.",
        ),
        "The colour of {x} is {y}.",
        "colour of {x}: {y}",
    ),
    Relation(
        "currency",
        CURRENCIES,
        (
            "What is the currency of {x}?",
            "Which currency does {x} use?",
            "What money do people use in {x}?",
            "Tell me the currency of {x}.",
            "Currency of {x}?",
            "What currency is used in {x}?",
            "How do you pay in {x}?",
        ),
        "The currency of {x} is the {y}.",
        "currency of {x}: {y}",
    ),
    Relation(
        "author",
        AUTHORS,
        (
            "Who wrote {x}?",
            "Who is the author of {x}?",
            "Name the author of {x}.",
            "Which author wrote {x}?",
            "Tell me who wrote {x}.",
            "By whom is {x}?",
        ),
        "{x} was written by {y}.",
        "author of {x}: {y}",
    ),
    Relation(
        "opposite",
        OPPOSITES,
        (
            "What is the opposite of {x}?",
            "Give me the opposite of {x}.",
            "Opposite of {x}?",
            "Name the opposite of {x}.",
            "What's the opposite of {x}?",
            "Tell me the opposite of {x}.",
        ),
        "The opposite of {x} is {y}.",
        "opposite of {x}: {y}",
    ),
    Relation(
        "planet",
        PLANETS,
        (
            "What is the {x} planet from the sun?",
            "Which planet is the {x} from the sun?",
            "Name the {x} planet.",
            "Tell me the {x} planet from the sun.",
            "Which planet is {x} from the sun?",
        ),
        "The {x} planet from the sun is {y}.",
        "{x} planet: {y}",
    ),
)

WORDS = _words(
    """apple, river, stone, cloud, table, window, garden, bridge, candle, forest, mountain, pencil, basket,
    bottle, button, carpet, castle, chair, circle, corner, cotton, desert, dinner, dragon, engine,
    feather, finger, flower, guitar, hammer, harbour, island, jacket, kettle, ladder, lantern,
    letter, marble, market, meadow, mirror, needle, ocean, orange, paper, parrot, pepper, pillow,
    planet, pocket, potato, puzzle, rabbit, ribbon, rocket, saddle, school, shadow, silver, spider,
    spoon, spring, summer, sunset, ticket, tiger, timber, tower, tunnel, turtle, valley, velvet,
    violin, wagon, walnut, water, whale, wheel, winter, wizard, anchor, autumn, badge, barrel,
    beach, bread, brush, butter, cabin, camel, canoe, cherry, clock, coffee, copper, crown, daisy,
    eagle, falcon, fence, field, flute, glass, grape, honey, horse, house, jungle, knife, lemon,
    lion, maple, melon, mouse, music, night, olive, onion, panda, pearl, piano, queen, radio, rain,
    rose, sand, ship, snow, soup, star, storm, sugar, swan, tea, tent, train, tree, tulip, vase,
    wind, wolf, wood, zebra"""
)
NAMES = _words(
    """Alma, Tom, Eva, Ben, Clara, David, Emma, Felix, Greta, Hugo, Ida, Jonas, Kira, Leo, Mia, Nora,
    Oscar, Paula, Rosa, Sam, Tina, Uma, Victor, Wanda, Yara, Zoe, Adam, Anna, Boris, Carla, Dora,
    Elias, Fiona, Georg, Hanna, Ivan, Julia, Karl, Lena, Max, Nina, Otto, Peter, Ruth, Simon, Theo,
    Vera, Walter, Alice, Bob, Carol, Dan, Frank, Grace, Henry, Irene, Jack, Kate, Liam, Maria, Noah,
    Olga, Paul, Rita, Sofia, Tim, John, Sarah, Maya"""
)
CITIES = tuple(CAPITALS.values()) + _words(
    """London, New York, Chicago, Boston, Seattle, Toronto, Munich, Hamburg, Cologne, Milan, Naples, Turin,
    Lyon, Nice, Porto, Seville, Valencia, Barcelona, Geneva, Zurich, Basel, Bergen, Krakow, Gdansk,
    Mumbai, Osaka, Kyoto, Shanghai, Sydney, Melbourne, Perth, Dallas, Denver, Miami, Houston, Dubai,
    Singapore, Leeds, York, Bath"""
)
PREFERENCES = {
    "favourite colour": _words("red, green, blue, yellow, pink, purple, orange, black, white, brown, grey"),
    "favourite food": _words("pizza, soup, rice, bread, cheese, pasta, salad, curry, fish, apples, noodles"),
    "favourite animal": _words("cats, dogs, owls, foxes, bears, horses, whales, tigers, wolves, rabbits"),
    "home town": CITIES,
    "lucky number": tuple(str(number) for number in range(2, 100)),
}
ANIMALS = _words(
    "fox, bear, owl, cat, dog, mouse, wolf, rabbit, horse, duck, frog, swan, goat, lion, tiger, whale"
)
_SYLLABLES = _words(
    """ba, bel, bo, cor, da, dri, el, fen, fi, ga, gor, ha, il, ka, kel, lo, lu, ma, mi, mor, na, nu, or, pa,
    pel, qui, ra, ri, sa, sil, ta, tor, u, va, vel, wi, xa, yo, za, zor"""
)


def invent_word(draws: list[float]) -> str:
    """Make a word that means nothing: one syllable per number in [0, 1)."""
    return "".join(_SYLLABLES[int(draw * len(_SYLLABLES))] for draw in draws)
