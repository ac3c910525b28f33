"""Trains the byte-level BPE tokenizer of the test models, with ChatML's special tokens and chat template.

Byte-level, so that any text can be encoded; trained on `text`, so that the same words cost a token each.
"""

from typing import TYPE_CHECKING, Final

from elasticmoe.runtime.cli.models.presets import VOCAB_TOKENS
from elasticmoe.runtime.cli.models.text import sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TRAINING_SENTENCES: Final = 4000
_ROLES: Final = "system\nuser\nassistant\n"


def train_tokenizer(max_position: int) -> "PreTrainedTokenizerFast":
    """Return a fast tokenizer of exactly `VOCAB_TOKENS` tokens; the same for every call."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*sentences(_TRAINING_SENTENCES, seed=0), *[_ROLES] * 100], trainer)
    assert bpe.get_vocab_size() == VOCAB_TOKENS, f"need {VOCAB_TOKENS} tokens, the text gave {bpe.get_vocab_size()}"
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=max_position,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
