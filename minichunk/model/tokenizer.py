"""Tokenizers: read from a model folder, or built from a list of tokens and merges.

Everything is a fast Transformers tokenizer in the end. Byte-level BPE (Sennrich et al., 2016, on
bytes as in GPT-2) is built here for GGUF files, and for the stand-in that random weights get.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minichunk.model.config import one_line
from minichunk.model.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How text is cut into pieces before the byte-pair merges, by the name that GGUF files use. Merges
# never cross a border between pieces, so these are part of a tokenizer's definition: SmolLM cuts
# digits apart ("1234" is four tokens), Llama 3 takes up to three together.
LLAMA3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = {
    "gpt-2": "bytes",
    "smollm": "digits",
    "llama-bpe": LLAMA3_PIECES,
    "qwen2": LLAMA3_PIECES.replace(r"\p{N}{1,3}", r"\p{N}"),
}

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_from_folder(folder: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model folder; None where it has none. Remote code is never run.

    Raises:
        ModelError: tokenizer files that cannot be read.
    """
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any(Path(folder, name).exists() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the libraries below raise many kinds
        raise ModelError(f"the tokenizer of {folder} cannot be read: {one_line(error)}") from None


def byte_level_tokenizer(
    tokens: Sequence[str],
    merges: list[tuple[str, str]],
    *,
    pieces: str = "bytes",
    control: Collection[str] = (),
    added: Collection[str] = (),
    roles: dict[str, str] | None = None,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer. Token i is `tokens[i]`, in GPT-2's spelling of bytes.

    `pieces` is a value of `PIECES`; `control` tokens are never shown as text, `added` ones are
    found in text before anything else; `roles` are keywords such as `eos_token`.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: token_id for token_id, text in enumerate(tokens)}
    for first, second in merges:  # the library may panic on these
        if not {first, second, first + second} <= vocabulary.keys():
            raise ModelError(
                f"the tokenizer is damaged: its merge {first!r} + {second!r} is not made of tokens"
            )
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    stages: list[Any]
    if pieces == "bytes":
        stages = [gpt2]
    elif pieces == "digits":
        stages = [pre_tokenizers.Digits(individual_digits=True), gpt2]
    else:
        stages = [pre_tokenizers.Split(Regex(pieces), behavior="isolated"), plain]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in tokens if text in control]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in tokens if text in added])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **(roles or {})
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    return fast


def stand_in_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """For random weights: reads any text byte by byte, and shows every token as some word.

    It needs no download. A prompt has as many tokens as bytes, which is more than a trained
    tokenizer would make of it.
    """
    from tokenizers import pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(special) + len(alphabet):
        raise ModelError(
            f"vocab_size={vocab_size} is too small for a stand-in tokenizer: it needs one token "
            f"for each byte and {len(special)} more; give token ids instead of text"
        )
    words = [f"Ġ~{number}" for number in range(vocab_size - len(special) - len(alphabet))]
    return byte_level_tokenizer(
        special + alphabet + words,
        [],
        control=special,
        roles={"bos_token": special[1], "eos_token": special[2], "pad_token": special[2]},
        chat_template=CHATML,
    )
