"""A tokenizer that needs no download: one token per byte, with a beginning, an end and a chat template."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BEGIN, END = 256, 257
VOCAB = 258
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes (in the order of the byte-level alphabet), 256 begins every text, 257 ends it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BEGIN)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = chat_template
    return made


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Ids are bytes, decoded as Llama's tokenizer does: a run of bytes is text if all of it is."""
    vocabulary = {f"<0x{number:02X}>": number for number in range(256)} | {"<unk>": BEGIN}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


WORDS = {word: number for number, word in enumerate(("<unk>", "▁", "▁return", "s", "▁x", "▁▁▁"))}


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Ids are ``WORDS`` and bytes, decoded as Llama's: the first space of a text is dropped."""
    vocabulary = WORDS | {f"<0x{number:02X}>": len(WORDS) + number for number in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save_tokenizer(folder: Path, chat_template: str | None = CHAT) -> Path:
    """Into a checkpoint folder."""
    byte_tokenizer(chat_template).save_pretrained(folder)
    return folder
