"""Rows to tokens, and which of them the loss counts.

Prompts, and in conversations everything but the assistant's turns, do not count unless ``train_on_prompt``. A long
text is tokenised in windows with the same result as in one piece. No packing here, and no files.

[Note: Turns] Which part of a conversation is the assistant's is read from the template itself: with
``{% generation %}`` marks from those; without, by rendering up to the turn with the generation prompt, which is what
the model sees when it is asked to answer, and taking what follows. The end-of-turn token counts, the white space
behind it does not: nobody generates it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal

import numpy as np

from overspill.errors import OverspillError
from overspill.train.data.pack import Counted, Tokens
from overspill.train.data.rows import Row, unusable

__all__ = ["Tokeniser", "encode_stream"]

Encode = Callable[[str], list[int]]
_WINDOW_CHARS: Final = 1 << 15
_CONTEXT_CHARS: Final = 512
_LINE_CUT: Final = re.compile(r"(?<=\S\n)(?=\S)")  # white space on one side only: no tokenizer joins across it
_WORD_CUT: Final = re.compile(r"(?<=\w)(?= \w)|(?<=[。！？；，、])(?=\w)")
_LONG_LINE: Final = 4  # windows without a line to cut at, after which words will do
_GENERATION_MARK: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TAIL_TOKENS: Final = 4  # an end-of-turn token this near the end ends the document, with the white space behind it


class Tokeniser:
    """Turns rows into parts of (tokens, counted); the parts of one row are one document, ended by end-of-text.

    Args:
        tokenizer: of transformers.
        train_on_prompt: count every token.
        raw_pairs: join question and answer by a line break instead of making a conversation of them.
    """

    def __init__(self, tokenizer: Any, *, train_on_prompt: bool, raw_pairs: bool) -> None:
        self._tokenizer = tokenizer
        self._train_on_prompt = train_on_prompt
        self._raw_pairs = raw_pairs
        if tokenizer.eos_token_id is None:
            raise OverspillError(
                "OVS203",
                "The tokenizer names no end-of-text token, so documents cannot be told apart.",
                field="eos_token",
                next_step='Set "eos_token" in tokenizer_config.json.',
            )
        self._eos: int = tokenizer.eos_token_id
        self._before, self._after = self._added_tokens()
        if self._eos not in self._after:
            self._after = [*self._after, self._eos]
        self._has_marks = bool(_GENERATION_MARK.search(tokenizer.chat_template or ""))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts before and after a text (a begin-of-text token, for some)."""
        bare, dressed = self.encode("a"), list(self._tokenizer("a", verbose=False).input_ids)
        for begin in range(len(dressed) - len(bare) + 1):
            if dressed[begin : begin + len(bare)] == bare:
                return dressed[:begin], dressed[begin + len(bare) :]
        return [], []

    def kind_of(self, row: Row) -> Literal["text", "completion", "chat"]:
        """A question and its answer become a conversation where the tokenizer has a template for one."""
        if row.kind == "completion" and row.pair_of_task and not self._raw_pairs and self._tokenizer.chat_template:
            return "chat"
        return row.kind

    def parts(self, row: Row) -> Iterator[tuple[Tokens, Counted]]:
        """The document of a row in parts; nothing at all for a row without text or without an answer."""
        kind = self.kind_of(row)
        if kind == "text":
            assert row.blocks is not None
            begun = False
            for tokens in encode_stream(self.encode, row.blocks()):
                if tokens:
                    yield self._part(tokens if begun else self._before + tokens, True)
                    begun = True
            if begun:
                yield self._part(self._after, True)
        elif kind == "completion":
            if not row.completion.strip():
                return
            prompt = row.prompt + "\n" if row.pair_of_task else row.prompt
            yield self._part(self._before, False)
            yield from self._segments([(prompt, False), (row.completion, True)])
            yield self._part(self._after, True)
        elif row.messages or row.completion.strip():
            yield from self._chat(row)

    def _part(self, tokens: list[int], counted: bool) -> tuple[Tokens, Counted]:
        return np.array(tokens, dtype=np.int64), np.full(len(tokens), counted or self._train_on_prompt)

    def _segments(self, segments: Iterable[tuple[str, bool]]) -> Iterator[tuple[Tokens, Counted]]:
        """Tokens that never reach across a border: a prompt is tokenised as it will be when the model is asked."""
        before = ""
        for text, counted in segments:
            if text:
                yield self._part(_encode_after(self.encode, before, text), counted)
                before = text

    def _chat(self, row: Row) -> Iterator[tuple[Tokens, Counted]]:
        messages = list(row.messages) or [
            {"role": "user", "content": row.prompt},
            {"role": "assistant", "content": row.completion},
        ]
        if not self._tokenizer.chat_template:
            raise OverspillError(
                "OVS203",
                "The data holds conversations and the tokenizer has no chat template.",
                field=row.where,
                next_step="Use an instruct model's tokenizer, or add chat_template.jinja beside it.",
            )
        if self._train_on_prompt:
            parts = list(self._segments([(self._render(messages, row, tokenize=False), True)]))
        elif self._has_marks:
            parts = [self._marked(messages, row)]
        else:
            parts = list(self._segments(self._turns(messages, row)))
        yield from parts
        if self._eos not in np.concatenate([tokens for tokens, _ in parts])[-_TAIL_TOKENS:]:
            yield self._part([self._eos], messages[-1]["role"] == "assistant")

    def _render(self, messages: list[dict[str, Any]], row: Row, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            reason = " ".join(str(error).split())[:200]
            unusable(f"The tokenizer's chat template does not take this conversation: {reason}.", row.where)

    def _marked(self, messages: list[dict[str, Any]], row: Row) -> tuple[Tokens, Counted]:
        rendered = self._render(messages, row, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return np.array(rendered["input_ids"], dtype=np.int64), np.array(rendered["assistant_masks"], dtype=bool)

    def _turns(self, messages: list[dict[str, Any]], row: Row) -> list[tuple[str, bool]]:
        """The rendered conversation, cut into what is given and what the assistant says; see [Note: Turns]."""
        whole: str = self._render(messages, row, tokenize=False)
        segments: list[tuple[str, bool]] = []
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before: str = self._render(messages[:number], row, tokenize=False, add_generation_prompt=True)
            upto: str = self._render(messages[: number + 1], row, tokenize=False)
            begin = len(before)
            if not whole.startswith(before):
                unusable(
                    "The chat template renders a conversation differently when it is not finished, so the assistant's "
                    f"turn {number + 1} cannot be found in it.",
                    row.where,
                    "Use a template with {% generation %} marks, or set data.train_on_prompt to true.",
                )
            end = len(upto) if whole.startswith(upto) else self._end_of_content(whole, begin, message, row)
            mark = whole.rfind(self._tokenizer.eos_token, begin, end)
            if mark >= 0 and not whole[mark + len(self._tokenizer.eos_token) : end].strip():
                end = mark + len(self._tokenizer.eos_token)
            segments += [(whole[done:begin], False), (whole[begin:end], True)]
            done = end
        return [*segments, (whole[done:], False)]

    def _end_of_content(self, whole: str, begin: int, message: dict[str, Any], row: Row) -> int:
        """Where a turn ends that is rendered otherwise when it is the last one (reasoning left out, say)."""
        content = str(message.get("content") or "").strip()
        found = whole.find(content, begin)
        if not content or found < 0:
            unusable("The assistant's turn cannot be found in the rendered conversation.", row.where)
        end = found + len(content)
        eos: str = self._tokenizer.eos_token
        return end + len(eos) if whole.startswith(eos, end) else end


def _encode_after(encode: Encode, before: str, text: str) -> list[int]:
    """The tokens of ``text`` where it follows ``before``: no prefix that a tokenizer puts before a whole text.

    Where the two would melt into one token at their border, the text is encoded by itself.
    """
    if not before:
        return encode(text)
    context = encode(before)
    both = encode(before + text)
    return both[len(context) :] if both[: len(context)] == context else encode(text)


def encode_stream(encode: Encode, blocks: Iterable[str], window_chars: int = _WINDOW_CHARS) -> Iterator[list[int]]:
    """Encode a long text window by window; the tokens are those of the whole text.

    A window ends at a line break with no white space beside it, where the tokens before it are seen to be the same
    with and without what follows; the next one is encoded with the end of this one before it. Where no such place
    is found, the window grows, and then a border between words will do.
    """
    before, pending, searched = "", "", window_chars
    for block in blocks:
        pending += block
        while len(pending) > searched + 2 * _CONTEXT_CHARS:
            cut = _cut(encode, pending, searched, _LINE_CUT)
            if cut is None and len(pending) > _LONG_LINE * window_chars:
                cut = _cut(encode, pending[: (_LONG_LINE + 1) * window_chars], window_chars, _WORD_CUT)
            if cut is None:
                searched = len(pending)
                break
            yield _encode_after(encode, before, pending[:cut])
            before, pending, searched = _tail(pending[:cut]), pending[cut:], window_chars
    if pending:
        yield _encode_after(encode, before, pending)


def _tail(text: str) -> str:
    """The last lines of a text, some hundred characters, from the beginning of a line on if there is one."""
    tail = text[-_CONTEXT_CHARS:]
    start = _LINE_CUT.search(tail)
    return tail[start.start() :] if start is not None and len(text) > _CONTEXT_CHARS else tail


def _cut(encode: Encode, text: str, begin: int, places: re.Pattern[str]) -> int | None:
    for match in places.finditer(text, begin, len(text) - _CONTEXT_CHARS):
        cut = match.start()
        left, right = _tail(text[:cut]), text[cut : cut + _CONTEXT_CHARS]
        tokens = encode(left)
        if encode(left + right)[: len(tokens)] == tokens:
            return cut
    return None
