"""Conversations: exactly the assistant's answers are trained on, or the row is refused with the reason."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ropecli.data import conversations
from ropecli.data.conversations import Conversation, tokenize_conversations
from ropecli.errors import DataError
from ropecli.evaluation.prompt_pieces import find_frame

# In the shape of released templates. Qwen 2.5: with a default system prompt
CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Without a generation prompt; the system prompt is in the first question; roles alternate
MISTRAL = """\
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == 'user') != loop.index is odd %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if message.role == 'user' %}
        {%- set before = messages[0].content + '\\n\\n' if loop.first and messages[0].role == 'system' else '' %}
        {{- '[INST] ' + before + message.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
# A text ends with eos, an answer before it; special tokens take the white space after them
PHI = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}"""
# Qwen 3: only the last answer keeps its reasoning
THINKING = """\
{%- for message in messages %}
    {%- set reasoning = '<think>\\n</think>\\n' if message.role == 'assistant' and loop.last else '' %}
    {{- '<|im_start|>' + message.role + '\\n' + reasoning + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

IM = ("<|im_start|>", "<|im_end|>")
# template, special tokens, what is before and after an answer that is trained on, and options of the tokenizer
SHAPES = {
    "chatml": (CHATML, IM, "", "<|im_end|>", {}),
    "mistral": (MISTRAL, ("<bos>", "<eos>", "[INST]", "[/INST]"), " ", "<eos>", {"sentencepiece": True}),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "", "<end_of_turn>", {"sentencepiece": True}),
    "phi": (PHI, ("<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "", "<|end|>", {"rstrip": True}),
    "marked": (MARKED, IM, "", "<|im_end|>", {}),
}
shapes = pytest.mark.parametrize("shape", SHAPES)

QUESTIONS = ("Where is the key?", "And the 🦜?\nassistant\n", "Danke.")
ANSWERS = ("It is under the mat.\n\nI think so.", "Grüße, 🦜: no idea")


@pytest.fixture(scope="module")
def tokenizer_of():
    """tokenizer_of(template, special tokens, ...) -> a BPE tokenizer, of bytes or like SentencePiece's."""

    def make(template, special, *, sentencepiece=False, rstrip=False):
        bpe = Tokenizer(models.BPE(byte_fallback=sentencepiece))
        if sentencepiece:
            bpe.normalizer = normalizers.Replace(" ", "▁")
            parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            bpe.decoder = decoders.Sequence(parts)
            own = [f"<0x{byte:02X}>" for byte in range(256)]
        else:
            words = pre_tokenizers.Split(Regex(r" ?\w+|\s*\n+|\s+|\W"), "isolated")  # as Qwen's: line breaks join
            bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            bpe.pre_tokenizer = pre_tokenizers.Sequence([words, bytewise])
            bpe.decoder = decoders.ByteLevel()
            own = []
        alphabet = [] if sentencepiece else pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=alphabet, special_tokens=own, show_progress=False
        )
        texts = [*QUESTIONS, *ANSWERS, " It", "user\nassistant\n\nsystem\nmodel\n"]
        bpe.train_from_iterator([text.replace("🦜", "") for text in texts] * 4, trainer)
        bpe.add_special_tokens([AddedToken(token, special=True, rstrip=rstrip, normalized=False) for token in special])
        names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos") if f"<{name}>" in special}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **names)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture(scope="module")
def tokenizers(tokenizer_of):
    return {name: tokenizer_of(shape[0], shape[1], **shape[4]) for name, shape in SHAPES.items()}


def turns(*contents, system=None):
    """A conversation of alternating questions and answers."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def trained(tokenizer, messages, **fields):
    """The texts of the runs of trained tokens."""
    (document,) = tokenize_conversations([("row", Conversation(messages, **fields))], tokenizer)
    ids, mask = document.ids, document.trained
    if not fields:
        assert ids.tolist() == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    borders = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [tokenizer.decode(ids[start:stop]) for start, stop in borders.reshape(-1, 2)]


@shapes
def test_the_answers_and_their_end_markers_are_trained_on(tokenizers, shape):
    tokenizer, (_, _, before, after, _) = tokenizers[shape], SHAPES[shape]
    contents = [QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1]]
    for more in ((), QUESTIONS[2:]):
        for system in (None,) if shape == "gemma" else (None, "Be brief."):
            messages = turns(*contents, *more, system=system)
            assert trained(tokenizer, messages) == [f"{before}{answer}{after}" for answer in ANSWERS]
    assert trained(tokenizer, turns(QUESTIONS[0], "")) == [f"{before}{after}"]
    (document,) = tokenize_conversations([("row", Conversation(turns(*QUESTIONS)))], tokenizer, "all")
    expected = tokenizer.apply_chat_template(turns(*QUESTIONS), tokenize=True, return_dict=False)
    assert document.ids.tolist() == expected


NUMBERED = CHATML.replace("message.role +", "message.role ~ loop.index ~").replace(
    "assistant\\n'", "assistant' ~ (messages | length + 1) ~ '\\n'"
)


@pytest.mark.parametrize(("template", "renders_all"), [(CHATML, False), (NUMBERED, True)], ids=["plain", "numbered"])
def test_a_long_conversation_takes_linear_time_unless_the_template_needs_all_of_it(
    tokenizer_of, monkeypatch, template, renders_all
):
    tokenizer, messages = tokenizer_of(template, IM), turns(*(f"text {number}" for number in range(200)))
    render, rendered = tokenizer.apply_chat_template, []

    def count(part, **options):
        rendered.append(len(part))
        return render(part, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", count)
    (document,) = tokenize_conversations([("row", Conversation(messages))], tokenizer)
    assert (sum(rendered) > 20_000) == renders_all
    answers = tokenizer.decode(document.ids[document.trained])
    assert answers == "".join(f"{message['content']}<|im_end|>" for message in messages[1::2])


def test_roles_parts_and_fields_of_other_formats(tokenizers):
    tokenizer, expected = tokenizers["chatml"], turns("Where?", "Here.", system="Be brief.")
    parts = [{"type": "text", "text": "Whe", "cache": None}, {"type": "text", "text": "re?"}]
    others = [
        Conversation(
            [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Where?"},
                {"from": "gpt", "value": "Here."},
            ]
        ),
        Conversation(
            [{"role": "user", "content": parts}, {"role": "assistant", "content": "Here.", "tool_calls": None}],
            system="Be brief.",
        ),
    ]
    rows = [("row", conversation) for conversation in (Conversation(expected), *others)]
    same, *converted = tokenize_conversations(rows, tokenizer)
    for document in converted:
        np.testing.assert_array_equal(document.ids, same.ids)
        np.testing.assert_array_equal(document.trained, same.trained)


def test_tools_and_calls_reach_the_template(tokenizers, tokenizer_of):
    template = "{{ tools | tojson }}" + CHATML.replace(
        "message.content", "(message.content or message.tool_calls | tojson)"
    )
    tokenizer = tokenizer_of(template, IM)
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": None}]}
    messages = [*turns("Where?"), call, {"role": "tool", "content": "mat"}, *turns("Where?", "Here.")[1:]]
    for given in (tools, json.dumps(tools)):
        assert trained(tokenizer, messages, tools=given) == ['[{"name": "look"}]<|im_end|>', "Here.<|im_end|>"]


REFUSED = {
    "a template that drops the reasoning of earlier answers": (
        THINKING, turns(*QUESTIONS[:2], *ANSWERS), "renders message 1 differently if others follow"
    ),
    "a template that ignores add_generation_prompt": (
        CHATML.replace("if add_generation_prompt", "if false"), turns("Where?", "Here."), "ignores add_gener"
    ),
    "a generation prompt with more than an answer starts with": (
        CHATML.replace("assistant\\n'", "assistant\\n<think>'"), turns("Where?", "Here."), "message 1 does not start"
    ),
    "a token on the border": (
        CHATML.replace("\\n'", " '"),
        turns("Where?", "It is."), r"token ' It' belongs to both the answer and the prompt",
    ),
    "a template that leaves out the system prompt": (
        "{% set messages = messages[1:] %}" + CHATML, turns("Where?", "Here.", system="Brief."), "leaves out message 0"
    ),
    "a template that fails": (GEMMA, turns("Where?", "Here.", system="No"), "System role not supported"),
    "an answer without a question": (CHATML, turns("Where?", "Here.")[1:], "message 0 is the assistant's"),
    "an unknown role": (CHATML, [{"role": "bot", "content": "Here."}], "message 0 has the role 'bot'; expected system"),
    "a number": (CHATML, [{"role": "user", "content": 3}], "message 0 has the content 3; expected text"),
    "a picture": (CHATML, [{"role": "user", "content": [{"type": "image"}]}], "message 0 has the content .*image"),
    "no message": (CHATML, [], "the conversation is empty"),
    "strings": (CHATML, ["Where?"], r"message 0 is 'Where\?'; expected a role and a content"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_masked_exactly_is_refused_with_the_reason(tokenizer_of, template, messages, reason):
    rows = [("row 1", Conversation(messages)), ("row 2", Conversation([]))]
    with pytest.raises(DataError, match=rf"row 1: .*{reason}.* 2 rows"):
        list(tokenize_conversations(rows, tokenizer_of(template, IM)))


@pytest.mark.parametrize(
    "render",
    [
        lambda tokenizer: list(tokenize_conversations([("row", Conversation(turns("Where?")))], tokenizer, "all")),
        lambda tokenizer: find_frame(tokenizer, "auto"),
    ],
    ids=["conversations", "frame"],
)
@pytest.mark.parametrize("slow", [False, True])
def test_a_slow_template_gives_a_warning(tokenizer_of, monkeypatch, caplog, render, slow):
    loop = ""
    if slow:
        monkeypatch.setattr(conversations, "_PATIENCE", 0.0)
        loop = "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    render(tokenizer_of(loop + CHATML, IM))
    assert ("may never end" in caplog.text) == slow


RELEASED = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseekv3": None,
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "llama3_1": "<|eot_id|>",
    "phi3": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_released_templates(environment, tokenizer_of, name):
    """The templates that TRL collects. DeepSeek's and Qwen 3's are refused; TRL's versions with markers are not."""
    folder = environment("trl", ["trl==1.16.0"], "--no-deps").parents[1]
    (path,) = folder.rglob(f"chat_templates/{name}.jinja")
    end, eos = RELEASED[name], "<|endoftext|>" if name == "phi3" else "<eos>"
    tokenizer = tokenizer_of(path.read_text(encoding="utf-8"), ("<bos>", eos, *([end] if end else [])))
    tokenizer.eos_token = eos
    messages = turns(*QUESTIONS[:1], ANSWERS[0], QUESTIONS[1], ANSWERS[1])
    if end:
        assert trained(tokenizer, messages) == [f"{answer}{end}" for answer in ANSWERS]
        return
    with pytest.raises(DataError, match=r"message 1 does not start with|message 1 differently if"):
        trained(tokenizer, messages)
    marked = path.with_name(f"{name}_training.jinja").read_text(encoding="utf-8")
    for found, answer in zip(trained(tokenizer_of(marked, ("<bos>", "<eos>")), messages), ANSWERS, strict=True):
        assert answer in found
