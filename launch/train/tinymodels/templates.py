"""The word-problem templates: text with slots, number ranges and worked steps.

A slot is ``{name}``: a person (``{p}``, ``{p2}``), an object (``{o}``), a place (``{w}``) or a number variable.
A worked step writes ``[c=a+b]``, which becomes GSM8K's ``3+4=<<3+4=7>>7`` and defines ``c``. The last defined
variable is the answer. One template has one way of solving it, so an answer is a function of its question.
"""

from dataclasses import dataclass

PEOPLE = (
    "Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Emma", "Leo", "Nora", "Jack", "Ella", "Omar", "Sara", "Ivan",
    "Ruth", "Paul", "Zoe", "Adam", "Kate", "Luis", "Amy", "Hugo", "Rosa", "Finn", "Tara", "Eric", "Maya", "Noah",
    "June",
)  # fmt: skip
OBJECTS = (
    "apples", "pears", "books", "pens", "coins", "cards", "shells", "stamps", "balls", "cookies", "marbles", "stickers",
    "flowers", "eggs", "stones", "candles", "buttons", "oranges", "toys", "muffins", "beads", "plums", "cups", "nuts",
)  # fmt: skip
PLACES = ("shop", "market", "school", "farm", "library", "fair", "park", "bakery")


@dataclass(frozen=True)
class Template:
    """One kind of problem.

    ranges: number variable -> inclusive bounds; question: text with slots; steps: worked sentences with slots.
    """

    ranges: dict[str, tuple[int, int]]
    question: str
    steps: tuple[str, ...]


_T = Template
SMALL, TIMES, MANY = (2, 20), (2, 12), (10, 60)

TEMPLATES: tuple[Template, ...] = (
    # one step
    _T(
        {"a": MANY, "b": SMALL},
        "{p} has {a} {o}. {p2} gives {p} {b} more {o}. How many {o} does {p} have now?",
        ("{p} now has [c=a+b] {o}.",),
    ),
    _T(
        {"a": MANY, "b": SMALL},
        "{p} has {a} {o} and gives {b} of them to {p2}. How many {o} are left?",
        ("{p} has [c=a-b] {o} left.",),
    ),
    _T(
        {"a": TIMES, "b": TIMES},
        "There are {a} boxes with {b} {o} in each box. How many {o} are there in total?",
        ("There are [c=a*b] {o} in the boxes.",),
    ),
    _T(
        {"a": TIMES, "b": TIMES},
        "{p} buys {a} {o} at the {w}. Each one costs {b} dollars. How much does {p} pay?",
        ("{p} pays [c=a*b] dollars.",),
    ),
    _T(
        {"a": MANY, "b": MANY},
        "{p} finds {a} {o} and {p2} finds {b} {o}. How many {o} do they find together?",
        ("Together they find [c=a+b] {o}.",),
    ),
    # two steps
    _T(
        {"a": TIMES, "b": TIMES, "d": SMALL},
        "{p} has {a} bags with {b} {o} in each bag. {p} finds {d} more {o}. How many {o} does {p} have?",
        ("The bags hold [c=a*b] {o}.", "With the new ones {p} has [e=c+d] {o}."),
    ),
    _T(
        {"a": TIMES, "b": TIMES, "d": SMALL},
        "A {w} has {a} shelves with {b} {o} on each shelf. It sells {d} {o}. How many {o} are left?",
        ("The shelves hold [c=a*b] {o}.", "After the sale there are [e=c-d] {o}."),
    ),
    _T(
        {"a": MANY, "b": SMALL, "d": SMALL},
        "{p} had {a} {o}. {p} lost {b} {o} and then bought {d} {o} at the {w}. How many {o} does {p} have now?",
        ("After the loss {p} had [c=a-b] {o}.", "Now {p} has [e=c+d] {o}."),
    ),
    _T(
        {"a": SMALL, "b": SMALL, "d": (2, 4)},
        "{p} picks {a} {o} in the morning and {b} {o} in the evening every day. How many {o} is that in {d} days?",
        ("Each day {p} picks [c=a+b] {o}.", "In all that is [e=d*c] {o}."),
    ),
    _T(
        {"a": TIMES, "b": (20, 80), "d": TIMES},
        "{p} has {b} dollars and buys {a} {o} for {d} dollars each. How many dollars are left?",
        ("The {o} cost [c=a*d] dollars.", "{p} has [e=b-c] dollars left."),
    ),
    _T(
        {"a": (5, 40), "b": SMALL},
        "{p} has {a} {o}. {p2} has {b} more {o} than {p}. How many {o} do they have together?",
        ("{p2} has [c=a+b] {o}.", "Together they have [e=a+c] {o}."),
    ),
    _T(
        {"a": (20, 60), "b": SMALL},
        "{p} has {a} {o}. {p2} has {b} fewer {o} than {p}. How many {o} do they have together?",
        ("{p2} has [c=a-b] {o}.", "Together they have [e=a+c] {o}."),
    ),
    _T(
        {"a": SMALL, "b": (2, 5)},
        "{p} made {a} {o} on Monday and {b} times as many on Friday. How many {o} did {p} make in total?",
        ("On Friday {p} made [c=b*a] {o}.", "In total {p} made [e=a+c] {o}."),
    ),
    # three steps
    _T(
        {"a": TIMES, "b": TIMES, "d": SMALL, "f": SMALL},
        "{p} has {a} boxes of {b} {o}. {p} gives {d} {o} to {p2} and buys {f} more. How many {o} does {p} have now?",
        ("The boxes hold [c=a*b] {o}.", "After the gift {p} has [e=c-d] {o}.", "Now {p} has [g=e+f] {o}."),
    ),
    _T(
        {"a": (2, 9), "b": (2, 9), "d": (2, 9), "f": (2, 9)},
        "{p} buys {a} {o} for {b} dollars each and {d} tickets for {f} dollars each. How much does {p} spend?",
        ("The {o} cost [c=a*b] dollars.", "The tickets cost [e=d*f] dollars.", "{p} spends [g=c+e] dollars."),
    ),
    _T(
        {"a": SMALL, "b": SMALL, "d": (2, 4), "f": SMALL},
        "Each morning {p} sells {a} {o} and each evening {b} {o}. After {d} days {f} {o} come back to the {w}. "
        "How many {o} stay sold?",
        ("Each day {p} sells [c=a+b] {o}.", "In all {p} sells [e=d*c] {o}.", "So [g=e-f] {o} stay sold."),
    ),
    _T(
        {"a": MANY, "b": SMALL, "d": SMALL, "f": SMALL},
        "A bus leaves the {w} with {a} people. At the first stop {b} get on, at the second {d} get off and at the "
        "third {f} get on. How many people are on the bus?",
        ("After the first stop there are [c=a+b] people.", "After the second there are [e=c-d] people.",
         "After the third there are [g=e+f] people."),
    ),
)  # fmt: skip
