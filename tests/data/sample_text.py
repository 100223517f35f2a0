"""Text for the tests of data."""

import numpy as np

WORDS = "the model learns to read a line of text, then another; café and naïve are words too — 日本語"


def random_text(size: int, seed: int = 0) -> str:
    """Lines of words, about `size` characters, the same for the same seed."""
    rng, words = np.random.default_rng(seed), WORDS.split()
    lines, length = [], 0
    while length < size:
        lines.append(" ".join(rng.choice(words, rng.integers(3, 15))))
        length += len(lines[-1]) + 1
    return "\n".join(lines) + "\n"
