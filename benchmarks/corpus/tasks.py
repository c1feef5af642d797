"""Tasks over the texts in this folder: articles, code, letters, songs, short texts in other languages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from benchmarks.corpus.made import FOLDER, HEAVY, LIGHT, MEDIUM, Made, sections

QUOTE = (
    (HEAVY, "Copy this text, with every sentence on a line of its own."),
    (LIGHT, "Quote the oddest detail, but no more than five words."),
    (MEDIUM, "Quote two sentences that contain a number, and nothing else."),
    (LIGHT, "Which sentence would you cut? Give its beginning and a reason."),
    (HEAVY, "Repeat the whole text exactly, but leave out its last sentence."),
    (LIGHT, "Answer with a short quotation: what is unusual here?"),
    (MEDIUM, "Give back the first and the last sentence, exactly as they are."),
    (LIGHT, "Invent a question to which the third sentence would be the answer."),
    (MEDIUM, "Quote the sentence that surprised you most and explain in one line why."),
    (LIGHT, "Does the author make fun of anybody? Quote a word or two."),
)
SUMMARISE = (
    (LIGHT, "Summarise in two sentences."),
    (MEDIUM, "Sum it up in three sentences, the last one a quotation."),
    (LIGHT, "Write a headline and a subtitle for this text."),
    (LIGHT, "Tell a child of ten what this is about."),
    (MEDIUM, "List four facts, each in the words of the text."),
    (LIGHT, "Make a summary that mentions no numbers."),
    (LIGHT, "In at most fifteen words, what is the point?"),
    (MEDIUM, "Summarise in bullet points and support each point with a quoted phrase."),
    (LIGHT, "Announce this on the radio in two or three sentences."),
    (HEAVY, "Shorten the text by two sentences and leave the others untouched."),
    (LIGHT, "What would a travel guide make of it? Two sentences."),
    (LIGHT, "Summarise the text as a telegram."),
    (MEDIUM, "Copy the three most important sentences and add one of yours."),
)
RAG = (
    (LIGHT, "Use the text to answer the question.\n\n{text}\n\nQuestion: {q}"),
    (LIGHT, "{text}\n\n{q} Answer from the text, in one sentence."),
    (MEDIUM, "Passage: {text}\n\n{q} First quote the sentence that tells it, then answer."),
    (LIGHT, "Context ({title}): {text}\n\nQuestion: {q}"),
    (LIGHT, "{q}\n\nYou may use only this source:\n\n{text}"),
    (LIGHT, "Read this and reply briefly.\n\n{text}\n\nA visitor asks: {q}"),
    (HEAVY, "{text}\n\nQuestion: {q}\nReturn the passage with the words that answer the question in **bold**."),
    (LIGHT, "Source: {text}\n\n{q} Say also how sure the source lets you be."),
    (MEDIUM, "Text: {text}\n\nQuestions: {q} {q2} Repeat each question before its answer."),
)
OTHER = (
    ("list", LIGHT, "List the things one could see or hear there.\n\n{text}"),
    ("translation", LIGHT, "Translate the first two sentences to French.\n\n{text}"),
    ("table", LIGHT, "Make a table of the numbers here and their meanings.\n\n{text}"),
    ("poem", LIGHT, "Turn this report into a poem of eight lines.\n\n{text}"),
    ("list", MEDIUM, "List the facts of this text, close to its wording.\n\n{text}"),
    ("translation", LIGHT, "Translate the last two sentences to German.\n\n{text}"),
    ("table", LIGHT, "Make a table with the columns Who, What and When.\n\n{text}"),
)  # every fourth article or so becomes a chat instead
CHAT = (
    (HEAVY, "Tell me something about {title}.", "Please say that again without the last sentence."),
    (LIGHT, "I know nothing about {title}. Do you?", "Would it make a good subject for a school essay?"),
    (MEDIUM, "Read me your note on {title}.", "Which sentences had numbers in them? Repeat those."),
    (LIGHT, "Have you got a text about {title}?", "Thanks. What would be a fitting picture for it?"),
    (HEAVY, "What does the leaflet say about {title}?", "Once more, please, with each sentence on a new line."),
    (LIGHT, "Any news about {title}?", "And what do you think they should do next?"),
    (MEDIUM, "Give me the story of {title}.", "Repeat the first two sentences, they were too fast for me."),
)


def articles() -> Iterator[Made]:
    """Four prompts of each article."""
    chats, others = cycle(CHAT), cycle(OTHER)
    for i, (title, body) in enumerate(sections("articles.txt")):
        text, *questions = body.split("\n? ")
        group = f"article-{i + 1:02}"
        repetition, task = QUOTE[i % len(QUOTE)]
        yield Made("quote", repetition, group, (f"{task}\n\n{text}" if i % 3 else f"{text}\n\n{task}",))
        repetition, task = SUMMARISE[i % len(SUMMARISE)]
        yield Made("summarise-quotes", repetition, group, (f"{task}\n\n{text}" if i % 2 else f"{text}\n\n{task}",))
        repetition, frame = RAG[i % len(RAG)]
        filled = frame.format(text=text, title=title, q=questions[i % 2], q2=questions[1 - i % 2])
        yield Made("rag", repetition, group, (filled,))
        if i % 4 == 3:
            repetition, asked, again = next(chats)
            subject = title[0].lower() + title[1:] if title.startswith(("The ", "A ", "How ")) else title
            yield Made("chat", repetition, group, (asked.format(title=subject), text, again))
        else:
            family, repetition, frame = next(others)
            yield Made(family, repetition, group, (frame.format(text=text),))


RENAME = (
    (HEAVY, "Rename `{old}` to `{new}` and print the whole code."),
    (LIGHT, "Suggest a better name than `{old}` and say what speaks for it."),
    (MEDIUM, "Comment each step that is not obvious; change nothing else."),
    (LIGHT, "Explain in three sentences what this code does."),
    (HEAVY, "`{old}` should be called `{new}`. Show the complete code after the change."),
    (LIGHT, "Which two changes would make this easier to read?"),
    (MEDIUM, "Simplify this code where you can, but keep its behaviour."),
    (HEAVY, "Give me the same code with `{new}` instead of `{old}`, and no explanation."),
)
COMPLETE = (
    (LIGHT, "The end of this code is lost. What did it do?"),
    (MEDIUM, "Complete this code."),
    (LIGHT, "This breaks off. Write only what is missing."),
    (LIGHT, "Continue from here, and keep it short."),
    (MEDIUM, "Finish this code and print all of it."),
    (LIGHT, "How would you go on? First in words, then in code."),
    (HEAVY, "Print this with a comment above every line, then finish it."),
)
TESTS = (
    (LIGHT, "Write one test for this case: {case}."),
    (LIGHT, "Without code: what should this do in the case of {case}?"),
    (MEDIUM, "Write four tests, each under a comment with its purpose."),
    (LIGHT, "Which inputs would you try by hand before you trust this code?"),
    (LIGHT, "Which result of this could surprise? Look for instance at {case}."),
    (HEAVY, "Print the code again and add tests below it."),
    (LIGHT, "List five test cases in words; one of them is {case}."),
    (MEDIUM, "Write tests for the normal case and for {case}."),
)


def code() -> Iterator[Made]:
    """Three prompts of each piece of code, and a chat about some."""
    for i, (heading, body) in enumerate(sections("code.txt")):
        name, language, names = (part.strip() for part in heading.split("|"))
        old, new = names.split(">")
        text, _, case = body.rpartition("\n? ")
        group = f"code-{name.replace(' ', '-')}"
        block = f"```{language}\n{text}\n```"
        lines = text.split("\n")
        head = f"```{language}\n" + "\n".join(lines[: max(2, len(lines) * 3 // 5)])
        repetition, task = RENAME[i % len(RENAME)]
        yield Made("code-rename", repetition, group, (f"{task.format(old=old, new=new)}\n\n{block}",))
        repetition, task = TESTS[i % len(TESTS)]
        yield Made("unit-tests", repetition, group, (f"{task.format(case=case)}\n\n{block}",))
        if i % 6 == 5:
            asked = (f"I need a piece of {language} for this: {name}.", block, f"Say `{new}` where you wrote `{old}`.")
            yield Made("chat", HEAVY, group, asked)
        else:
            repetition, task = COMPLETE[i % len(COMPLETE)]
            yield Made("code-completion", repetition, group, (f"{task}\n\n{head}",))


LETTERS = (
    (LIGHT, "Write a short and friendly answer."),
    (LIGHT, "Answer that we need two more days to decide."),
    (MEDIUM, "Answer point by point; repeat each point in a few words before you answer it."),
    (LIGHT, "Answer for somebody who has forgotten the matter and is embarrassed."),
    (HEAVY, "Forward this in full, with one line of your own above."),
    (LIGHT, "Say no politely, for a reason that is not too personal."),
    (LIGHT, "What does this letter ask? Answer the most urgent question."),
    (MEDIUM, "Confirm everything: dates, numbers and names, in full sentences."),
)


def letters() -> Iterator[Made]:
    """Two answers to each letter."""
    for i, (sender, text) in enumerate(sections("emails.txt")):
        for repetition, task in (LETTERS[i % len(LETTERS)], LETTERS[(i + 3) % len(LETTERS)]):
            yield Made("email-reply", repetition, f"letter-{sender.split()[1]}", (f"{task}\n\n{text}",))


def songs() -> Iterator[Made]:
    """Three prompts of each song; their answers repeat the chorus."""
    light = (
        "Who might be singing this, and at what time of day?",
        "Write a third verse for this song.",
        "What is funny about these verses? Explain it briefly.",
        "Set a new chorus of two lines under these verses.",
    )
    for i, (title, text) in enumerate(sections("songs.txt")):
        group = f"song-{title.split()[1]}"
        yield Made("poem", HEAVY, group, (f"Write this song out, with the chorus wherever it belongs.\n\n{text}",))
        yield Made("poem", LIGHT, group, (f"{light[i]}\n\n{text}",))
        if i % 2:
            yield Made("poem", MEDIUM, group, (f"Add one more verse and print it between two choruses.\n\n{text}",))


def foreign() -> Iterator[Made]:
    """Translations of the short texts."""
    light = (
        "Translate the text from {source} to {target}.",
        "What does this say in {target}? Translate freely, it should sound natural.",
        "Please put this into {target} for a notice board.",
    )
    more = (
        (LIGHT, "Which word of this {source} text is hardest to translate to {target}, and why?"),
        (HEAVY, "Copy each {source} sentence and write its {target} translation under it."),
        (LIGHT, "Translate to {target} and shorten it to half its length."),
        (MEDIUM, "Repeat the first {source} sentence, then translate all of it to {target}."),
    )
    for i, (heading, text) in enumerate(sections("foreign.txt")):
        source, target = (part.strip() for part in heading.split("|"))
        group = f"foreign-{i + 1:02}"
        chosen = ((LIGHT, light[i % len(light)]), *([more[i // 2 % len(more)]] if i % 2 else []))
        for repetition, task in chosen:
            filled = task.format(source=source, target=target)
            yield Made("translation", repetition, group, (f"{filled}\n\n{text}",))


def written() -> Iterator[Made]:
    """The prompts that stand alone."""
    family = repetition = ""
    for line in (FOLDER / "written.txt").read_text(encoding="utf-8").split("\n"):
        if line.startswith("# "):
            family, repetition = line[2:].split()
        elif line:
            yield Made(family, repetition, "", tuple(part.strip() for part in line.split("||")))
