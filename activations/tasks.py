"""Task prompts that are built, not collected: templates over permissive text, small grammars, plain lists.

They make the target write the kinds of text that people ask for; the corpus of `activations/prompts` is for
probes and tuning, this is bulk text for training drafters.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

PASSAGE = (
    "Summarize the following text in a few sentences.\n\n{text}",
    "{text}\n\nWrite a short summary of the text above.",
    "Summarize: {text}",
    "Read the passage and list its key points as bullets.\n\n{text}",
    "Rewrite this text in simpler words, keeping names and numbers as they are.\n\n{text}",
    "Correct the grammar of the following text and change nothing else:\n\n{text}",
    "Translate the following text to French.\n\n{text}",
    "Extract the people, places and dates of this text as JSON.\n\n{text}",
    "Answer the question using the context.\n\nContext: {text}\n\nQuestion: What is this passage mainly about?",
    "Context:\n{text}\n\nQuestion: Which details support the main idea? Quote the sentences.\nAnswer:",
    "Based on these passages, answer the question.\n\nPassage 1: {text}\n\nPassage 2: {more}\n\n"
    "Question: What do the two passages have in common?",
    "Quote the most important sentence of the text word for word, then explain it.\n\n{text}",
    "Turn this text into an email to a colleague.\n\n{text}",
    "Write three questions about this text and answer each of them.\n\n{text}",
)

CODE = (
    "Explain what this Python function does.\n\n```python\n{code}\n```",
    "Add type hints to this function.\n\n```python\n{code}\n```",
    "Add a docstring to this function and return the whole function.\n\n```python\n{code}\n```",
    "Rename the function to `run_task` and return the full code.\n\n```python\n{code}\n```",
    "Write unit tests for this function.\n\n```python\n{code}\n```",
    "Is there a bug in this code? If so, show the corrected code.\n\n```python\n{code}\n```",
    "Complete this Python function.\n\n```python\n{head}\n```",
    "Rewrite this function with clearer variable names.\n\n```python\n{code}\n```",
    "Write a Python function that does the following: {doc}",
)

NAMES = ("Ana", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam", "Mona")
THINGS = ("apples", "books", "pencils", "stickers", "marbles", "cookies", "tickets", "stamps", "shells", "cards")
MATH = (
    "{a} has {x} {t}. {b} gives {a} {y} more, and then {a} sells {z} of them. How many {t} does {a} have left?",
    "A box holds {x} {t}. {a} buys {y} boxes and shares all the {t} equally among {z} friends. How many does each get?",
    "{a} reads {x} pages a day for {y} days. The book has {w} pages. How many pages are left?",
    "A train travels at {w} km per hour for {y} hours, then stops for {z} minutes. How far has it gone?",
    "{t} cost {x} dollars each. {a} buys {y} of them and pays with a {w} dollar bill. What change does {a} get?",
    "{a} is {x} years old and {b} is {y} years older. What will be the sum of their ages in {z} years?",
    "A rectangle is {x} meters long and {y} meters wide. What are its area and its perimeter?",
    "{a} saves {x} dollars every week. After {y} weeks, half is spent on {t}. How much money remains?",
    "Solve for x: {x}x + {y} = {w}",
    "What is {x}% of {w}? Explain each step.",
)

WORDS = (
    "Who is {Name}?",
    "Who was {Name}, and what did they do?",
    "What is {word}?",
    "What does the word '{word}' mean? Give three examples.",
    "Tell me about {Name}.",
    "Where is {Name}, and what is it like there?",
    "When did {Name} happen, and why does it matter?",
    "Write a news report about {Name} and {Other}. Quote two people.",
    "Write a newspaper article about a {word} in {Name}.",
    "Write an encyclopedia article about {Name}.",
    "Describe the history of {word} from the beginning until today.",
    "List ten facts about {Name}.",
    "Explain the difference between {word} and {more}.",
    "Write a story with the words {word}, {more} and {Name}.",
    "Write a dialogue between {Name} and {Other} about {word}.",
    "Write a product description for a {word} made by {Name}.",
    "Write a review of {Name} for people who like {word}.",
    "Write a travel guide for {Name}.",
    "Write a recipe with {word} and {more}.",
    "Write a formal letter to {Name} about the {word}.",
    "Write a press release: {Name} buys {Other} to improve its {word}.",
    "Make a CSV file with 8 lines about {word}: name, year, place, price.",
    "Make a Markdown table of five kinds of {word} with their advantages.",
    "Write a YAML configuration for a service called {word}-{more}.",
    "Write a JSON object that describes {Name}, with nested fields.",
    "Write ten lines of a log file of a program called {word}.",
    "Write a Python class called {Name} with a method {word}.",
    "Write a Python function that counts each {word} in a list of {more} records.",
    "Write a SQL query that finds every {word} of customer {Name}.",
    "Write an HTML page about {Name} and {word}.",
    "Write a poem about {word} and {more}.",
    "Write a quiz of five questions about {Name}, with answers.",
    "Which came first, {Name} or {Other}? Explain.",
    "Who invented the {word}, and how was it used?",
    "Give a short biography of {Name} {Other}.",
    "What are the causes and effects of {word}?",
    "Write a scientific abstract about the effect of {word} on {more}.",
    "Translate into German: The {word} of {Name} was more important than the {more}.",
    "Correct this sentence: the {word} in {Name} were {more} because it have been late",
    "Sort these words and explain each: {more}, {word}, {Name}, {Other}",
)

COUNTRIES = (
    "France", "Peru", "Kenya", "Japan", "Canada", "Egypt", "Norway", "Brazil", "Vietnam", "Greece", "Mexico", "Turkey",
)  # fmt: skip
TOPICS = (
    "photosynthesis", "the printing press", "black holes", "vaccines", "the Roman Empire", "inflation", "volcanoes",
    "machine learning", "the French Revolution", "glaciers", "the human heart", "electric cars", "honey bees",
    "the water cycle", "the stock market", "chess", "coffee", "bridges", "the periodic table", "sleep", "tides",
)  # fmt: skip
QUESTION = (
    "What is the capital of {country}, and what is it known for?",
    "What languages are spoken in {country}?",
    "When did {country} become the country it is today?",
    "Who discovered or invented the most in the field of {topic}?",
    "How does {topic} work?",
    "Why is {topic} important? Give three reasons.",
    "What are common misconceptions about {topic}?",
    "Write a blog post about {topic}.",
    "Write a short story about {topic} in {country}.",
    "Imagine you are a teacher from {country}. Explain {topic} to a child.",
    "Write a poem about {topic} with a refrain.",
    "Give step by step instructions for teaching {topic} in one week.",
    "Compare {topic} and {other}.",
    "Make a table that compares {topic} and {other} in four aspects.",
    "What would happen without {topic}?",
)

GERMAN = (
    ("Der alte Lehrer", "Meine Schwester", "Die Stadt", "Das kleine Museum", "Unser Nachbar", "Die Regierung",
     "Ein junger Arzt", "Die Firma", "Der Zug nach Berlin", "Das Orchester", "Die Polizei in Hamburg",
     "Der Sprecher des Ministeriums", "Eine Gruppe von Studenten", "Der Trainer der Mannschaft", "Die Bürgermeisterin",
     "Ein Forscher der Universität Leipzig", "Die Europäische Kommission", "Der Verein", "Das Gericht", "Frau Neumann"),
    ("hat gestern", "wird morgen", "hat im letzten Jahr", "will heute Abend", "hat nach langer Zeit",
     "soll bis zum Sommer", "hat nach eigenen Angaben", "konnte am Montag", "wird in den nächsten Wochen",
     "hat trotz der Kritik", "musste wegen des Regens"),
    ("ein neues Haus", "einen langen Brief", "die alte Brücke", "ein schwieriges Problem", "viele Gäste",
     "den ganzen Bericht", "eine wichtige Entscheidung", "drei neue Mitarbeiter", "die Zahl der Unfälle",
     "das Spiel gegen Bremen", "einen Vertrag über vier Jahre", "die Ergebnisse der Wahl", "rund 200 Millionen Euro",
     "den Weg zum Bahnhof", "ein Angebot aus der Schweiz"),
    ("gefunden", "vorbereitet", "geschrieben", "besucht", "erklärt", "vergessen", "angekündigt", "verloren",
     "geprüft", "bezahlt", "verschoben", "vorgestellt", "gewonnen"),
    (".", ", obwohl das Wetter schlecht war.", ", weil niemand Zeit hatte.", ", bevor die Sonne unterging.",
     ", und alle waren zufrieden.", ", wie die Zeitung am Dienstag berichtete.", ", sagte er der Deutschen Presse.",
     ", aber die Kosten sind höher als erwartet.", ", um den Menschen in der Region zu helfen.",
     ", nachdem die Verhandlungen gescheitert waren.", "; mehr ist bisher nicht bekannt."),
)  # fmt: skip


@lru_cache(maxsize=1)
def functions() -> list[str]:
    """Functions of the Python standard library (PSF licence), 5 to 25 lines each."""
    found: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.end_lineno and 5 <= node.end_lineno - node.lineno < 25:
                found.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return found


@lru_cache(maxsize=1)
def documentation() -> list[str]:
    """Longer docstrings of the Python standard library (PSF licence)."""
    found: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        found += [text for node in nodes if len((text := ast.get_docstring(node) or "").split()) > 60]
    return found


def whole_words(vocabulary: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words of a tokenizer's vocabulary with a capital first letter, and those without any.

    They are names and nouns by the thousands: prompts about them reach tokens that a chat by itself never does.
    `vocabulary` are tokens as the tokenizer spells them, a word's first piece beginning with a space mark.
    """
    words = sorted({token[1:] for token in vocabulary if token[:1] in ("Ġ", "▁", " ")})
    words = [w for w in words if len(w) > 3 and w.isascii() and w.isalpha()]
    return [w for w in words if w.istitle()], [w for w in words if w.islower()]


