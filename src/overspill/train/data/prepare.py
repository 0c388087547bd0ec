"""From the job's data table to datasets: read, tokenise, pack, store; or find that it was done before.

The token files carry a key made from the data files' contents, the tokenizer and the settings that change tokens;
where the key is the same nothing is tokenised anew. A run that has counted its position on token files keeps them:
they are never replaced by others, and suffice when the data files are gone. Damaged ones are made again, and must
come out the same. Tokens pass through in pieces, so host
memory stays small.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from overspill.errors import OverspillError
from overspill.job import DataConfig
from overspill.train.data.dataset import SequenceDataset
from overspill.train.data.pack import Packer, Padder
from overspill.train.data.rows import data_files, read_rows, unusable
from overspill.train.data.store import (
    FORMAT,
    DataFacts,
    TokenWriter,
    damaged_file,
    file_digest,
    read_facts,
    token_dtype,
)
from overspill.train.data.tokenise import Tokeniser

__all__ = ["PreparedData", "prepare_data"]


@dataclass(frozen=True)
class PreparedData:
    """The datasets of a run. ``reused``: the token files were there already. ``notes``: what the user should know."""

    train: SequenceDataset
    evaluation: SequenceDataset | None
    facts: DataFacts
    reused: bool
    notes: tuple[str, ...] = ()


def prepare_data(
    config: DataConfig,
    tokenizer: Any,
    directory: str | Path,
    *,
    max_positions: int | None = None,
    expected_key: str | None = None,
) -> PreparedData:
    """Make the token files in ``directory`` (or reuse them) and give the datasets.

    Args:
        config: paths in it are absolute, or relative to the working directory.
        tokenizer: of transformers.
        max_positions: the longest sequence that the model takes; None for no limit.
        expected_key: of the token files that a run's position was counted on; None where there is no such run.

    Raises:
        OverspillError: OVS204 for data that cannot be used, by file and line; OVS205 when ``seq_len`` exceeds
            ``max_positions``; OVS203 for a tokenizer that lacks an end-of-text token or a chat template; OVS401 or
            OVS402 when the token files cannot be written; OVS602, before any is replaced, when they would be
            others than the expected ones; OVS404 when one is damaged and the data files are gone.
    """
    if max_positions is not None and config.seq_len > max_positions:
        raise OverspillError(
            "OVS205",
            "The sequences are longer than the model's positions.",
            field="data.seq_len",
            value=config.seq_len,
            limit=max_positions,
        )
    target = Path(directory)
    settings_key = _settings_key(config, tokenizer)
    facts, notes = _kept(config, target, expected_key, settings_key)
    reused = facts is not None
    if facts is None:
        files = data_files(config.path)
        key = _key(files, settings_key)
        if expected_key is not None and key != expected_key:
            raise _another(config, target)
        there = read_facts(target, key)
        damage = damaged_file(target, there) if there is not None else None
        reused = there is not None and damage is None
        if there is not None and damage is None:
            facts = there
        else:
            again = damage is not None or expected_key is not None
            facts = _write(config, files, tokenizer, target, key, settings_key, there if again else None)
            if again:
                what = f"{damage[0]} is damaged ({damage[1]})" if damage else f"{target} held no whole index"
                notes += (f"{what}; the tokens were made anew from the text.",)
    held_out = _held_out(config, facts)
    train = SequenceDataset(target, facts, held_out=held_out, part="train")
    evaluation = SequenceDataset(target, facts, held_out=held_out, part="eval") if held_out else None
    return PreparedData(train, evaluation, facts, reused, (*notes, *_left_out(facts)))


def _left_out(facts: DataFacts) -> list[str]:
    """What of the text is not trained on, one sentence for each kind."""
    rows = facts.rows + facts.skipped_rows
    said = []
    if facts.skipped_rows:
        texts = facts.skipped_by_kind.get("text", 0)
        answers = sum(facts.skipped_by_kind.values()) - texts
        if not facts.skipped_by_kind:  # of an earlier version
            said.append(
                f"{_of(facts.skipped_rows, rows)} no text or no answer and {_are(facts.skipped_rows)} left out."
            )
        if answers:
            said.append(f"{_of(answers, rows)} no answer and {_are(answers)} left out.")
        if texts:
            said.append(f"{_of(texts, rows)} no text and {_are(texts)} left out.")
    if facts.cut_rows:
        said.append(
            f"{facts.cut_rows} of {rows} rows {_are(facts.cut_rows)} longer than data.seq_len = {facts.seq_len} tokens "
            f"and {_are(facts.cut_rows)} cut off there; {facts.dropped_tokens} tokens are left out."
        )
    if facts.unlabelled_rows:
        said.append(
            f"{_of(facts.unlabelled_rows, rows)} no token that the loss counts within data.seq_len = {facts.seq_len} "
            f"tokens and {_are(facts.unlabelled_rows)} left out."
        )
    if facts.packing and (sequences := facts.unlabelled_tokens // facts.seq_len):
        said.append(
            f"{_of(sequences, sequences + facts.sequences, 'sequences')} no token that the loss counts and "
            f"{_are(sequences)} left out."
        )
    return said


def _of(count: int, total: int, what: str = "rows") -> str:
    return f"{count} of {total} {what} {'has' if count == 1 else 'have'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _kept(
    config: DataConfig, target: Path, expected_key: str | None, settings_key: str
) -> tuple[DataFacts | None, tuple[str, ...]]:
    """A run's whole token files, where its data files are no longer there to be compared; else None."""
    named = [config.path] if isinstance(config.path, str) else list(config.path)
    missing = [name for name in named if not Path(name).exists()]
    facts = read_facts(target, expected_key) if expected_key is not None and missing else None
    if facts is None:
        return None, ()
    if facts.settings_key != settings_key:
        raise _another(config, target)
    if damage := damaged_file(target, facts):
        raise OverspillError(
            "OVS404",
            f"A token file of the run is damaged ({damage[1]}), and the text that it was made of is gone.",
            field=str(damage[0]),
            next_step=f"Put {missing[0]} back: the tokens are then made anew.",
        )
    return facts, (f"{missing[0]} is no longer there; the run goes on with the tokens that it made of it.",)


