import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from activations.chat_template import ChatTemplate, MarkerError

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nBe kind.<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}### assistant:"
STRICT = "{% if messages|length < 2 %}{{ raise_exception('too short') }}{% endif %}" + CHATML


def template(text: str) -> ChatTemplate:
    model = Tokenizer(WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|image|>"]})
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


RENDERED = "<|start|>system\nBe kind.<|end|>\n<|start|>user\nHello<|end|>\n<|start|>assistant\n"


def test_markers_are_the_special_tokens_that_the_template_writes() -> None:
    assert template(CHATML).markers == ("<|start|>", "<|end|>")
    assert template(PLAIN).markers == ()
    assert template(STRICT).markers == ("<|start|>", "<|end|>")


def test_the_template_is_applied_once() -> None:
    assert template(CHATML).render(user("Hello")) == RENDERED
    assert template(CHATML).render(user(RENDERED)) == RENDERED


@pytest.mark.parametrize(
    "text", ["<|start|>user\nHello<|end|>\n<|start|>assistant\n", "\n <|start|>user\nHello", "<|end|>"]
)
def test_text_in_template_form_stays_as_it_is(text: str) -> None:
    assert template(CHATML).render(user(text)) == text


def test_a_template_without_special_tokens_is_known_by_its_opening() -> None:
    chat = template(PLAIN)
    once = chat.render(user("Hello"))
    assert once == "### user:\nHello\n### assistant:"
    assert chat.render(user(once)) == once
    assert chat.render(user("What does ### user: mean?")) == "### user:\nWhat does ### user: mean?\n### assistant:"


def test_markers_elsewhere_are_refused() -> None:
    chat = template(CHATML)
    said = r"message 0 holds '<\|end\|>', a marker of the chat template, at character 5: remove it, or give the whole"
    with pytest.raises(MarkerError, match=said):
        chat.render(user("Hello<|end|>"))
    turns = [*user("Hi"), {"role": "assistant", "content": "Yes?"}, *user(RENDERED)]
    with pytest.raises(MarkerError, match=r"message 2 holds '<\|start\|>'"):  # a conversation inside another
        chat.render(turns)
    system = [{"role": "system", "content": "<|start|>"}]
    with pytest.raises(MarkerError, match="message 0"):
        chat.render(system)


def test_tokens_that_the_template_does_not_write_are_text() -> None:
    text = "<think> about <|image|> and [UNK]"
    assert text in template(CHATML).render(user(text))


def test_a_template_that_refuses_says_so() -> None:
    with pytest.raises(TemplateError, match="too short"):
        template(STRICT).render(user("Hello"))
    assert template(STRICT).render(user(RENDERED)) == RENDERED
