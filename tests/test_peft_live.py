"""peft itself, where it is installed: it loads the adapters that jaxpar writes, and has the same logits."""

import dataclasses
import os
import warnings

import numpy as np
import pytest

from jaxpar.huggingface import write_adapters, write_model
from jaxpar.models import lora, transformer
from jaxpar.models.lora import Lora
from tests.support import tiny_transformer as tiny
from tests.support.oracle import assert_same
from tests.support.tiny_lora import make_params

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

CONFIGS = {
    "gpt2": tiny.FAMILIES["gpt2"],
    "llama": tiny.FAMILIES["llama"],
    "bloom": dataclasses.replace(tiny.FAMILIES["bloom"], mlp_dim=None),
} | {
    name: dataclasses.replace(tiny.FAMILIES["llama"], **tiny.SWITCHES[name])
    for name in ("qwen2", "qwen3", "olmo2")
}


@pytest.mark.parametrize(
    "targets", [tuple(transformer.LAYER_WEIGHTS), ("w_out",)], ids=["all", "w_out"]
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_peft_has_the_logits_of_the_adapters_beside_and_merged_into_the_model(
    tmp_path, config, targets
):
    params = make_params(
        config, Lora(2, {name: transformer.LAYER_WEIGHTS[name] for name in targets}, alpha=3.0)
    )
    tokens = tiny.make_batch()["tokens"]
    want = np.asarray(transformer.make_model(config).apply(params, {"tokens": tokens}))
    write_model(tmp_path / "base", config, lora.without_factors(params))
    write_adapters(tmp_path / "adapter", config, params, base=str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    num_modules = sum("lora_A" in name for name in adapted.state_dict())
    assert num_modules == len(peft.get_peft_model_state_dict(adapted)) / 2, (
        "every tensor was loaded"
    )
    with torch.no_grad():
        rows = torch.tensor(tokens.astype(np.int64))
        assert_same(adapted(rows).logits.numpy(), want, within=1e-5)
        assert_same(adapted.merge_and_unload()(rows).logits.numpy(), want, within=1e-5)
    write_model(tmp_path / "merged", config, lora.merge(params))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert_same(merged(rows).logits.numpy(), want, within=1e-5)
