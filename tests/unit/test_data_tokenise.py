"""What the loss counts, with a real tokenizer: answers, not questions, for templates of several kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from overspill.errors import OverspillError
from overspill.train.data.rows import read_rows
from overspill.train.data.tokenise import Tokeniser, encode_stream
from testing.tiny import TINY_ASSETS, TINY_PLAY

EOS = "<|im_end|>"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Adds a system turn of its own, and thoughts in the last answer only, as Qwen3's template does.
THINKING = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Who art thou?"},
    {"role": "assistant", "content": "Macbeth, thane of Glamis."},
    {"role": "user", "content": "What news?"},
    {"role": "assistant", "content": "The battle's won."},
]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_ASSETS)


def _example(tokenizer, row: dict, tmp_path: Path, *, kind="auto", train_on_prompt=False) -> tuple[str, list[str]]:
    """The whole document as text, and the counted stretches of it."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    tokeniser = Tokeniser(tokenizer, train_on_prompt=train_on_prompt, raw_pairs=kind == "completion")
    (read,) = read_rows([file], kind)
    pairs = [
        (int(token), bool(flag))
        for tokens, counted in tokeniser.parts(read)
        for token, flag in zip(tokens, counted, strict=True)
    ]
    stretches: list[list[int]] = []
    previous = False
    for token, flag in pairs:
        if flag and not previous:
            stretches.append([])
        if flag:
            stretches[-1].append(token)
        previous = flag
    return tokenizer.decode([token for token, _ in pairs]), [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize("template", ["of the assets", MARKED, THINKING])
def test_in_a_conversation_the_assistants_turns_count_with_their_end(tokenizer, tmp_path, template):
    if template != "of the assets":
        tokenizer.chat_template = template
    document, counted = _example(tokenizer, {"messages": CHAT}, tmp_path)
    assert document == tokenizer.apply_chat_template(CHAT, tokenize=False)
    last = "<think></think>The battle's won." if template == THINKING else "The battle's won."
    assert counted == [f"Macbeth, thane of Glamis.{EOS}", f"{last}{EOS}"]


def test_the_counted_tokens_follow_the_prompt_that_the_model_will_see(tokenizer, tmp_path):
    """Cut before the last answer, the tokens are those of apply_chat_template with the generation prompt."""
    document, _ = _example(tokenizer, {"messages": CHAT}, tmp_path)
    prompt = tokenizer.apply_chat_template(CHAT[:3], tokenize=False, add_generation_prompt=True)
    assert document.startswith(prompt)
    tokeniser = Tokeniser(tokenizer, train_on_prompt=False, raw_pairs=False)
    (row,) = read_rows([tmp_path / "rows.jsonl"], "auto")
    parts = [tokens.tolist() for tokens, _ in tokeniser.parts(row)]
    before_answer = [token for part in parts[:3] for token in part]
    assert before_answer == tokenizer(prompt, add_special_tokens=False).input_ids


def test_with_train_on_prompt_everything_counts(tokenizer, tmp_path):
    for row in ({"messages": CHAT}, {"prompt": "Hail ", "completion": "king"}):
        document, counted = _example(tokenizer, row, tmp_path, train_on_prompt=True)
        assert counted == [document]


def test_a_completion_counts_and_its_prompt_does_not(tokenizer, tmp_path):
    document, counted = _example(tokenizer, {"prompt": "Fair is ", "completion": "foul"}, tmp_path)
    assert document == f"Fair is foul{EOS}" and counted == [f"foul{EOS}"]


def test_a_prompt_never_melts_into_its_completion(tokenizer, tmp_path):
    whole = tokenizer("MACBETH", add_special_tokens=False).input_ids
    assert len(whole) == 1  # the tokenizer would make one token of both
    document, counted = _example(tokenizer, {"prompt": "MAC", "completion": "BETH"}, tmp_path)
    assert document == f"MACBETH{EOS}" and counted == [f"BETH{EOS}"]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Who?", "answer": "Banquo."},
        {"instruction": "Who?", "output": "Banquo."},
        {"instruction": "Who?", "input": "", "output": "Banquo."},
    ],
)
def test_questions_and_answers_become_a_conversation_where_there_is_a_template(tokenizer, tmp_path, row):
    document, counted = _example(tokenizer, row, tmp_path)
    assert document.startswith("<|im_start|>user\nWho?<|im_end|>") and counted == [f"Banquo.{EOS}"]
    raw, counted_raw = _example(tokenizer, row, tmp_path, kind="completion")
    assert raw == f"Who?\nBanquo.{EOS}" and counted_raw == [f"Banquo.{EOS}"]
    tokenizer.chat_template = None
    assert _example(tokenizer, row, tmp_path)[0] == raw


def test_an_instruction_keeps_its_input(tokenizer, tmp_path):
    document, _ = _example(tokenizer, {"instruction": "Count.", "input": "1 2", "output": "Two."}, tmp_path)
    assert "Count.\n\n1 2<|im_end|>" in document


