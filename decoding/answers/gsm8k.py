"""Word problems from files in GSM8K's format.

Source: Cobbe et al. 2021, arXiv 2110.14168.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from decoding.answers.question import Question


def read_gsm8k(path: str | Path) -> list[Question]:
    """The questions of a JSONL file with `question` and `answer`, or with `turns` and `reference` (lists whose first
    entries are these); an answer ends with `#### number`. Raises ValueError that names the line."""
    out = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            asked = record["question"] if "question" in record else record["turns"][0]
            told = record["answer"] if "answer" in record else record["reference"][0]
            found = re.search(r"####\s*(-?[\d,]*\.?\d+)\s*$", told)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}, holds no `question` and `answer`, nor `turns` and `reference` ({error!r})"
            ) from error
        if not isinstance(asked, str) or not asked.strip():
            raise ValueError(f"{path}, line {number}: the question is {str(asked)[:40]!r}, and must be some text")
        if not found:
            raise ValueError(f"{path}, line {number}: the answer does not end with `#### number`")
        message = {"role": "user", "content": asked}
        answer = found[1].replace(",", "")
        out.append(Question(f"gsm8k-{number}", "gsm8k", 1, (message,), answer, check="number"))
    return out
