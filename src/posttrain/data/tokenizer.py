"""Small tokenizers for from-scratch models: characters, or byte-level BPE with single digits.

Both carry `<pad>`, `<eos>` as different tokens and a chat template that writes a user's text, then the assistant's
text and `<eos>`, so that from-scratch and hub models go through the same rendering.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


class Config(JobConfig):
    kind: Literal["characters", "bpe"] = key(help="characters: one token per character of `alphabet`")
    alphabet: str = key("", help="characters: every character that may occur")
    tokens: tuple[str, ...] = key((), help="further tokens of several characters, such as <think>; they are ordinary text")
    vocabulary: int = key(512, help="bpe: size, special tokens included", ge=258)
    corpus: Path | None = key(None, help="bpe: corpus manifest to learn merges on (train split)", role="input")

    def model_post_init(self, _context) -> None:
        if self.kind == "characters" and not self.alphabet:
            raise ValueError("kind: characters needs an alphabet; add it")


def characters(alphabet: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: i for i, symbol in enumerate([PAD, EOS, *dict.fromkeys(alphabet)])}
    result = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    result.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # "." leaves line feeds together
    result.decoder = decoders.Fuse()
    return result


def byte_pairs(texts: list[str], size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    result.train_from_iterator(texts, trainer)
    return result


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left", clean_up_tokenization_spaces=False
    )
    result.chat_template = TEMPLATE
    return result


def main(job: Config) -> None:
    if job.kind == "characters":
        built = wrap(characters(job.alphabet))
    else:
        if job.corpus is None:
            raise UserError("kind: bpe needs --corpus, the manifest of a corpus.")
        manifest.read(job.corpus)
        rows = tables.read(job.corpus.parent / "documents.parquet", ["text"], [("split", "=", "train")])
        built = wrap(byte_pairs([row["text"] for row in rows], job.vocabulary))
    if job.tokens:
        built.add_tokens(list(job.tokens))  # not special: decoding keeps them, as it does for released reasoning models
    folder = job.folder / "tokenizer"
    built.save_pretrained(folder)
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    manifest.publish(job, {"vocabulary": len(built)}, files)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