def _another(config: DataConfig, target: Path) -> OverspillError:
    return OverspillError(
        "OVS602",
        "The data files, the tokenizer or the data settings have changed since the run began, so its position in the "
        "data means nothing.",
        field=str(config.path) if isinstance(config.path, str) else ", ".join(config.path),
        limit=f"what {target} was made of",
    )


def _key(files: list[Path], settings_key: str) -> str:
    described = [settings_key, [(file.suffix.lower(), file_digest(file)) for file in files]]
    return xxhash.xxh3_128_hexdigest(json.dumps(described).encode())


def _settings_key(config: DataConfig, tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = {
        "format": FORMAT,
        "settings": config.model_dump(include={"format", "seq_len", "packing", "train_on_prompt"}),
        "tokenizer": backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        "template": tokenizer.chat_template,
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True, default=str).encode())


def _write(
    config: DataConfig,
    files: list[Path],
    tokenizer: Any,
    target: Path,
    key: str,
    settings_key: str,
    same_as: DataFacts | None,
) -> DataFacts:
    """Tokenise into ``target``. ``same_as``: of the damaged files there, which are replaced by the same tokens only."""
    tokeniser = Tokeniser(tokenizer, train_on_prompt=config.train_on_prompt, raw_pairs=config.format == "completion")
    packer: Packer | Padder = Packer(config.seq_len) if config.packing else Padder(config.seq_len)
    rows_by_kind: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    seen_tokens = 0
    dtype = token_dtype(len(tokenizer))
    with TokenWriter(target, dtype) as writer:
        for row in read_rows(files, config.format):
            kind = tokeniser.kind_of(row)
            held = seen_tokens
            for tokens, counted in tokeniser.parts(row):
                seen_tokens += len(tokens)
                for sequence in packer.add(tokens, counted):
                    writer.append(sequence)
            for sequence in packer.end_document(divisible=kind == "text"):
                writer.append(sequence)
            if seen_tokens == held:
                skipped[kind] += 1
            else:
                rows_by_kind[kind] += 1
        packer.finish()
        pad_token = tokenizer.pad_token_id
        facts = DataFacts(
            key=key,
            settings_key=settings_key,
            seq_len=config.seq_len,
            packing=config.packing,
            pad_token=tokenizer.eos_token_id if pad_token is None else pad_token,
            token_dtype=dtype.name,
            sequences=writer.sequences,
            tokens=writer.tokens,
            counted_tokens=writer.counted_tokens,
            rows=sum(rows_by_kind.values()),
            rows_by_kind=dict(sorted(rows_by_kind.items())),
            skipped_rows=sum(skipped.values()),
            dropped_tokens=packer.dropped_tokens,
            unlabelled_tokens=packer.unlabelled_tokens,
            skipped_by_kind=dict(sorted(skipped.items())),
            cut_rows=packer.cut_documents,
            unlabelled_rows=packer.unlabelled_documents,
            digests=writer.digests,
        )
        _check(facts, files, seen_tokens)
        if same_as is not None and same_as.digests and facts.digests != same_as.digests:
            raise OverspillError(
                "OVS602",
                "A token file of the run is damaged, and the text gives other tokens now than when the run began.",
                field=str(target),
                next_step="Install the version of tokenizers that the run was begun with, or start a new run.",
            )
        writer.finish(facts)
    return facts


def _check(facts: DataFacts, files: list[Path], seen_tokens: int) -> None:
    where = ", ".join(str(file) for file in files)
    if facts.rows == 0:
        unusable(
            f"The data gives no usable row: {facts.skipped_rows} without text or answer.",
            where,
            "Name a file in data.path whose rows hold text, or answers.",
        )
    if facts.sequences == 0 and facts.packing and seen_tokens < facts.seq_len:
        raise OverspillError(
            "OVS204",
            f"The data gives no complete sequence: it holds {seen_tokens} tokens, one sequence takes "
            f"{facts.seq_len} (data.seq_len).",
            field=where,
            next_step=f"Lower data.seq_len to at most {seen_tokens}, or give more text.",
        )
    if facts.sequences == 0:
        unusable(
            f"No sequence of {facts.seq_len} tokens holds a token that the loss counts: all are prompts.",
            where,
            "Raise data.seq_len so that answers fit behind their prompts, or set data.train_on_prompt to true.",
        )


def _held_out(config: DataConfig, facts: DataFacts) -> int:
    if config.eval_fraction == 0:
        return 0
    if facts.sequences < 2:
        raise OverspillError(
            "OVS204",
            "The data gives one sequence only, so none can be held out for evaluation.",
            field="data.eval_fraction",
            value=config.eval_fraction,
            next_step="Give more text, lower data.seq_len, or set data.eval_fraction to 0.",
        )
    return min(max(1, round(facts.sequences * config.eval_fraction)), facts.sequences - 1)
