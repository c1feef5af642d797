import importlib
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

import activations.corpus
from activations.corpus import (
    FAMILIES,
    REPETITIONS,
    ROLES,
    SPLITS,
    Prompt,
    PromptError,
    Skipped,
    load_corpus,
    read_prompts,
    stream_prompts,
)

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


def test_a_thousand_prompts_over_all_families() -> None:
    counts = Counter(p.family for p in load_corpus())
    assert counts.total() == 1000
    assert set(counts) == set(FAMILIES) and len(FAMILIES) == 17
    assert min(counts.values()) >= 55 and max(counts.values()) <= 70


@pytest.mark.parametrize("split", SPLITS)
def test_repetition_mix(split: str) -> None:
    prompts = load_corpus(split)
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


def test_a_fifth_is_held_out_in_every_family() -> None:
    everything = load_corpus()
    validation = load_corpus("validation")
    assert everything == load_corpus("train") + validation
    assert len(validation) == 200
    total, held_out = (Counter(p.family for p in prompts) for prompts in (everything, validation))
    for family in FAMILIES:
        assert 0.12 <= held_out[family] / total[family] <= 0.28, family


def test_no_group_stands_on_both_sides_and_groups_are_small() -> None:
    groups = defaultdict(list)
    for prompt in load_corpus():
        groups[prompt.group].append(prompt)
    for group, prompts in groups.items():
        assert len({p.split for p in prompts}) == 1, group
        assert len(prompts) <= 4, group


def test_ids_and_contents_are_unique() -> None:
    prompts = load_corpus()
    assert len({p.id for p in prompts}) == len(prompts)
    assert all(re.fullmatch(rf"{p.family}-\d{{2,3}}", p.id) for p in prompts)
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


def disagreeing_runs(text: str, n: int = 5) -> list[tuple[str, ...]]:
    """Runs of n words of the text that go on with two or more different words."""
    words = re.findall(r"\w+", text.lower())
    following = defaultdict(set)
    for i in range(len(words) - n):
        following[tuple(words[i : i + n])].add(words[i + n])
    return [run for run, after in following.items() if len(after) > 1]


def test_what_a_disagreeing_run_is() -> None:
    assert disagreeing_runs("a b c d e f, a b c d e f") == []
    assert disagreeing_runs("a b c d e f, A b c d e g!") == [tuple("abcde")]
    assert disagreeing_runs("b c d e f, b c d e g") == []