def test_plain_text_counts_and_is_ended_once(tokenizer, tmp_path):
    assert _example(tokenizer, {"text": "Hail!"}, tmp_path) == (f"Hail!{EOS}", [f"Hail!{EOS}"])


def test_rows_without_text_or_answer_give_nothing(tokenizer, tmp_path):
    for row in ({"text": ""}, {"prompt": "Hail", "completion": " \n"}):
        assert _example(tokenizer, row, tmp_path) == ("", [])


def test_a_conversation_whose_template_ends_no_turn_is_ended_by_end_of_text(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    document, counted = _example(tokenizer, {"messages": CHAT[:2]}, tmp_path)
    assert document.endswith(f"Macbeth, thane of Glamis.\n{EOS}") and counted[0].startswith("Macbeth, thane")
    assert counted[-1].endswith(EOS)


def test_what_a_tokenizer_puts_around_a_text_is_kept(tmp_path):
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_file(str(TINY_ASSETS / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    assert _example(tokenizer, {"text": "Hail!"}, tmp_path)[0] == f"<|im_start|>Hail!{EOS}"
    assert _example(tokenizer, {"prompt": "Ha", "completion": "il"}, tmp_path)[0] == f"<|im_start|>Hail{EOS}"


def test_a_tokenizer_without_end_of_text_is_refused():
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TINY_ASSETS / "tokenizer.json"))
    with pytest.raises(OverspillError) as caught:
        Tokeniser(tokenizer, train_on_prompt=False, raw_pairs=False)
    assert caught.value.code == "OVS203"


def test_conversations_need_a_template(tokenizer, tmp_path):
    tokenizer.chat_template = None
    with pytest.raises(OverspillError, match="no chat template") as caught:
        _example(tokenizer, {"messages": CHAT}, tmp_path)
    assert caught.value.code == "OVS203"


def test_a_conversation_that_the_template_refuses_is_named_by_line(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(OverspillError, match=r"roles must alternate.*rows\.jsonl:1") as caught:
        _example(tokenizer, {"messages": CHAT}, tmp_path)
    assert caught.value.code == "OVS204"


def test_a_template_that_looks_ahead_is_refused_rather_than_masked_wrongly(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    with pytest.raises(OverspillError, match="cannot be found") as caught:
        _example(tokenizer, {"messages": CHAT}, tmp_path)
    assert caught.value.code == "OVS204" and "train_on_prompt" in caught.value.next_step
    assert _example(tokenizer, {"messages": CHAT}, tmp_path, train_on_prompt=True)[1] != []


# Long texts in windows


def _encoder(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _blocks(text: str, chars: int):
    return (text[i : i + chars] for i in range(0, len(text), chars))


@pytest.mark.parametrize(("window", "block"), [(1000, 700), (1500, 50_000), (20_000, 999)])
def test_a_long_text_in_windows_has_the_tokens_of_the_whole(tokenizer, window, block):
    encode, text = _encoder(tokenizer), TINY_PLAY.read_text(encoding="utf-8")
    pieces = list(encode_stream(encode, _blocks(text, block), window))
    assert len(pieces) > 4
    assert [token for piece in pieces for token in piece] == encode(text)


def test_windows_are_right_for_a_tokenizer_that_marks_the_beginning_of_a_text():
    """Sentencepiece style: a space becomes ▁, and one is put before every text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    text = TINY_PLAY.read_text(encoding="utf-8")[:30_000]
    backend.train_from_iterator([text], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    encode = lambda part: backend.encode(part).ids  # noqa: E731
    assert encode("thane")[0] != encode("a\nthane")[-1]
    pieces = list(encode_stream(encode, _blocks(text, 500), 1500))
    assert len(pieces) > 4
    assert [token for piece in pieces for token in piece] == encode(text)


@pytest.mark.parametrize("unit", ["Hail king! ", "王よ、万歳。"])
def test_a_text_of_one_long_line_is_cut_between_words(tokenizer, unit):
    encode, text = _encoder(tokenizer), unit * 2000
    pieces = list(encode_stream(encode, _blocks(text, 500), 1000))
    assert len(pieces) > 4
    assert [token for piece in pieces for token in piece] == encode(text)


def test_a_text_without_any_border_is_encoded_whole(tokenizer):
    encode, text = _encoder(tokenizer), "abc" * 4000
    assert [token for piece in encode_stream(encode, _blocks(text, 500), 1000) for token in piece] == encode(text)


@settings(max_examples=100, deadline=None)
@given(
    text=st.one_of(
        st.text(alphabet=" \n\tabcMACBETH.,é😀", max_size=600).map(lambda part: (part + "x\ny") * 12),
        st.text(alphabet=" \tabcMACBETH.,é😀。", max_size=600).map(lambda part: (part + "x y") * 12),
    ),
    block=st.integers(1, 900),
)
def test_windows_keep_any_text_whole(text, block):
    tokenizer = AutoTokenizer.from_pretrained(TINY_ASSETS)
    encode = _encoder(tokenizer)
    tokens = [token for piece in encode_stream(encode, _blocks(text, block), 600) for token in piece]
    assert tokens == encode(text)