def excerpt(rng: random.Random, passages: list[str], words: int) -> str:
    """Whole passages, the last one cut at a sentence, of at most `words` words together."""
    text: list[str] = []
    while len(text) < words and len(text) <= words * 3 // 4:
        text += [*rng.choice(passages).split(), "\n\n"]
    head = " ".join(text[:words]).strip()
    return head[: head.rfind(". ") + 1] or head


KINDS = {"passage": 0.3, "words": 0.34, "code": 0.12, "math": 0.08, "question": 0.08, "translation": 0.08}


def task(
    rng: random.Random, passages: list[str], words: int, vocabulary: tuple[list[str], list[str]]
) -> tuple[str, str]:
    """One task prompt and its kind. `passages` are texts to work on (the target's own, say), `words` their most;
    `vocabulary` as `whole_words` gives it."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "words" and min(map(len, vocabulary)) < 2:  # a tokenizer without word pieces
        kind = "question"
    if kind == "passage":
        form = rng.choice(PASSAGE)
        if not passages or rng.random() < 0.2:
            passages = documentation()
        words = rng.randint(words // 3, words)
        share = words // 2 if "{more}" in form else words
        return form.format(text=excerpt(rng, passages, share), more=excerpt(rng, passages, share)), kind
    if kind == "code":
        code = rng.choice(functions())
        node = ast.parse(code).body[0]
        doc = (ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None) or code.splitlines()[0]
        head = "\n".join(code.splitlines()[: max(2, len(code.splitlines()) // 3)])
        return rng.choice(CODE).format(code=code, head=head, doc=doc.split("\n\n")[0]), kind
    if kind == "math":
        a, b = rng.sample(NAMES, 2)
        x, y, z = rng.randint(12, 60), rng.randint(2, 9), rng.randint(2, 8)
        return rng.choice(MATH).format(a=a, b=b, t=rng.choice(THINGS), x=x, y=y, z=z, w=100 * rng.randint(4, 9)), kind
    if kind == "words":
        (name, other), (word, more) = (rng.sample(part, 2) for part in vocabulary)
        return rng.choice(WORDS).format(Name=name, Other=other, word=word, more=more), kind
    if kind == "question":
        topic, other = rng.sample(TOPICS, 2)
        return rng.choice(QUESTION).format(country=rng.choice(COUNTRIES), topic=topic, other=other), kind
    sentences = [" ".join(rng.choice(part) for part in GERMAN).replace(" ,", ",").replace(" .", ".")
                 for _ in range(rng.randint(1, 4))]  # fmt: skip
    return "Translate German to English: " + " ".join(sentences), kind
