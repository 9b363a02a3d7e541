"""Names the topics, authors and users of the world, so that people can read a ranking."""

from __future__ import annotations

TOPICS = (
    "astronomy", "baking", "chess", "cycling", "football", "gardening",
    "history", "jazz", "photography", "robotics", "sailing", "travel",
)  # fmt: skip

_FIRST = (
    "Ada", "Amir", "Aiko", "Bela", "Carla", "Chidi", "Dana", "Diego", "Elif", "Emil", "Farah", "Goran", "Hana", "Ines",
    "Ivo", "Jonas", "Kaja", "Kofi", "Lena", "Luca", "Mara", "Mei", "Nadia", "Noor", "Olga", "Otis", "Petra", "Priya",
    "Quentin", "Rosa", "Ravi", "Sana", "Sven", "Tara", "Tomas", "Uma", "Vera", "Wale", "Yara", "Zeno",
)  # fmt: skip
_LAST = (
    "Abara", "Berg", "Castillo", "Dahl", "Eriksen", "Fontaine", "Garcia", "Haddad", "Ito", "Jansen", "Kaya", "Lindqvist",
    "Moreau", "Novak", "Okafor", "Petrov", "Quispe", "Rossi", "Sato", "Tanaka", "Ueda", "Varga", "Weiss", "Yilmaz", "Zhou",
)  # fmt: skip


def topic_name(index: int) -> str:
    """A word for a topic; topics beyond the twelfth are numbered."""
    return TOPICS[index] if index < len(TOPICS) else f"topic {index + 1}"


def person_name(index: int) -> str:
    """First and last name; distinct for the first thousand, numbered after that."""
    pairs = len(_FIRST) * len(_LAST)
    first, last = _FIRST[index % len(_FIRST)], _LAST[(index * 7 + index // len(_FIRST)) % len(_LAST)]
    return f"{first} {last}" if index < pairs else f"{first} {last} {index // pairs + 1}"
