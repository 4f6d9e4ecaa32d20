"""Language models of `transformers` without any special support, under every kind of layout."""

from pathlib import Path

import pytest

from tests import running

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SMALL = (
    "hidden_size: 32, num_hidden_layers: 4, num_attention_heads: 4, vocab_size: 256, "
    "max_position_embeddings: 64"
)
WIDE = f"{SMALL}, intermediate_size: 64"
GROUPED = f"{WIDE}, num_key_value_heads: 2"
NO_DROPOUT = "hidden_dropout: 0, attention_dropout: 0"
GPT = "n_embd: 32, n_layer: 4, n_head: 4, n_positions: 64, rotary_dim: 4, vocab_size: 256"
ARCHITECTURES = {
    "bloom": f"hidden_size: 32, n_layer: 4, n_head: 4, vocab_size: 256, {NO_DROPOUT}",
    "cohere": WIDE,
    "falcon": f"{SMALL}, alibi: false, new_decoder_architecture: false, {NO_DROPOUT}",
    "gemma2": f"{GROUPED}, head_dim: 8",
    "glm": f"{GROUPED}, head_dim: 8, pad_token_id: 0",
    "gpt_neox": f"{WIDE}, {NO_DROPOUT}",
    "gptj": f"{GPT}, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0",
    "olmo2": WIDE,
    "opt": f"{SMALL}, word_embed_proj_dim: 32, ffn_dim: 64, dropout: 0",
    "phi": f"{WIDE}, resid_pdrop: 0, embd_pdrop: 0, attention_dropout: 0",
    "stablelm": f"{WIDE}, num_key_value_heads: 4",
    "starcoder2": f"{GROUPED}, residual_dropout: 0, embedding_dropout: 0, attention_dropout: 0",
}
"""Configurations by the name in `transformers`.

They have no dropout, which draws other random numbers on each layout.
"""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_under_every_layout_as_on_one_device(
    name: str, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a penny saved is a penny earned; " * 600)
    model = f"model: {name}, config: {{{ARCHITECTURES[name]}}}"
    arguments = f"task_args={{{model}, data: {text}, tokenizer: bytes, sequence_length: 32}}"
    running.trireme(
        "parity",
        "task=huggingface",
        arguments,
        "train.global_batch_size=8",
        *("--steps", "3", "--workers", "2", "--rows", "ddp,fsdp,tensor,pipeline"),
        timeout=900,
    ).expect()
