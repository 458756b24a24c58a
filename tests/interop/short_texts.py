"""Ten short texts to continue: code, prose, other scripts, conversations. All written for this test.

None of them ends where the models would end it: 64 tokens follow each.
"""

from __future__ import annotations

from texts import Conversation

SHORT_TEXTS: dict[str, str | Conversation] = {
    "python": '''def moving_average(values: list[float], width: int) -> list[float]:
    """The mean of each run of `width` values."""
''',
    "sql": "CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT, author TEXT);\nINSERT INTO books VALUES",
    "story": "The old clock in the tower had stopped at ten past three, and nobody in the village",
    "science": "Sound travels faster in water than in air because",
    "recipe": "Pancakes for two\n\nIngredients: 150 g flour, 2 eggs, 250 ml milk, a pinch of salt.\n\n1.",
    "history": "In the year 1969 two astronauts landed on the Moon. After they had",
    "german": "Am Morgen lag dichter Nebel über dem See. Der Fischer schob sein Boot ins Wasser und",
    "han": "从前有一座山，山上有一座小庙，庙里住着",
    "question": [{"role": "user", "content": "How does a bicycle stay upright while it moves?"}],
    "turns": [
        {"role": "user", "content": "Name a large river in South America."},
        {"role": "assistant", "content": "The Amazon."},
        {"role": "user", "content": "Tell me more about the animals that live in it."},
    ],
}
