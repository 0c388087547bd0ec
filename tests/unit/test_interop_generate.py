"""`generate_text` says what transformers' own generate says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from overspill.errors import OverspillError
from overspill.interop.generate import generate_text
from testing.tiny import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="float32", initializer_range=0.3)


@pytest.mark.parametrize("chat", [False, True])
def test_greedy_text_is_that_of_transformers(tiny, chat):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    text = "MACBETH.\nHail"
    if chat:
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    inputs = tokenizer(text, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    pieces: list[str] = []
    got = generate_text(tiny, "MACBETH.\nHail", max_new_tokens=12, chat=chat, on_text=pieces.append)
    assert got == tokenizer.decode(expected, skip_special_tokens=True) != ""
    assert "".join(pieces) == got


def test_drawn_text_repeats_with_its_seed_and_leaves_the_global_generator_alone(tiny):
    state = torch.get_rng_state()
    texts = [generate_text(tiny, "Hail", max_new_tokens=10, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_new_tokens_end_at_the_models_last_position(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompt = "Hail " * 75
    room = 256 - len(tokenizer(prompt).input_ids)
    assert 0 < room < 100
    notes: list[str] = []
    texts = [
        generate_text(tiny, prompt, max_new_tokens=count, on_note=notes.append) for count in (1000, room, room - 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(notes) == 1 and "last position, 256" in notes[0] and f"{room} tokens" in notes[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-320},
        {"temperature": 1e-30},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -1.0},
        {"temperature": 1.0, "seed": 2**70},
        {"seed": -1},
    ],
)
def test_a_temperature_or_a_seed_that_torch_would_not_take_is_refused(tiny, options):
    with pytest.raises(OverspillError, match=r"OVS101.*out of range"):
        generate_text(tiny, "Hail", **options)
    for edge in ({"temperature": 1e-4, "seed": 2**63 - 1}, {"temperature": 1e4}):
        assert generate_text(tiny, "Hail", max_new_tokens=2, **edge) is not None


def test_prompts_that_cannot_be_continued_are_refused(tiny, tmp_path):
    cases = [("", {}, "OVS204"), ("Hail " * 300, {}, "OVS205")]
    bare = make_tiny_model(tmp_path)
    (bare / "chat_template.jinja").unlink()
    for prompt, options, code in cases:
        with pytest.raises(OverspillError) as caught:
            generate_text(tiny, prompt, **options)
        assert caught.value.code == code
    with pytest.raises(OverspillError, match="no chat template") as caught:
        generate_text(bare, "Hail", chat=True)
    assert caught.value.code == "OVS203"


def test_a_damaged_model_is_refused_by_name(tmp_path):
    tiny = make_tiny_model(tmp_path)
    (tiny / "model.safetensors").write_bytes(b"short")
    with pytest.raises(OverspillError) as caught:
        generate_text(tiny, "Hail")
    assert caught.value.code == "OVS202"
