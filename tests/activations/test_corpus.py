import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activations.corpus import FAMILIES, REPETITIONS, ROLES, SPLITS, Prompt, PromptError, load_corpus, read_prompts

NGRAM = 13
MESSAGES = [{"role": "user", "content": "Hello"}]


def word_ngrams(prompt: Prompt) -> set[tuple[str, ...]]:
    """Runs of 13 words in one message, punctuation and case left out."""
    grams: set[tuple[str, ...]] = set()
    for message in prompt.messages:
        words = re.findall(r"\w+", message["content"].lower())
        grams |= {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}
    return grams


def write(folder: Path, *lines: object) -> Path:
    file = folder / "mine.jsonl"
    file.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return file


# The embedded corpus


def test_every_family_has_fifteen_prompts() -> None:
    counts = Counter(p.family for p in load_corpus())
    assert set(counts) == set(FAMILIES) and len(FAMILIES) == 17
    assert min(counts.values()) >= 15


def test_repetition_mix() -> None:
    prompts = load_corpus()
    share = {k: n / len(prompts) for k, n in Counter(p.repetition for p in prompts).items()}
    assert share["heavy"] == pytest.approx(0.11, abs=0.015)
    assert share["medium"] == pytest.approx(0.12, abs=0.015)
    assert share["heavy"] + share["medium"] + share["light"] == pytest.approx(1)


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_holds_its_own_records_of_every_family_and_repetition(split: str) -> None:
    prompts = load_corpus(split)
    assert {p.split for p in prompts} == {split}
    assert {p.family for p in prompts} == set(FAMILIES)
    assert {p.repetition for p in prompts} == set(REPETITIONS)


def test_splits_are_a_quarter_and_the_rest_in_every_family() -> None:
    everything = load_corpus()
    validation = load_corpus("validation")
    assert everything == load_corpus("train") + validation
    assert len(validation) / len(everything) == pytest.approx(0.25, abs=0.03)
    total, held_out = (Counter(p.family for p in prompts) for prompts in (everything, validation))
    for family in FAMILIES:
        assert 0.15 <= held_out[family] / total[family] <= 0.35, family


def test_no_group_stands_on_both_sides_and_groups_are_small() -> None:
    groups = defaultdict(list)
    for prompt in load_corpus():
        groups[prompt.group].append(prompt)
    for group, prompts in groups.items():
        assert len({p.split for p in prompts}) == 1, group
        assert len({p.family for p in prompts}) == 1, group
        assert len(prompts) <= 3, group


def test_ids_and_contents_are_unique() -> None:
    prompts = load_corpus()
    assert len({p.id for p in prompts}) == len(prompts)
    assert all(re.fullmatch(rf"{p.family}-\d\d", p.id) for p in prompts)
    contents = [" ".join(m["content"].lower() for m in p.messages) for p in prompts]
    assert len(set(contents)) == len(contents)


def test_no_thirteen_words_in_a_row_are_in_two_groups() -> None:
    """Which covers train against validation."""
    owner: dict[tuple[str, ...], str] = {}
    for prompt in load_corpus():
        for gram in word_ngrams(prompt):
            assert owner.setdefault(gram, prompt.group) == prompt.group, " ".join(gram)


def test_messages_alternate_and_fit_a_small_context() -> None:
    for prompt in load_corpus():
        assert [m["role"] for m in prompt.messages] == ["user", "assistant"] * (len(prompt.messages) // 2) + ["user"]
        for message in prompt.messages:
            assert message["content"] == message["content"].strip("\n"), prompt.id
        assert sum(len(m["content"]) for m in prompt.messages) < 2500, prompt.id
    assert all(len(p.messages) >= 3 for p in load_corpus() if p.family == "chat")


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match=r"unknown split 'test': choose one of train, validation, or None"):
        load_corpus("test")


# Files that users bring