def test_decoys_mislead_a_suffix_match() -> None:
    decoys = [p for p in load_corpus() if p.decoy]
    assert len(decoys) >= 100
    assert len({p.family for p in decoys}) == len(FAMILIES)
    for split in SPLITS:
        assert sum(p.split == split for p in decoys) >= 20
    for prompt in decoys:
        assert disagreeing_runs("\n".join(m["content"] for m in prompt.messages)), prompt.id


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/make_corpus.py, which lies beside the packages in a checkout, and in no wheel."""
    root = Path(activations.corpus.__file__).parents[1]
    if not (root / "benchmarks" / "make_corpus.py").is_file():
        pytest.skip("no checkout")
    monkeypatch.syspath_prepend(str(root))
    return importlib.import_module("benchmarks.make_corpus")


def test_the_corpus_is_what_its_material_gives(maker: ModuleType) -> None:
    made = maker.corpus()
    for split in SPLITS:
        file = Path(activations.corpus.__file__).parent / "prompts" / f"{split}.jsonl"
        assert file.read_text(encoding="utf-8") == maker.as_lines(made[split])


def test_text_of_a_benchmark_is_found(maker: ModuleType, tmp_path: Path) -> None:
    sentence = "The heron stood in the reeds at dawn, and nobody asked when it would leave again"
    words = sentence.split()
    bench = write(tmp_path, {"turns": ["Read this. " + sentence]})
    texts = {
        "same": " ".join(words[:13]),
        "punctuated": " ".join(words[:13]).replace(",", ";").upper(),
        "short": " ".join(words[:12]) + " he",
    }
    records = [{"id": id, "messages": [{"role": "user", "content": text}]} for id, text in texts.items()]
    assert maker.overlaps(records, [bench]) == ["same", "punctuated"]


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
        ({"body": "a"}, "has no 'messages', 'turns', 'prompt' or 'text': " + FORMATS),
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
        ({"id": "first", "prompt": "a"}, "mine.jsonl:1: ids are unique"),
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


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"prompt": "a"}\n{"prompt": "Käse"}\n'.encode("latin-1"))
    with pytest.raises(PromptError, match=r"latin\.jsonl:2: not UTF-8 text: save the file as UTF-8"):
        read_prompts(file)


def test_a_decoy_flag_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"mine.jsonl:1: 'decoy' is 'yes': use true or false"):
        read_prompts(write(tmp_path, {"messages": MESSAGES, "decoy": "yes"}))


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"mine.jsonl:1: 'prompt' holds half a surrogate pair at character 2"):
        read_prompts(write(tmp_path, '{"prompt": "ab\\ud83d"}'))


@pytest.mark.parametrize("line", ['{"prompt": ' + "[" * 100_000, '{"prompt": ' + "9" * 5000 + "}"])
def test_json_that_python_gives_up_on(tmp_path: Path, line: str) -> None:
    with pytest.raises(PromptError, match=r"mine.jsonl:1: not JSON"):
        read_prompts(write(tmp_path, line))


def test_text_is_a_key_too(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, {"text": "Once"}))[0].messages == ({"role": "user", "content": "Once"},)


# Long files, and files with bad documents


def test_a_broken_line_far_into_a_file_is_named_and_the_rest_kept(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"number {i}"}) for i in range(1, 72_001)]
    lines[69_999] = '{"prompt": "number 70000'
    file = write(tmp_path, *lines)
    with pytest.raises(PromptError, match=r"mine\.jsonl:70000: not JSON"):
        read_prompts(file)
    skipped = Skipped()
    prompts = read_prompts(file, skipped=skipped)
    assert len(prompts) == 71_999
    assert prompts[-1].messages[0]["content"] == "number 72000"
    assert (skipped.count, len(skipped.first)) == (1, 1)
    assert skipped.first[0].startswith(f"{file}:70000: not JSON")


def test_only_the_first_bad_lines_are_kept_but_all_are_counted(tmp_path: Path) -> None:
    skipped = Skipped()
    file = write(tmp_path, *["{"] * 30, {"prompt": "good"}, *["["] * 5)
    assert len(read_prompts(file, skipped=skipped)) == 1
    assert skipped.count == 35
    assert [m.split(": ")[0] for m in skipped.first] == [f"{file}:{i}" for i in range(1, 11)]


def test_nothing_usable_is_an_error_even_when_bad_lines_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"mine.jsonl: none of 2 prompts can be used; .*mine.jsonl:1: not JSON"):
        read_prompts(write(tmp_path, "{", "{"), skipped=Skipped())
    with pytest.raises(PromptError, match="holds no prompts"):  # bad ones elsewhere do not count here
        read_prompts(write(tmp_path, ""), skipped=Skipped(1, ["elsewhere"]))


def test_a_line_in_another_encoding_spoils_no_other(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' + '{"prompt": "Käse"}\n'.encode("latin-1") + '{"prompt": "Käse"}'.encode())
    skipped = Skipped()
    assert [p.messages[0]["content"] for p in read_prompts(file, skipped=skipped)] == ["a", "Käse"]
    assert skipped.first == [f"{file}:2: not UTF-8 text: save the file as UTF-8"]


def test_utf_16_is_named_and_no_line_of_it_skipped(tmp_path: Path) -> None:
    file = tmp_path / "wide.jsonl"
    file.write_text('{"prompt": "a"}\n', encoding="utf-16")
    with pytest.raises(PromptError, match=r"wide\.jsonl: is UTF-16 text: save the file as UTF-8"):
        read_prompts(file, skipped=Skipped())


@given(st.lists(st.integers(0, 90), min_size=1, max_size=8))
def test_lines_beyond_the_limit(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    """Each is named by its own number, and no part of it is taken for a line."""
    limit = 40
    lines = [json.dumps({"prompt": "x" * (1 + n)}) for n in lengths]
    file = write(tmp_path_factory.mktemp("long"), *lines)
    good = [i for i, line in enumerate(lines, start=1) if len(line) <= limit]
    bad = [i for i in range(1, len(lines) + 1) if i not in good]
    skipped = Skipped()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations.corpus, "DOCUMENT_LIMIT", limit)
        if not good:
            with pytest.raises(PromptError, match="none of"):
                read_prompts(file, skipped=skipped)
        else:
            prompts = read_prompts(file, skipped=skipped)
            assert [p.id for p in prompts] == [f"mine-{i}" for i in good]
    assert [m.split(": ")[0] for m in skipped.first] == [f"{file}:{i}" for i in bad]
    assert all("is longer than" in m for m in skipped.first)


def test_prompts_come_before_the_file_is_read_to_its_end(tmp_path: Path) -> None:
    stream = stream_prompts(write(tmp_path, {"prompt": "a"}, "broken"))
    assert next(stream).messages[0]["content"] == "a"
    with pytest.raises(PromptError, match=r"mine\.jsonl:2: not JSON"):
        next(stream)


def test_a_named_column(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"question": "Why?", "prompt": 3, "id": None},
        {"question": MESSAGES},
        {"question": ["One", "Two"]},
    )
    assert [p.messages[0]["content"] for p in read_prompts(file, column="question")] == ["Why?", "Hello", "One"]
    with pytest.raises(PromptError, match=r"mine.jsonl:1: has no 'answer', only 'question', 'prompt', 'id'"):
        read_prompts(file, column="answer")
    with pytest.raises(PromptError, match=r"mine.jsonl:1: 'prompt' is a number: a text is needed"):
        read_prompts(file, column="prompt")


# Folders of text files


def test_a_folder_of_text_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {
        "b.md": "# B\r\n", "a.txt": "\ufeffA", "sub/c.txt": "C", "sub/c.md": "D", ".git/x.txt": "no", "x.rst": "no",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(text.encode())
    found = read_prompts(tmp_path)
    assert [(p.id, p.messages[0]["content"]) for p in found] == [
        ("a.txt", "A"), ("b.md", "# B\n"), ("sub/c.md", "D"), ("sub/c.txt", "C"),
    ]  # fmt: skip
    assert all(p.group == p.id and p.family == "user" for p in found)
    assert [p.id for p in read_prompts(tmp_path / "b.md")] == ["b.md"]


def test_bad_text_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"K\xe4se")
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(PromptError, match=r"a\.txt: not UTF-8 text: save the file as UTF-8"):
        read_prompts(tmp_path)
    (tmp_path / "c.txt").write_text("fine")
    skipped = Skipped()
    assert [p.id for p in read_prompts(tmp_path, skipped=skipped)] == ["c.txt"]
    assert skipped.count == 2 and "b.txt: 'prompt' is empty" in skipped.first[1]


def test_folders_and_text_files_that_give_nothing(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"the folder holds no \.txt or \.md files: name another"):
        read_prompts(tmp_path)
    with pytest.raises(PromptError, match=r"text files have no column 'text': leave it out"):
        read_prompts(tmp_path, column="text")
    with pytest.raises(PromptError, match=r"nowhere\.txt: no such file"):
        read_prompts(tmp_path / "nowhere.txt")


def test_a_text_file_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations.corpus, "DOCUMENT_LIMIT", 4)
    (tmp_path / "a.txt").write_text("12345")
    with pytest.raises(PromptError, match=r"a\.txt: is larger than 0 MiB: split it"):
        read_prompts(tmp_path)


# Names of data sets


def rows_of(monkeypatch: pytest.MonkeyPatch, **splits: list[dict[str, object]]) -> list[tuple[object, ...]]:
    """`load_dataset` gives these rows; returns the list of its calls."""
    calls: list[tuple[object, ...]] = []

    def load(*args: object, streaming: bool) -> datasets.IterableDatasetDict:
        calls.append((*args, streaming))
        return datasets.IterableDatasetDict(
            {name: datasets.Dataset.from_list(rows).to_iterable_dataset() for name, rows in splits.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_a_data_set_is_streamed_from_its_train_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = rows_of(monkeypatch, test=[{"text": "no"}], train=[{"text": "a", "label": 1}, {"text": "b", "label": 2}])
    prompts = read_prompts("owner/name:main")
    assert calls == [("owner/name", "main", True)]
    assert [(p.id, p.messages[0]["content"]) for p in prompts] == [("name-1", "a"), ("name-2", "b")]


def test_messages_of_a_data_set_end_with_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    row: dict[str, object] = {
        "text": "x",
        "messages": [*MESSAGES, {"role": "assistant", "content": "Yes?", "name": "bot"}],
    }
    rows_of(monkeypatch, test=[row])
    assert [list(p.messages) for p in read_prompts("chats")] == [MESSAGES]


def test_a_column_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of(monkeypatch, train=[{"question": "Why?", "answer": "So."}, {"question": None, "answer": "So."}])
    skipped = Skipped()
    assert [p.messages[0]["content"] for p in read_prompts("qa", column="question", skipped=skipped)] == ["Why?"]
    assert skipped.first == ["qa:2: 'prompt' is null: a text is needed"]
    for column, said in ((None, "messages, turns, prompt, text"), ("query", "'query'")):
        with pytest.raises(PromptError, match=f"qa: no column {said}; it has question, answer: name the one"):
            read_prompts("qa", column=column, skipped=Skipped())


def test_a_data_set_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub.\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load)
    said = r"owner/name: no such file or folder, and no data set .* \(ConnectionError: Couldn't reach .* on the Hub\)"
    with pytest.raises(PromptError, match=said):
        read_prompts("owner/name")


@pytest.mark.parametrize("name", ["./name", "/no/where", "a/b/c", "name.jsonl", "owner/name.json", "two words"])
def test_what_is_no_name_of_a_data_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(PromptError, match=f"{name}: no such file"):
        read_prompts(name)
