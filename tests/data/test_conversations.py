"""Conversations: exactly the assistant's answers are trained on, or the row is refused with the reason."""

import json
from itertools import product

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ropecli.data.conversations import tokenize_conversations
from ropecli.data.formats import Conversation, Fault
from ropecli.data.token_store import Shard, TokenStore
from ropecli.errors import DataError


def documents_of(rows, tokenizer, train_on="assistant", **options):
    """The documents; raises the first fault."""
    documents = list(tokenize_conversations(rows, tokenizer, train_on, **options))
    if faults := [fault.message for fault in documents if isinstance(fault, Fault)]:
        raise DataError(faults[0])
    return documents


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
TWICE_MARKED = MARKED + "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
OPEN_MARKED = MARKED.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}")
# The next role ends an answer
GLM = """\
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
    {{- '<|' + (message.role if message.role != 'tool' else 'observation') + '|>\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
OF_GLM = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>", "</tool_call>")
# eos ends the text only
ALPACA = """\
{%- for message in messages %}
    {{- '### ' + message.role + ':\\n' + message.content + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### assistant:\\n' }}{% else %}{{ eos_token }}{% endif %}"""
# Qwen 3: only the last answer keeps its reasoning
THINKING = """\
{%- for message in messages %}
    {%- set thought = '<think>\\n' + message.reasoning | default('') + '</think>\\n' %}
    {%- set thought = thought if message.role == 'assistant' and loop.last else '' %}
    {{- '<|im_start|>' + message.role + '\\n' + thought + message.content + '<|im_end|>\\n' }}
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
    "marked without their ends": (OPEN_MARKED, IM, "", "<|im_end|>", {}),
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
    (document,) = documents_of([("row", Conversation(messages, **fields))], tokenizer)
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
    (document,) = documents_of([("row", Conversation(turns(*QUESTIONS)))], tokenizer, "all")
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
    (document,) = documents_of([("row", Conversation(messages))], tokenizer)
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
    same, *converted = documents_of(rows, tokenizer)
    for document in converted:
        np.testing.assert_array_equal(document.ids, same.ids)
        np.testing.assert_array_equal(document.trained, same.trained)


def test_tools_and_calls_reach_the_template(tokenizers, tokenizer_of):
    template = "{{ tools | tojson }}" + CHATML.replace(
        "message.content", "(message.content or message.tool_calls | tojson)"
    )
    tokenizer = tokenizer_of(template, IM)
    tools = [{"type": "function", "function": {"name": "look"}}]
    arguments, result = {"place": "mat", "day": None}, {"role": "tool", "content": "mat"}
    written = f'[{{"type": "function", "function": {{"name": "look", "arguments": {json.dumps(arguments)}}}}}]'
    for given in (arguments, json.dumps(arguments)):
        calls = [{"name": "look", "arguments": given}]
        forms = [
            [*turns("Where?"), {"role": "assistant", "content": None, "tool_calls": calls}, result],
            [*turns("Where?"), {"role": "assistant", "content": None, "function_call": calls[0]},
             {"role": "function", "content": "mat"}],
            [{"from": "human", "value": "Where?"}, {"from": "function_call", "value": json.dumps(calls[0])},
             {"from": "observation", "value": "mat"}],
        ]  # fmt: skip
        for messages, of in product(forms, (tools, json.dumps(tools))):
            answers = trained(tokenizer, [*messages, *turns("Where?", "Here.")[1:]], tools=of)
            assert answers == [f"{written}<|im_end|>", "Here.<|im_end|>"]


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
        "{% set messages = messages[1:] %}" + CHATML, turns("Where?", "Here.", system="Brief."),
        "leaves out the content of message 0",
    ),
    "a template that fails": (GEMMA, turns("Where?", "Here.", system="No"), "System role not supported"),
    "an answer without a question or a prompt": (
        CHATML.replace("if add_generation_prompt", "if false"), turns("Where?", "Here.")[1:],
        "message 0 is the assistant's, and nothing shows where it starts",
    ),
    "answers that nothing ends": (ALPACA, turns(*QUESTIONS[:2], *ANSWERS), "does not end answers"),
    "a share of an answer": (
        CHATML, [*turns("Where?"), {"role": "assistant", "content": "Here.", "weight": 0.5}],
        "message 1 has the weight 0.5; expected 0 or 1",
    ),
    "an unknown role": (CHATML, [{"role": "bot", "content": "Here."}], "message 0 has the role 'bot'; expected system"),
    "a picture": (CHATML, [{"role": "user", "content": [{"type": "image"}]}], "message 0 has the content .*image"),
    "no message": (CHATML, [], "the conversation is empty"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_masked_exactly_is_refused_with_the_reason(tokenizer_of, template, messages, reason):
    rows = [("row 1", Conversation(messages)), ("row 2", Conversation([]))]
    with pytest.raises(DataError, match=rf"row 1: .*{reason}"):
        documents_of(rows, tokenizer_of(template, IM))


CALL = {"name": "look", "arguments": {"place": "mat"}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look", "parameters": {"properties": {}}}}]
CALLING = [
    *turns("Where?"),
    {"role": "assistant", "content": "ok", "tool_calls": [CALL]},
    {"role": "tool", "content": "mat"},
    *turns("Where?", "Here.")[1:],
]
# what a template leaves out: the conversation, the template, and what is said of it
WITHOUT_SYSTEM = "{% set messages = messages[messages[0].role == 'system':] %}" + CHATML
LOST = {
    "a tool call": (Conversation(CALLING), CHATML, "tool call of message 1, by the assistant"),
    "a tool": (Conversation(turns("Where?", "Here."), TOOLS), CHATML, "tool look"),
    "reasoning": (
        Conversation([*turns("Where?"), {"role": "assistant", "content": "Here.", "reasoning": "It rained."}]), CHATML,
        "reasoning of message 1, by the assistant",
    ),
    "a text that is also in an answer": (
        Conversation(turns("Where?", "ok, here.", system="ok")), WITHOUT_SYSTEM,
        "content of message 0, by the system",
    ),
    "a text that is also in an earlier message": (
        Conversation(turns("Where?", "Here.", "Where?", "There.")),
        CHATML.replace("message.content", "(message.content if loop.index0 != 2 else '')"),
        "content of message 2, by the user",
    ),
    "a text that begins with a slash": (
        Conversation(turns("/look", "Here.", "Where?", "Here.")),
        CHATML.replace("message.content", "(message.content if message.content[0] != '/' else '')"),
        "content of message 0, by the user",
    ),
    "an argument": (
        Conversation(CALLING),
        CHATML.replace("message.content", "message.content + (message.tool_calls[0].function.name if "
                       "message.tool_calls else '')"),
        "arguments of message 1, by the assistant",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("conversation", "template", "what"), LOST.values(), ids=LOST)
def test_what_the_template_leaves_out_is_refused_or_counted(tokenizer_of, conversation, template, what):
    tokenizer, rows = tokenizer_of(template, IM), [("row 1", conversation), ("row 2", Conversation(turns("a", "b")))]
    with pytest.raises(DataError, match=f"row 1: the chat template leaves out the {what}.*drop_unrendered"):
        documents_of(rows, tokenizer)
    documents = documents_of(rows, tokenizer, drop_unrendered=True)
    assert [(document.name, document.lost) for document in documents] == [("row 1", what), ("row 2", "")]


def test_an_answer_of_which_nothing_is_left_is_never_trained_on(tokenizer_of):
    tokenizer = tokenizer_of(CHATML, IM)
    empty = [*turns("Where?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for messages, fault in ((empty, "leaves out all of message 1"), (turns("Where?", " "), "an answer, is empty")):
        with pytest.raises(DataError, match=fault):
            documents_of([("row", Conversation(messages))], tokenizer, drop_unrendered=True)


def test_each_answer_is_a_document_that_ends_with_it_as_at_inference(tokenizer_of):
    tokenizer = tokenizer_of(THINKING, IM)
    messages = turns(QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1], system="Be brief.")
    for message in messages[2::2]:  # the second answer is written without the first one's reasoning
        message["reasoning"] = "It rained."
    documents = documents_of([("row", Conversation(messages))], tokenizer, "each-answer")
    assert [document.name for document in documents] == ["row, answer 1", "row, answer 2"]
    for document, number in zip(documents, (2, 4), strict=True):
        answer = f"<think>\nIt rained.</think>\n{messages[number]['content']}<|im_end|>"
        prompt = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(document.ids) == f"{prompt}{answer}\n"
        assert tokenizer.decode(document.ids[document.trained]) == answer
    only_last = Conversation(messages, read_only=4)  # a prompt of messages, and a completion
    (document,) = documents_of([("row", only_last)], tokenizer, "each-answer")
    assert document.ids.tolist() == documents[1].ids.tolist()


@pytest.mark.parametrize("train_on", ["assistant", "each-answer"])
def test_where_the_next_message_ends_an_answer_its_first_token_is_trained_on(tokenizer_of, train_on):
    tokenizer = tokenizer_of(GLM, OF_GLM)
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
    called = f"<tool_call>{json.dumps(CALL)}</tool_call><|observation|>"
    for messages, expected in (
        (turns(*QUESTIONS[:2], *ANSWERS), [f"{QUESTIONS[1]}<|user|>", f"{ANSWERS[1]}<|user|>"]),
        ([*turns("Where?"), call], [called]),
        (
            [*turns("Where?"), call, {"role": "tool", "content": "mat"}, *turns("", "Here.")[1:]],
            [called, "Here.<|user|>"],
        ),
    ):
        documents = documents_of([("row", Conversation(messages))], tokenizer, train_on)
        borders = [np.flatnonzero(np.diff(each.trained, prepend=False, append=False)) for each in documents]
        pairs = [(each, *pair) for each, of in zip(documents, borders, strict=True) for pair in of.reshape(-1, 2)]
        assert [tokenizer.decode(each.ids[start:stop]) for each, start, stop in pairs] == expected
        # the rest is what the template writes
        whole = tokenizer.decode(documents[-1].ids)
        assert whole.rpartition("<|")[0] == tokenizer.apply_chat_template(messages, tokenize=False)


def test_an_answer_ends_where_it_is_cut_off_too(tokenizer_of):
    tokenizer = tokenizer_of(GLM, OF_GLM)
    (document,) = documents_of([("row", Conversation(turns(*QUESTIONS, *ANSWERS, "Bye.")))], tokenizer)
    arrays = [np.array([len(document.ids)]), document.ids.astype("i4"), document.trained, document.turns]
    store = TokenStore([Shard(*arrays, np.array([len(document.turns)]))])
    for start, end in zip(document.turns, store.turn_ends(0), strict=True):
        text = tokenizer.decode(document.ids[start:end])
        assert text.endswith("<|user|>")
        assert text.removeprefix("[gMASK]<sop>").startswith("<|user|>")


def test_eos_after_the_last_answer_is_trained_on(tokenizer_of):
    tokenizer = tokenizer_of(ALPACA, ("<eos>",))
    assert trained(tokenizer, turns("Where?", "Here.")) == ["Here.\n\n<eos>"]
    answers = trained(tokenizer_of(TWICE_MARKED, IM), turns(*QUESTIONS[:2], *ANSWERS))
    assert answers == [f"{QUESTIONS[1]}<|im_end|>", f"{ANSWERS[1]}<|im_end|>\n<|im_end|>"]


@shapes
def test_a_conversation_may_begin_with_an_answer_if_the_template_allows(tokenizers, shape):
    messages = [{"role": "assistant", "content": ANSWERS[1]}, *turns(*QUESTIONS[:1], ANSWERS[0])]
    _, _, before, after, _ = SHAPES[shape]
    if shape == "mistral":
        with pytest.raises(DataError, match="roles must alternate"):
            trained(tokenizers[shape], messages)
    else:
        expected = [f"{before}{answer}{after}" for answer in reversed(ANSWERS)]
        assert trained(tokenizers[shape], messages) == expected


def test_a_system_prompt_in_the_row_and_another_in_the_messages_is_refused(tokenizers):
    messages = turns("Where?", "Here.", system="Be brief.")
    assert trained(tokenizers["chatml"], messages, system="Be brief.") == ["Here.<|im_end|>"]
    with pytest.raises(DataError, match="a system prompt in its column system, and another in message 0"):
        trained(tokenizers["chatml"], messages, system="Be long.")


@pytest.mark.parametrize(
    ("shape", "key", "no"), [("chatml", "weight", 0), ("mistral", "train", False), ("marked", "loss", False)]
)
def test_an_answer_of_weight_0_is_read_and_not_trained_on(tokenizers, shape, key, no):
    messages = turns(QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1])
    messages[1][key] = no
    _, _, before, after, _ = SHAPES[shape]
    rows = [("row", Conversation(messages))]
    for train_on in ("assistant", "each-answer"):
        (document,) = documents_of(rows, tokenizers[shape], train_on)
        assert tokenizers[shape].decode(document.ids[document.trained]) == f"{before}{ANSWERS[1]}{after}"
        assert ANSWERS[0] in tokenizers[shape].decode(document.ids)


def test_turns_begin_with_a_question_after_an_answer(tokenizers):
    for name, tokenizer in tokenizers.items():
        messages = turns(*QUESTIONS[:2], *ANSWERS, *QUESTIONS[:2])
        for train_on in ("assistant", "all"):
            (document,) = documents_of([("row", Conversation(messages))], tokenizer, train_on)
            whole = tokenizer.decode(document.ids)
            starts = [len(tokenizer.decode(document.ids[:turn])) for turn in document.turns]
            assert len(starts) == 3, name
            for start, message in zip(starts, messages[::2], strict=True):
                assert whole.index(message["content"], start) - start < 60


# Released templates, which TRL collects, with what each trains on, written by hand: special tokens, what stands before
# an answer, and before one with reasoning, and a call; None where it is refused. The line break between <think> and
# </think> joins the prompt's last token, so it is not trained on.
NO_THOUGHT, QWEN_CALL = "<think>\n\n</think>\n\n", '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=look>\n{}\n</function>\n</tool_call>"
RELEASED = {
    "qwen3": (
        ("<|endoftext|>", "<|im_end|>"), "each-answer", NO_THOUGHT, "<think>\nIt rained.\n</think>\n\n", QWEN_CALL,
    ),
    "qwen3_instruct_2507": (("<|endoftext|>", "<|im_end|>"), "assistant", "", None, QWEN_CALL),
    "qwen2_5": (("<|endoftext|>", "<|im_end|>"), "assistant", "", None, QWEN_CALL),
    "qwen3_5_think": (
        ("<|endoftext|>", "<|im_end|>"), "each-answer", "</think>\n\n", "It rained.\n</think>\n\n", XML_CALL,
    ),
    "qwen3_8": (
        ("<|endoftext|>", "<|im_end|>"), "assistant", "</think>\n\n", "It rained.\n</think>\n\n", XML_CALL,
    ),
    "gptoss": (
        ("<|startoftext|>", "<|return|>"), "each-answer", "<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>It rained.<|end|><|start|>assistant<|channel|>final<|message|>",
        " to=functions.look<|channel|>commentary json<|message|>{}<|call|>",
    ),
    "llama3_1": (("<|begin_of_text|>", "<|eot_id|>"), "assistant", "", None, '{{"name": "look", "parameters": {}}}'),
    "llama3_2": (("<|begin_of_text|>", "<|eot_id|>"), "assistant", "", None, '{{"name": "look", "parameters": {}}}'),
    "gemma": (("<bos>", "<end_of_turn>"), "assistant", "", None, None),
    "gemma3": (("<bos>", "<end_of_turn>"), "assistant", "", None, None),
    "gemma4": (("<bos>", "<turn|>"), "assistant", "", None, "<|tool_call>call:look{}<tool_call|><|tool_response>"),
    "cohere": (("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"), "assistant", "", None, None),
    "phi3": (("<s>", "<|endoftext|>", "<|end|>"), "assistant", "", None, None),
    "glm4moe": (
        ("[gMASK]", "<|endoftext|>", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|user|>"),
        "assistant", "\n<think></think>\n", "\n<think>It rained.</think>\n",
        "<tool_call>look\n{}\n</tool_call><|observation|>",
    ),
}  # fmt: skip
ARGUMENTS = {  # as JSON, in XML and in Gemma's form
    '{"place": "mat"}': ("<parameter=place>\nmat\n</parameter>", '{place:<|"|>mat<|"|>}'),
    '{"place": "mat", "day": null}': (
        "<parameter=place>\nmat\n</parameter>\n<parameter=day>\n{null}\n</parameter>", '{day:None,place:<|"|>mat<|"|>}',
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_released_templates(environment, tokenizer_of, name):
    """Each trains on exactly what is written above, or refuses; DeepSeek's only with markers."""
    (*special,), train_on, before, thought, call = RELEASED[name]
    tokenizer = tokenizer_of(released(environment, name), special)
    tokenizer.bos_token, tokenizer.eos_token = special[:2]
    end = special[-1]

    def trained_on(messages, **fields):
        rows = [("row", Conversation(messages, **fields))]
        documents = documents_of(rows, tokenizer, train_on)
        borders = [np.flatnonzero(np.diff(each.trained, prepend=False, append=False)) for each in documents]
        pairs = [(each, *pair) for each, of in zip(documents, borders, strict=True) for pair in of.reshape(-1, 2)]
        return [tokenizer.decode(each.ids[start:stop]) for each, start, stop in pairs]

    def refused(*given, **fields):
        with pytest.raises(DataError, match=r"leaves out the|template fails"):
            trained_on(*given, **fields)

    answers = [*ANSWERS, "Bye."]
    contents = [text for pair in zip(QUESTIONS, answers, strict=True) for text in pair]
    expected = [f"{before}{answer}{end}" for answer in answers]
    assert trained_on(turns(*contents)) == expected
    if name == "gemma":
        refused(turns(*contents, system="Be brief."))
    else:
        assert trained_on(turns(*contents, system="Be brief.")) == expected
    parts = [{"role": "user", "content": [{"type": "text", "text": "Whe"}, {"type": "text", "text": "re?"}]}]
    assert trained_on([*parts, *turns("", "Here.")[1:]]) == [f"{before}Here.{end}"]
    for key in ("reasoning_content", "reasoning", "thinking"):
        messages = [*turns("Where?"), {"role": "assistant", "content": "Here.", key: "It rained."}]
        if thought is None:
            refused(messages)
        else:
            assert trained_on(messages) == [f"{thought}Here.{end}"]
    for arguments, (in_xml, in_gemma) in ARGUMENTS.items():
        null = "null" if name == "qwen3_8" else "None"
        in_glm = "\n".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value or 'null'}</arg_value>"
            for key, value in json.loads(arguments).items()
        )
        form = {"gemma4": in_gemma, "glm4moe": in_glm}.get(
            name, in_xml.replace("{null}", null) if call is XML_CALL else arguments
        )
        for given in (arguments, json.loads(arguments)):
            calls = [{"type": "function", "function": {"name": "look", "arguments": given}}]
            messages = [
                *turns("Where?"), {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "content": "mat"}, *turns("", "Here.")[1:],
            ]  # fmt: skip
            if call is None:
                refused(messages, tools=TOOLS)
                continue
            first = call.replace("{}", form).replace("{{", "{").replace("}}}", "}}")
            ends = "" if name in ("gptoss", "gemma4", "glm4moe") else end
            no_thought = "" if name == "gptoss" else before
            assert trained_on(messages, tools=TOOLS) == [f"{no_thought}{first}{ends}", f"{before}Here.{end}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseekv3", "qwen3", "gptoss"])
def test_released_templates_with_markers_keep_every_answer(environment, tokenizer_of, name):
    messages = turns(*QUESTIONS[:1], ANSWERS[0], QUESTIONS[1], ANSWERS[1])
    with pytest.raises(DataError, match=r"message 1 does not start with|message 1 differently if"):
        trained(tokenizer_of(released(environment, name), ("<bos>", "<eos>")), messages)
    marked = tokenizer_of(released(environment, f"{name}_training"), ("<bos>", "<eos>"))
    for text, answer in zip(trained(marked, messages), ANSWERS, strict=True):
        assert answer in text


def released(environment, name):
    folder = environment("trl", ["trl==1.16.0"], "--no-deps").parents[1]
    (path,) = folder.rglob(f"chat_templates/{name}.jinja")
    return path.read_text(encoding="utf-8")