def test_reads_all_three_formats_in_one_file(tmp_path: Path) -> None:
    full = {"id": "a-01", "family": "qa", "group": "g", "split": "train", "repetition": "light", "messages": MESSAGES}
    spec = {"question_id": 81, "category": "writing", "turns": ["First", "Second"], "reference": ["x"]}
    file = write(tmp_path, full, "", spec, {"prompt": "Plain"}, {"messages": MESSAGES}, {"id": 7, "prompt": "Numbered"})
    assert read_prompts(file) == [
        Prompt("a-01", "qa", "g", "train", "light", ({"role": "user", "content": "Hello"},)),
        Prompt("81", "writing", "81", None, None, ({"role": "user", "content": "First"},)),
        Prompt("mine-4", "user", "mine-4", None, None, ({"role": "user", "content": "Plain"},)),
        Prompt("mine-5", "user", "mine-5", None, None, ({"role": "user", "content": "Hello"},)),
        Prompt("7", "user", "7", None, None, ({"role": "user", "content": "Numbered"},)),
    ]


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [p.messages[0]["content"] for p in read_prompts(file)] == ["a", "b"]


texts = st.text().filter(lambda t: t.strip() != "")
conversations = st.tuples(
    st.lists(st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": texts}), max_size=3),
    st.fixed_dictionaries({"role": st.just("user"), "content": texts}),
).map(lambda parts: [*parts[0], parts[1]])


@given(st.lists(conversations, min_size=1, max_size=4))
def test_any_conversation_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, given: list[list[dict[str, str]]]
) -> None:
    """Line separators inside texts (U+2028, U+0085, form feed) included."""
    file = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    lines = [json.dumps({"messages": messages}, ensure_ascii=True) for messages in given]
    file.write_text("\n".join(lines), encoding="utf-8")
    assert [list(p.messages) for p in read_prompts(file)] == given


def test_unescaped_line_separators_do_not_end_a_record(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    file = write(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False))
    assert read_prompts(file)[0].messages[0]["content"] == text


FORMATS = "write {"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": "a"', "not JSON (Expecting ',' delimiter at column 15): " + FORMATS),
        ("[1, 2]", "a JSON object is needed, not a list: " + FORMATS),
        ("null", "a JSON object is needed, not null: " + FORMATS),
        ({"text": "a"}, "has no 'messages', 'turns' or 'prompt': " + FORMATS),
        ({"prompt": "a", "turns": ["b"]}, "has 'turns' and 'prompt': " + FORMATS),
        ({"prompt": " \n"}, "'prompt' is empty: write a prompt, or remove the line"),
        ({"prompt": 3}, "'prompt' is a number: a text is needed"),
        ({"turns": []}, "'turns' is an empty list: a list with at least one text is needed"),
        ({"turns": "a"}, "'turns' is a text: a list with at least one text is needed"),
        ({"turns": [""]}, "the first of 'turns' is empty"),
        ({"turns": ["a"], "category": ""}, "'category' is '': a text that is not empty is needed"),
        ({"messages": []}, "'messages' is an empty list: a list with at least one message is needed"),
        ({"messages": None}, "'messages' is null: a list with at least one message is needed"),
        ({"messages": ["a"]}, "messages[0] must be an object with 'role' and 'content'"),
        ({"messages": [{"role": "user"}]}, "messages[0] must be an object with 'role' and 'content'"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "role 'bot': use one of system, user, assistant"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "a"}]}, "last message has role 'assistant'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0] is a list: a text is needed"),
        ({"messages": MESSAGES, "split": "test"}, "'split' is 'test': use one of train, validation, or leave it out"),
        ({"messages": MESSAGES, "repetition": "none"}, "'repetition' is 'none': use one of heavy, medium, light"),
        ({"messages": MESSAGES, "group": 3}, "'group' is 3: a text that is not empty is needed"),
        ({"messages": MESSAGES, "id": [1]}, "'id' is [1]: a text or a whole number is needed"),
        ({"question_id": None, "turns": ["a"]}, "'question_id' is None: a text or a whole number is needed"),
        ({"id": "first", "prompt": "a"}, "id 'first' is already that of line 1: ids are unique"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: object, text: str) -> None:
    file = write(tmp_path, {"id": "first", "prompt": "fine"}, "", line)
    with pytest.raises(PromptError) as error:
        read_prompts(file)
    assert str(error.value).startswith(f"{file}:3: ")
    assert text in str(error.value)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nowhere\.jsonl: no such file"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(PromptError, match=r"mine\.jsonl: holds no prompts: write"):
        read_prompts(write(tmp_path, "", " "))
    with pytest.raises(PromptError, match="cannot be read: Is a directory"):
        read_prompts(tmp_path)


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"prompt": "a"}\n{"prompt": "Käse"}\n'.encode("latin-1"))
    with pytest.raises(PromptError, match=r"latin\.jsonl:2: not UTF-8 text: save the file as UTF-8"):
        read_prompts(file)
