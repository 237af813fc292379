"""A from-scratch model so small that a whole job runs in seconds: a Llama of a few layers over single characters."""

from __future__ import annotations

import os

import torch

from apportion.lm.models import LanguageModel, save, wrap

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=<>()[]{}.,:;?!'\"\n"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<turn>", "<unk>")
CHAT = (
    "{% for m in messages %}{{ '<turn>' + m['role'][0] + ':' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>a:' }}{% endif %}"
)


def tokenizer() -> object:
    """One token a character, with padding, end and turn tokens and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def model(
    *, width: int = 64, layers: int = 2, heads: int = 4, key_heads: int = 2, context: int = 512, seed: int = 0
) -> LanguageModel:
    """A random Llama over `tokenizer()`, float32 on the CPU. About 0.1M parameters as it stands.

    width: of the residual stream. heads, key_heads: query heads and the key-value heads that they share.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),  # type: ignore[arg-type]
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return wrap(LlamaForCausalLM(config), words)


def write(folder: str | os.PathLike[str], **shape: int) -> LanguageModel:
    """`model(**shape)`, saved as an ordinary Hugging Face folder."""
    made = model(**shape)
    save(made, folder)
    return made
