"""Every family's shapes and linear modules, held equal to the transformers module on the meta device.

Names, shapes, order, ties and counts. The small configurations are in family_cases.py; the classes' own default sizes
and every model of the catalogue are slow tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overspill.catalog.models import CatalogModel, every_model
from overspill.model import FAMILIES, ModelShape
from tests.unit.family_cases import CASES, T5

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

#: The class that a family's catalogue rows and defaults are built with, where it is no causal language model.
CLASSES = {family: name for family, name, _ in reversed(CASES)}
#: Families whose configuration class has no default size that can be built: an option that must be given.
WITHOUT_DEFAULTS = {"deberta-v2"}
#: Families that transformers has no class for; what holds them is in test_model_facts.py.
WITHOUT_CLASS = {"llmfoundry_mpt"}
#: What transformers itself needs beside the class's defaults to build a model.
NEEDED: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "glm": {"pad_token_id": 0},
    "mistral3": {"tie_word_embeddings": False},
    "internvl": {"tie_word_embeddings": False},
}


def module_of(family: str, name: str | None, sizes: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        if name is None:
            return config, transformers.AutoModelForCausalLM.from_config(config)
        return config, getattr(transformers, name)(config)


def linears_of(module: Any) -> dict[str, tuple[int, int, bool]]:
    conv1d = transformers.pytorch_utils.Conv1D
    found = {}
    for name, part in module.named_modules():
        # nn.MultiheadAttention multiplies with its out_proj's weight itself, but it is a Linear all the same.
        if isinstance(part, torch.nn.Linear):
            found[name] = (part.in_features, part.out_features, part.bias is not None)
        elif isinstance(part, conv1d):
            found[name] = (part.nx, part.nf, True)
    return found


def assert_equal(shape: ModelShape, module: Any) -> None:
    everything = [(name, tuple(p.shape)) for name, p in module.named_parameters(remove_duplicate=False)]
    owned = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    assert [(p.name, p.shape) for p in shape.parameters] == everything
    assert [(p.name, p.shape) for p in shape.owned] == owned
    assert shape.total_numel == sum(p.numel() for p in module.parameters())
    assert ModelShape.from_parameters(owned).blocks() == shape.blocks()
    assert shape.facts is not None
    linears = list(shape.facts.linears())
    assert {at.name: (at.in_features, at.out_features, at.bias) for at in linears if not at.is_expert} == linears_of(
        module
    )
    experts = {at.name: at.weight_numel for at in linears if at.is_expert}
    assert experts == {name: p.numel() for name, p in module.named_parameters() if name in experts}


@pytest.mark.parametrize(("family", "name", "sizes"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_shape_from_the_config_equals_the_module(family: str, name: str | None, sizes: dict[str, Any]) -> None:
    config, module = module_of(family, name, sizes)
    assert_equal(ModelShape.from_config(sizes | {"model_type": family}), module)
    if family != "clip":  # the nested sizes of CLIP's own dictionary are spread over two generations of keys
        assert_equal(ModelShape.from_config(json.loads(config.to_json_string(use_diff=False))), module)


def test_every_known_family_is_tested() -> None:
    assert {family for family, _, _ in CASES} == set(FAMILIES) - WITHOUT_CLASS


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - WITHOUT_DEFAULTS - WITHOUT_CLASS))
def test_defaults_left_out_of_a_config_are_those_of_transformers(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    full = config.to_dict()
    optional = {"num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "n_inner"}
    optional -= set(NEEDED.get(family, {})) & {"tie_word_embeddings"}
    shape = ModelShape.from_config({key: value for key, value in full.items() if key not in optional})
    assert shape.parameters == ModelShape.from_config(full).parameters


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - WITHOUT_DEFAULTS - WITHOUT_CLASS))
def test_the_default_sizes_of_a_family_equal_the_module(family: str) -> None:
    config, module = module_of(family, CLASSES[family], NEEDED.get(family, {}))
    assert_equal(ModelShape.from_config(config.to_dict()), module)


#: T5 v1.1 and Flan-T5, whose head transformers 5.24 ties whatever the file says (see the next test).
UNTIED_T5 = [m for m in every_model() if m.config["model_type"] == "t5" and not m.config["tie_word_embeddings"]]


@pytest.mark.slow
@pytest.mark.parametrize("model", [m for m in every_model() if m not in UNTIED_T5], ids=lambda m: m.name)
def test_a_model_of_the_catalogue_equals_the_module(model: CatalogModel) -> None:
    sizes = {key: value for key, value in model.config.items() if key != "model_type"}
    family = model.config["model_type"]
    _, module = module_of(family, CLASSES[family], NEEDED.get(family, {}) | sizes)
    assert_equal(ModelShape.from_config(model.config), module)


def test_the_head_of_a_t5_that_says_it_is_not_tied_is_counted() -> None:
    # Its files hold lm_head.weight; the config class of transformers 5.24 says "tied" whatever the file does.
    shape = ModelShape.from_config(T5 | {"model_type": "t5", "tie_word_embeddings": False})
    tied = ModelShape.from_config(T5 | {"model_type": "t5"})
    assert shape.total_numel - tied.total_numel == T5["vocab_size"] * T5["d_model"]


def test_a_mistral_3_file_that_does_not_say_it_is_tied_has_a_head_of_its_own() -> None:
    # So are its weights; the outer config class of transformers 5.24 says "tied", and is overruled when it loads them.
    sizes = next(sizes for family, _, sizes in CASES if family == "mistral3")
    said = {key: value for key, value in sizes.items() if key != "tie_word_embeddings"} | {"model_type": "mistral3"}
    assert not ModelShape.from_config(said).tied_head
    assert ModelShape.from_config(said | {"text_config": said["text_config"] | {"tie_word_embeddings": True}}).tied_head


def test_an_old_qwen_vl_file_that_holds_the_text_sizes_at_its_top_is_read() -> None:
    sizes = next(sizes for family, _, sizes in CASES if family == "qwen2_vl")
    flat = {"model_type": "qwen2_vl", "vision_config": sizes["vision_config"], **sizes["text_config"]}
    assert (
        ModelShape.from_config(flat).parameters == ModelShape.from_config(sizes | {"model_type": "qwen2_vl"}).parameters
    )


def test_the_table_of_config_defaults_is_that_of_the_installed_transformers() -> None:
    tool = Path(__file__).parents[2] / "tools" / "make_config_defaults.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
