"""Chat messages become the prompt that transformers makes of them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.text.tokenizers_of_tests import byte_level, sentencepiece, sentencepiece_backend
from triptych.errors import InvalidRequest, ModelError
from triptych.hub import resolve_model
from triptych.text.chat_template import ChatTemplate
from triptych.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

USER = {"role": "user", "content": "What is the capital of France?"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [
        USER,
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "  And of Japan? 日本 <b>&amp;</b>\n"},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "wétter", "parameters": {"b": [1, 2.5, None, True], "a": "<&>"}},
    }
]

# In the ways of templates in use: loops with controls, namespaces, tojson, filters, generation, trimmed blocks.
TEMPLATES = {
    "trimmed blocks": "{% for m in messages %}\n  {% if m.role %}\nU: {{ m.content }}\n  {% endif %}\n{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m['role'] }} {% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ unk_token }}{{ pad_token }}|{{ add_generation_prompt }}|{{ enable_thinking }}",
    "undefined": "{{ nothing }}{% if nothing is defined %}no{% endif %}{{ messages[0].nothing }}",
    "strings": "{{ (messages | map(attribute='content') | join(' ')).strip().split(' ')[0].title() }}",
}


def with_template(source: str) -> ChatTemplate:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": source}
    return ChatTemplate(Tokenizer(sentencepiece_backend(), config))


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("embedded"))


@pytest.mark.parametrize("messages", CHATS, ids=["user", "system", "turns"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_embedded_models_prompt_and_its_ids_are_those_of_transformers(
    messages: list[dict[str, Any]], add_generation_prompt: bool, oracle: PreTrainedTokenizerBase
) -> None:
    prompt = ChatTemplate(byte_level()).render(messages, add_generation_prompt=add_generation_prompt)
    assert prompt == oracle.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    ids = oracle.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert byte_level().encode(prompt, add_special_tokens=False) == ids


@pytest.mark.parametrize("messages", CHATS, ids=["user", "system", "turns"])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_in_transformers(source: str, messages: list[dict[str, Any]]) -> None:
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece_backend(),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=source,
    )
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": True, "enable_thinking": False}
    assert with_template(source).render(messages, **options) == oracle.apply_chat_template(
        messages, tokenize=False, **options
    )


def test_a_template_may_ask_for_the_date() -> None:
    before = datetime.date.today().isoformat()
    rendered = with_template("{{ strftime_now('%Y-%m-%d') }}").render([])
    assert before <= rendered <= datetime.date.today().isoformat()


@pytest.mark.parametrize(
    ("source", "messages", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", [USER], "roles must alternate"),
        ("{{ messages[0].content + 1 }}", [USER], "can only concatenate str"),
        ("{{ messages[0].content.no.such }}", [USER], "has no attribute 'no'"),
        ("{{ messages[3].content }}", [USER], "has no element 3"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", [USER], "recursion"),
        ("{{ messages.append(1) }}", [USER], "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", [USER], "unsafe"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source: str, messages: Sequence[Any], why: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"messages: the model's chat template refused them: .*({why})"
    ) as error:
        with_template(source).render(messages)
    assert error.value.violations[0].field == "messages"


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(
        InvalidRequest, match="messages: this model has no chat template; send a plain prompt instead"
    ):
        ChatTemplate(sentencepiece()).render([USER])


def test_a_broken_template_stops_the_start_and_names_its_line() -> None:
    with pytest.raises(ModelError, match="chat_template: line 2: "):
        with_template("fine\n{% if %}")


def test_messages_are_left_as_they_were() -> None:
    messages = [dict(USER)]
    with pytest.raises(InvalidRequest):
        with_template("{% set x = messages[0].update({'content': 1}) %}{{ x }}").render(messages)
    assert messages == [USER]


@pytest.mark.parametrize("content", ["Par", "  Par \n", "Pa r\u00e9"])
@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]\n{% endfor %}",
    ],
)
def test_the_last_message_is_continued(source: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    theirs = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_backend(), chat_template=source)
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    ours = with_template(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == expected


def test_a_message_that_is_not_shown_cannot_be_continued() -> None:
    template = with_template("{{ messages[0].content }}")
    messages = [USER, {"role": "assistant", "content": "Par"}]
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template.render(messages, continue_final_message=True)


def test_documents_are_shown() -> None:
    documents = [{"title": "a", "text": "b"}]
    assert with_template("{{ documents | tojson }}").render([USER], documents=documents) == (
        '[{"title": "a", "text": "b"}]'
    )


def test_a_template_is_chosen_by_name_and_by_tools_as_in_transformers() -> None:
    named = {"default": "plain {{ messages[0].content }}", "tool_use": "tools", "rag": "rag {{ documents }}"}
    config = {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}
    ours = ChatTemplate(Tokenizer(sentencepiece_backend(), config))
    theirs = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_backend(), chat_template=named)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for arguments in (
        {},
        {"tools": tools},
        {"chat_template": "rag"},
        {"chat_template": "rag", "tools": tools},
    ):
        expected = theirs.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **arguments)
        assert ours.render([USER], **arguments) == expected
    with pytest.raises(InvalidRequest, match=r"no chat template 'rog', only default, rag, tool_use"):
        ours.render([USER], chat_template="rog")
    with pytest.raises(InvalidRequest, match="must be the name of one"):
        ours.render([USER], chat_template=[])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        ours.render([USER], chat_template="x" * 1_000_000)
    assert len(str(caught.value)) < 1000


def test_templates_in_files_of_their_own_come_first(tmp_path: Path) -> None:
    sentencepiece_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    template = ChatTemplate(Tokenizer.from_directory(tmp_path))
    assert (template.render([USER]), template.render([USER], chat_template="rag")) == ("new", "rag")
