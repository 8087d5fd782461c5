"""Rows of random words for benchmarks, of about as many tokens as words: each is one of SmolLM2's tokens."""

import json
import random

WORDS = "the of and to in is that for it as was with be by on not he his but at are this have from or had an they"


def random_rows(method: str, count: int, prompt: int, response: int) -> list[str]:
    """Returns rows as JSON lines, with `prompt` words in each prompt and `response` in each answer."""
    draw, words = random.Random(0), WORDS.split()
    lines = []
    for index in range(count):
        asked, good, bad = (" ".join(draw.choices(words, k=size)) for size in (prompt, response, response))
        user, assistant = ({"role": role, "content": text} for role, text in (("user", asked), ("assistant", good)))
        rows: dict[str, dict[str, object]] = {
            "sft": {"messages": [user, assistant]},
            "dpo": {"prompt": [user], "chosen": good, "rejected": bad},
            "kto": {"prompt": [user], "completion": good, "label": index % 2 == 0},
        }
        lines.append(json.dumps(rows[method]))
    return lines
