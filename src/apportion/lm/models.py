"""Language models from and to ordinary Hugging Face folders: what a model is here, `load`, `wrap` and `save`."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apportion.core.errors import ApportionError, ApportionWarning, UnknownName
from apportion.lm import layers
from apportion.lm.packing import packs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model and what is needed to sample from it.

    model: the transformers (or peft) module, in evaluation mode: no dropout, so that sampler and trainer agree.
    stop_ids: every token id that ends a response. pad_id: the id written where there is no token.
    context_length: the most tokens of prompt and response together, None where the model states none.
    packed: groups run without padding and share their prompt (`apportion.lm.packing`), as a probe of this very
        model has shown to be right; otherwise rows are padded and go through the model's own forward.
    """

    model: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    pad_id: int
    context_length: int | None
    packed: bool

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def adapted(self) -> bool:
        """Whether a LoRA adapter is on top: the model without it is then the reference, at no extra memory."""
        return hasattr(self.model, "disable_adapter")

    @property
    def causal(self) -> Any:
        """The transformers module itself, below the adapter if there is one."""
        return self.model.get_base_model() if self.adapted else self.model

    @contextmanager
    def frozen(self) -> Iterator[LanguageModel]:
        """The model with its adapter off, inside the `with`. Raises ApportionError when there is no adapter."""
        if not self.adapted:
            raise ApportionError("the model has no adapter to switch off; give reference=models.load(...)")
        with self.model.disable_adapter():
            yield self


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    device: str | None = None,
    gguf_file: str | None = None,
    lora: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """The model and tokenizer at a local folder or of a hub name.

    dtype: of the weights, "float32" or "bfloat16" (log-probabilities are float32 either way).
    device: "cpu", "cuda", or None for CUDA where there is one.
    gguf_file: a GGUF file inside the folder or repository; its weights are unpacked.
    lora: fields of peft.LoraConfig (such as {"r": 8}); only the adapter is then trained.

    Raises ApportionError for a model that is not there or broken, an unknown dtype or device, and what `wrap` refuses.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    place = _device(device)
    name = os.fspath(path_or_name)
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ApportionError(f"there is no model folder {name}; give a Hugging Face folder or a hub name")
    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype], **options)
    except Exception as error:  # whatever transformers, safetensors, gguf or the hub client raise
        raise ApportionError(f"cannot load the model {name}: {_one_line(error)}; {_way_out(name)}") from error
    if gguf_file:
        model = _plain(model)
    model = torch.nn.Module.to(model, place)  # transformers wraps its own `to` for quantised models only
    return wrap(model, tokenizer, lora=lora)


def wrap(model: Any, tokenizer: Any, *, lora: Mapping[str, Any] | None = None) -> LanguageModel:
    """A LanguageModel of a transformers model and tokenizer that are already in memory.

    Warns (ApportionWarning) where the tokenizer has no padding token (the end token takes its place) and where the
    model cannot run packed. Raises ApportionError for a tokenizer without an end token and for wrong LoRA fields.
    """
    stop_ids = _stop_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = stop_ids[0]
        _say(f"the tokenizer has no padding token; its end token {pad_id} takes that place (it is never attended to)")
    model.eval()
    layers.use(model)
    context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    packed = packs(model)
    if not packed:
        _say(
            f"{type(model).__name__} does not compute packed rows as it computes single ones; "
            "rows are padded and share no prompt: right, but slower"
        )
    if lora is not None:
        model = _with_lora(model, lora)
    return LanguageModel(model, tokenizer, stop_ids, pad_id, context_length, packed)


def save(language_model: LanguageModel, folder: str | os.PathLike[str]) -> None:
    """Write an ordinary Hugging Face folder (a LoRA adapter merged in): whole, or not there at all.

    An older folder of that name is replaced. Raises ApportionError when the disk refuses.
    """
    folder = Path(folder)
    part, old = folder.with_name(folder.name + ".part"), folder.with_name(folder.name + ".old")
    try:
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        with _quiet(), _merged(language_model) as (model, state):
            model.save_pretrained(part, state_dict=state)
        language_model.tokenizer.save_pretrained(part)
        for file in part.iterdir():
            _sync(file)
        if folder.exists():
            os.replace(folder, old)
        os.replace(part, folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ApportionError(f"cannot write the model {folder}: {error.strerror or error}; make room") from error


@contextmanager
def _merged(language_model: LanguageModel) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The transformers module and its plain state, the adapter's product added for the time of the `with`."""
    if not language_model.adapted:
        yield language_model.model, language_model.model.state_dict()
        return
    adapter = language_model.model
    base = {k: v.clone() for k, v in adapter.get_base_model().state_dict().items() if ".base_layer." in k}
    adapter.merge_adapter()
    try:
        state = adapter.get_base_model().state_dict()
        plain = {k.replace(".base_layer.", "."): v for k, v in state.items() if ".lora_" not in k}
        yield adapter.get_base_model(), plain
    finally:
        adapter.unmerge_adapter()
        # Adding and taking away again rounds, and to save a model must not change it.
        state = adapter.get_base_model().state_dict()
        with torch.no_grad():
            for name, weight in base.items():
                state[name].copy_(weight)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its own progress bars: a job has one display, and a load of seconds needs none."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise UnknownName("device", device, ("cpu", "cuda"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ApportionError(f"device is '{device}', but PyTorch sees no GPU here; give device='cpu'")
    return torch.device(device)


def _stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every end id, the tokenizer's first: chat models end a turn by another token than a text."""
    known: list[int] = []
    for ids in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        known += ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
    if not known:
        raise ApportionError("the tokenizer has no end token, so no response could end; set tokenizer.eos_token")
    return tuple(dict.fromkeys(known))


def _plain(model: Any) -> Any:
    """The same weights in a model built from its plain configuration: one that came from GGUF refuses to be saved."""
    config = model.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    state = model.state_dict()
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(state, assign=True)
    for name, buffer in model.named_buffers():  # those that no state dict holds, such as rotary frequencies
        owner, _, leaf = name.rpartition(".")
        plain.get_submodule(owner)._buffers[leaf] = buffer
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _with_lora(model: Any, fields: Mapping[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    try:
        config = LoraConfig(task_type="CAUSAL_LM", **fields)
        adapted = get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        raise ApportionError(f"lora is {dict(fields)}: {_one_line(error)}; give fields of peft.LoraConfig") from error
    return adapted.eval()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _way_out(name: str) -> str:
    if Path(name).exists():
        return "the folder is broken or a download was cut short; fetch or write it again"
    return "check the name, or give a local Hugging Face folder"


def _say(text: str) -> None:
    warnings.warn(text, ApportionWarning, stacklevel=4)


def use_threads(count: int) -> None:
    """Have PyTorch use so many cores of this machine. The last bits of a run on a CPU depend on their number."""
    torch.set_num_threads(count)
