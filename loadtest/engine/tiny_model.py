"""Make a language model small enough for any machine: a Llama of random weights over bytes, as a GGUF file.

It speaks nonsense, but llama.cpp runs it as it runs any other: batching, KV cache, prefix reuse and cancellation are
real. One byte is a token. File format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3).
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

Tensor = npt.NDArray[np.float32]
Value = str | bool | int | float | list[str] | list[int]

SPECIALS: Final = ("<pad>", "<start>", "<end>")
SPOKEN: Final = b"abcdefghijklmnopqrstuvwxyz "
"""Bytes that it can say."""
TEMPLATE: Final = (
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
_ALIGNMENT: Final = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network; the default has 0.2 million weights."""

    width: int = 96
    layers: int = 2
    heads: int = 2
    hidden: int = 192
    context: int = 16_384

    @property
    def head_width(self) -> int:
        """Numbers of one attention head."""
        return self.width // self.heads


def write_model(path: Path, shape: Shape | None = None, seed: int = 0) -> None:
    """Write the model to *path*, whole or not at all; the same *shape* and *seed* give the same bytes."""
    chosen = shape or Shape()
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        _write_gguf(file, _metadata(chosen), _weights(chosen, np.random.default_rng(seed)))
    part.replace(path)


def vocabulary() -> list[str]:
    """Return the specials and 256 bytes, in the printable disguise that GPT-2's tokenizer gives to bytes.

    Bytes that print as themselves in Latin-1 do so; the others become the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [*SPECIALS, *(chr(b if b in printable else 0x100 + hidden.index(b)) for b in range(256))]


def _metadata(shape: Shape) -> dict[str, Value]:
    words = vocabulary()
    normal, control = 1, 3
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.alignment": _ALIGNMENT,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.width,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.hidden,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": shape.head_width,
        "llama.vocab_size": len(words),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [control] * len(SPECIALS) + [normal] * 256,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": SPECIALS.index("<start>"),
        "tokenizer.ggml.eos_token_id": SPECIALS.index("<end>"),
        "tokenizer.ggml.padding_token_id": SPECIALS.index("<pad>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _weights(shape: Shape, rng: np.random.Generator) -> dict[str, Tensor]:
    """Return the tensors by llama.cpp's names; a matrix maps its last axis to its first."""

    def matrix(rows: int, columns: int) -> Tensor:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(math.sqrt(columns))

    width, ones = shape.width, np.ones(shape.width, np.float32)
    size = len(vocabulary())
    # A row of zeros has logit 0; spoken bytes vary by ±6 around it, so that one of them nearly always wins.
    head = np.zeros((size, width), np.float32)
    head[[len(SPECIALS) + byte for byte in SPOKEN]] = 6 * matrix(len(SPOKEN), width)
    tensors = {"token_embd.weight": matrix(size, width), "output_norm.weight": ones, "output.weight": head}
    for layer in range(shape.layers):
        tensors |= {
            f"blk.{layer}.{name}.weight": tensor
            for name, tensor in {
                "attn_norm": ones,
                "attn_q": matrix(width, width),
                "attn_k": matrix(width, width),
                "attn_v": matrix(width, width),
                "attn_output": matrix(width, width),
                "ffn_norm": ones,
                "ffn_gate": matrix(shape.hidden, width),
                "ffn_up": matrix(shape.hidden, width),
                "ffn_down": matrix(width, shape.hidden),
            }.items()
        }
    return tensors


def _write_gguf(file: BinaryIO, metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    file.writelines(_string(key) + _typed(value) for key, value in metadata.items())
    offset = 0
    for name, tensor in tensors.items():
        sizes = struct.pack(f"<{tensor.ndim}Q", *reversed(tensor.shape))
        file.write(_string(name) + struct.pack("<I", tensor.ndim) + sizes + struct.pack("<IQ", 0, offset))
        offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
    for tensor in tensors.values():
        file.write(b"\0" * (-file.tell() % _ALIGNMENT) + tensor.tobytes())
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case [int(), *_]:
            items = b"".join(struct.pack("<i", item) for item in value)
            return struct.pack("<IIQ", _ARRAY, _INT32, len(value)) + items
        case _:
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(str(item)) for item in value)
