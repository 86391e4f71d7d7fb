"""What OCR training prompts are made of: scenes with a place for a text, and texts that fit there."""

from itertools import product

STYLES = (
    "A photograph of",
    "A close-up photo of",
    "An oil painting of",
    "A watercolour of",
    "A detailed illustration of",
    "A cinematic shot of",
    "A wide-angle view of",
    "A 3D rendering of",
)
SETTINGS = (
    "in soft morning light",
    "at dusk, with long shadows",
    "on a rainy afternoon",
    "under a clear blue sky",
    "with snow on the ground around it",
    "lit by warm lamps against a dark background",
    "with people passing by, out of focus",
    "in fog, with muted colours",
    "surrounded by plants in full leaf",
    "in bright noon sun",
    "with peeling paint and traces of rust nearby",
    "in a tidy, minimal composition",
)

_OWNERS = "Abel,Bruno,Carla,Dora,Emil,Fiona,Greta,Hugo,Irma,Jonas,Klara,Lena,Marta,Nils,Otto,Paula"
_FIRSTS = "Amber Anchor Blue Copper Corner Crescent Garden Golden Harbour Hilltop Little Maple Market Old Olive Pepper "
_FIRSTS += "Quiet Red River Saffron Silver Station Sunny Velvet Walnut Wild Willow Winter"
_TRADES = "Bakery,Bicycle Repair,Book Exchange,Bistro,Cafe,Camera Shop,Cheese Counter,Dry Cleaning,Fish Market,Florist,"
_TRADES += (
    "Guitar Store,Hardware,Ice Cream,Laundry,Noodle Bar,Optician,Pharmacy,Record Store,Shoe Repair,Tailor,Tea Room,"
)
_TRADES += "Toys,Travel Agency,Watchmaker"
_DOINGS = "Camping,Climbing,Cycling,Diving,Fishing,Littering,Loitering,Mooring,Parking,Photography,Running,Skating,"
_DOINGS += "Smoking,Swimming,Trespassing"
_LIMITS = "Beyond This Point,After Dark,On The Bridge,At Any Time,Without Permission,Near The Water,During Service,Here"
_HAZARDS = (
    "Bull,Crocodiles,Dog,Falling Rocks,Geese,High Tide,Ice,Low Bridge,Moving Trains,Sheep,Steep Steps,Strong Wind,"
)
_HAZARDS += "Trams,Wet Floor"
_WARNINGS = ("Beware Of {}", "Caution {}", "Danger {} Ahead", "Watch For {}")
_KINDS = (
    "Broken,Crimson,Distant,Empty,Forgotten,Frozen,Hidden,Hollow,Invisible,Last,Lonely,Midnight,Paper,Patient,Second,"
)
_KINDS += "Silent,Sleeping,Unfinished"
_THINGS = "Atlas,Bridge,Clockmaker,Compass,Gardener,Harvest,Island,Lantern,Letter,Mountain,Orchard,Piano,Sparrow,Storm,"
_THINGS += "Tower,Voyage"
_SUBJECTS = (
    "Astronomy,Beekeeping,Chess,Geometry,Gardening,Knots,Mushrooms,Navigation,Origami,Pottery,Sourdough,Statistics"
)
_TOWNS = "Alderbrook,Birkenau,Cedar Falls,Dunmore,Eastport,Fairhaven,Glenwood,Hartfield,Kingsbridge,Lakeview,Millbrook,"
_TOWNS += "Northgate,Oakridge,Port Arden,Riverton,Stonehill,Thornbury,Westlake"
_WISHES = (
    "Congratulations {},Get Well Soon {},Good Luck {},Happy Birthday {},Merry Christmas {},Thank You {},We Miss You {}"
)
_STATES = "Backup,Connection,Download,Export,Installation,Payment,Recording,Scan,Sync,Upload,Update"
_ENDS = "Cancelled,Complete,Delayed,Failed,In Progress,Paused,Pending,Successful,Please Wait"
_SHORT = "Apples Bar Books Bread Cash Closed Coffee Eggs Entrance Exit Flowers Free Fresh Gifts Go Help Honey Hope Hotel Ice "
_SHORT += "Keys Left Lost Love Maps Milk Museum New No On Open Peace Pizza Private Pull Push Quiet Rooms Run Sale Slow "
_SHORT += "Soup Start Stop Taxi Tea Tickets Tools Up Vacancy Vote Wait Welcome Yes"


def _all(pattern: str, *words: str | list[str]) -> list[str]:
    """The pattern with each combination of words: lists, or names parted by commas."""
    lists = (part.split(",") if isinstance(part, str) else part for part in words)
    return [pattern.format(*combination) for combination in product(*lists)]


