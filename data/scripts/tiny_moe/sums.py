"""The fifth domain: small sums and word problems, made here."""

from __future__ import annotations

from random import Random

NAMES = "Anna Ben Clara Dan Emma Finn Grace Hugo Ida Jack Kate Leo Mary Ned Olga Paul Rose Sam Tess Will".split()
THINGS = "apples books eggs stones shells coins cups pens cakes nuts".split()


def plain_sum(kind: float, random: Random) -> str:
    """A bare addition, subtraction, multiplication or a counting row, by kind in 0..0.68."""
    if kind < 0.25:
        a, b = random.randint(0, 99), random.randint(0, 99)
        return f"{a} + {b} = {a + b}"
    if kind < 0.45:
        a, b = sorted((random.randint(0, 99), random.randint(0, 99)), reverse=True)
        return f"{a} - {b} = {a - b}"
    if kind < 0.6:
        a, b = random.randint(0, 12), random.randint(0, 12)
        return f"{a} * {b} = {a * b}"
    first, step = random.randint(0, 20), random.randint(1, 9)
    return "Count: " + ", ".join(str(first + step * i) for i in range(6))


def word_problem(kind: float, random: Random) -> str:
    """A sum told about people and things, by kind in 0.68..1."""
    name, things = random.choice(NAMES), random.choice(THINGS)
    other = random.choice([n for n in NAMES if n != name])
    if kind < 0.84:
        a, b = random.randint(2, 20), random.randint(2, 20)
        return f"{name} has {a} {things}. {other} gives {name} {b} more. Now {name} has {a} + {b} = {a + b} {things}."
    if kind < 0.93:
        a, b = sorted((random.randint(2, 30), random.randint(1, 20)), reverse=True)
        return f"{name} has {a} {things} and loses {b}. Now {name} has {a} - {b} = {a - b} {things}."
    a, b = random.randint(2, 9), random.randint(2, 9)
    return f"{name} has {a} boxes with {b} {things} each. In all, {name} has {a} * {b} = {a * b} {things}."


def line(random: Random) -> str:
    kind = random.random()
    return plain_sum(kind, random) if kind < 0.68 else word_problem(kind, random)


def documents(count: int, random: Random) -> list[str]:
    """`count` documents of 6 to 30 lines."""
    return ["\n".join(line(random) for _ in range(random.randint(6, 30))) for _ in range(count)]