def _cases(texts: list[str]) -> list[str]:
    """The texts as they are and in capitals, each once."""
    return list(dict.fromkeys([*texts, *(text.upper() for text in texts)]))


def _numbers(start: int, stop: int, step: int = 1) -> list[str]:
    return [str(number) for number in range(start, stop, step)]


_SHOPS = _all("{} {}", _FIRSTS.split(), _TRADES) + _all("{}'s {}", _OWNERS, _TRADES)
_NOTICES = [
    *_all("No {} {}", _DOINGS, _LIMITS),
    *(text for pattern in _WARNINGS for text in _all(pattern, _HAZARDS)),
    *_all("Private {} Keep Out", "Beach,Garden,Property,Road,Woodland"),
    *_all("Please {} The {}", "Close,Mind,Respect", "Doors,Gap,Gate,Neighbours,Steps"),
]
_TITLES = [
    *_all("The {} {}", _KINDS, _THINGS),
    *_all("{} For {}", _SUBJECTS, "Beginners,Everyone,The Impatient,Two"),
    *_all("A Short History Of {}", _SUBJECTS),
]
_NUMBERED = [
    *_all("{} {}", "Gate,Platform,Track,Locker", _numbers(1, 30)),
    *_all("Room {}", _numbers(101, 420, 7)),
    *_all("Route {}", _numbers(3, 99, 4)),
    *_all("Speed Limit {}", _numbers(20, 90, 10)),
    *_all("{} {} Km", _TOWNS, _numbers(2, 60, 9)),
    *_all("Elevation {} M", _numbers(350, 4200, 150)),
    *_all("Open {} To {}", _numbers(6, 12), _numbers(3, 10)),
    *_all("Only ${}.{}", _numbers(1, 20, 2), ["49", "95", "99"]),
]
_GREETINGS = [
    *(text for wish in _WISHES.split(",") for text in _all(wish, _OWNERS)),
    *_all("Welcome To {}", _TOWNS),
    *_all("{} {}", _TOWNS, "Book Fair,Film Festival,Half Marathon,Jazz Weekend,Spring Market"),
]
_SCREENS = [
    *_all("{} {}", _STATES, _ENDS),
    *_all("{} {}%", "Battery,Humidity,Loading,Progress,Volume", _numbers(5, 100, 5)),
    *_all("{}:{:0>2}", _numbers(6, 23), _numbers(0, 60, 5)),
]

# Scenes and texts of each kind. A scene belongs to one kind only.
KINDS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "shop": (
        (
            "a narrow shop front with {} painted above the door",
            "a striped awning that carries the name {}",
            "a neon sign glowing {} over a street corner",
            "a paper bag printed with {} on a counter",
            "a delivery van with {} along its side",
            "a wooden board hanging from chains, carved with {}",
        ),
        _cases(_SHOPS),
    ),
    "notice": (
        (
            "a yellow warning sign on a fence that says {}",
            "a weathered wooden post with the notice {}",
            "a metal plate screwed to a brick wall, stamped {}",
            "a laminated sheet taped to a glass door, reading {}",
            "a red and white board beside a path with the words {}",
        ),
        _cases(_NOTICES),
    ),
    "title": (
        (
            "a hardcover book titled {} on a desk",
            "a film poster with the title {} in large letters",
            "a vinyl record sleeve that bears the title {}",
            "a theatre marquee announcing {}",
            "a shelf on which one spine reads {}",
        ),
        _TITLES,
    ),
    "number": (
        (
            "an enamel sign with {} in white letters",
            "a large arrow painted with {} on a concrete wall",
            "a roadside board showing {}",
            "a brass plaque engraved with {}",
            "a chalkboard on the pavement saying {}",
        ),
        _cases(_NUMBERED),
    ),
    "greeting": (
        (
            "a long cloth banner between two trees with {} on it",
            "a cake decorated with {} in icing",
            "a folded card with {} in handwriting",
            "balloons and a garland of letters that spell {}",
            "a mural with the words {} in bold strokes",
        ),
        _GREETINGS,
    ),
    "screen": (
        (
            "a laptop on a wooden table, its screen showing {}",
            "a smartwatch that displays {}",
            "a departure board lit up with {}",
            "the dashboard of a car with the message {}",
            "a robot whose chest display reads {}",
        ),
        _cases(_SCREENS),
    ),
    "word": (
        (
            "a hand-painted tile that says {}",
            "a ceramic mug with the single word {}",
            "pebbles on a beach laid out as {}",
            "a key ring with a tag marked {}",
            "a flag that shows {} and nothing else",
            "a round badge with {} in the middle",
        ),
        _cases(_SHORT.split()),
    ),
}
