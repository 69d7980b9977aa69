"""The reader of config.json for each architecture; its module is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_file import ConfigFile

ENTRY_POINT_GROUP = "triptych.families"
"""Entry points of installed packages that read config.json: name = architecture, value = `module:function`."""

CLASSIFIER_SUFFIX = "ForSequenceClassification"
"""Ending of the architectures that have a classifier."""

_HEADS = {"Model": "none", CLASSIFIER_SUFFIX: "score"}
"""Ending of other architectures on the body of a decoder -> their head."""

ReadFamily = Callable[[ConfigFile], ModelArchitecture]
"""Describes the decoder of a config.json. Raises ModelError for what is missing or odd, FeatureDisabled for what the
family has and this project has not built."""

_GROUPS = {
    "llama": {
        "ApertusForCausalLM": "apertus",
        "ArceeForCausalLM": "arcee",
        "Ernie4_5ForCausalLM": "ernie",
        "Exaone4ForCausalLM": "exaone",
        "GlmForCausalLM": "glm",
        "Glm4ForCausalLM": "glm4",
        "GraniteForCausalLM": "granite",
        "GraniteSWAForCausalLM": "granite",
        "HeliumForCausalLM": "helium",
        "HunYuanDenseV1ForCausalLM": "hunyuan",
        "LlamaForCausalLM": "llama",
        "MiMoForCausalLM": "mimo",
        "MinistralForCausalLM": "mistral",
        "Ministral3ForCausalLM": "mistral",
        "MistralForCausalLM": "mistral",
        "OlmoForCausalLM": "olmo",
        "Olmo2ForCausalLM": "olmo2",
        "Olmo3ForCausalLM": "olmo2",
        "Phi3ForCausalLM": "phi3",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "SeedOssForCausalLM": "seed_oss",
        "SmolLM3ForCausalLM": "smollm3",
    },
    "experts": {
        "FlexOlmoForCausalLM": "olmoe",
        "GptOssForCausalLM": "gpt_oss",
        "LagunaForCausalLM": "laguna",
        "MellumForCausalLM": "mellum",
        "MiniMaxM2ForCausalLM": "minimax_m2",
        "MixtralForCausalLM": "mixtral",
        "OlmoeForCausalLM": "olmoe",
        "PhimoeForCausalLM": "phimoe",
        "Qwen2MoeForCausalLM": "qwen2_moe",
        "Qwen3MoeForCausalLM": "qwen3_moe",
    },
    "shared_experts": {
        "AfmoeForCausalLM": "afmoe",
        "Dots1ForCausalLM": "dots1",
        "Ernie4_5_MoeForCausalLM": "ernie_moe",
        "ExaoneMoEForCausalLM": "exaone_moe",
        "ExaoneMoeForCausalLM": "exaone_moe",
        "Glm4MoeForCausalLM": "glm4_moe",
        "GraniteMoeForCausalLM": "granite_moe",
        "GraniteMoeSharedForCausalLM": "granite_moe",
        "GraniteMoeSWAForCausalLM": "granite_moe",
        "HunYuanMoEV1ForCausalLM": "hunyuan_moe",
        "HYV3ForCausalLM": "hunyuan3",
        "Llama4ForCausalLM": "llama4",
        "SolarOpenForCausalLM": "solar_open",
    },
    "convolutions": {
        "Lfm2ForCausalLM": "lfm2",
        "Lfm2MoeForCausalLM": "lfm2",
        "Lfm3ForCausalLM": "lfm3",
    },
    "gemma": {
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
        "Gemma3ForConditionalGeneration": "gemma3_with_images",
        "Gemma4ForCausalLM": "gemma4",
        "Gemma4ForConditionalGeneration": "gemma4_with_images",
        "GemmaForCausalLM": "gemma",
    },
    "hybrid": {
        "BambaForCausalLM": "bamba",
        "FalconH1ForCausalLM": "falcon_h1",
        "GraniteMoeHybridForCausalLM": "granite_hybrid",
        "JambaForCausalLM": "jamba",
        "NemotronHForCausalLM": "nemotron_h",
    },
    "latent": {
        "DeepseekV2ForCausalLM": "deepseek_v2",
        "DeepseekV3ForCausalLM": "deepseek_v3",
        "DeepseekV32ForCausalLM": "deepseek_v32",
        "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
        "GlmMoeDsaForCausalLM": "glm_moe_dsa",
        "MiniCPM3ForCausalLM": "minicpm3",
        "Mistral3ForConditionalGeneration": "mistral_with_images",
        "Mistral4ForCausalLM": "mistral4",
        "YoutuForCausalLM": "youtu",
    },
    "parallel": {
        "CohereForCausalLM": "cohere",
        "Cohere2ForCausalLM": "cohere",
        "Cohere2MoeForCausalLM": "cohere_moe",
        "FalconForCausalLM": "falcon",
        "GPTJForCausalLM": "gptj",
        "GPTNeoXForCausalLM": "gpt_neox",
        "PhiForCausalLM": "phi",
        "StableLmForCausalLM": "stablelm",
    },
    "plain": {
        "BloomForCausalLM": "bloom",
        "GPT2LMHeadModel": "gpt2",
        "GPTBigCodeForCausalLM": "gpt_bigcode",
        "MptForCausalLM": "mpt",
        "NemotronForCausalLM": "nemotron",
        "OPTForCausalLM": "opt",
        "Starcoder2ForCausalLM": "starcoder2",
    },
    "recurrent": {
        "MambaForCausalLM": "mamba",
        "Mamba2ForCausalLM": "mamba2",
        "OlmoHybridForCausalLM": "olmo_hybrid",
        "Qwen3NextForCausalLM": "qwen3_next",
        "Qwen3_5ForCausalLM": "qwen3_5",
        "Qwen3_5ForConditionalGeneration": "qwen3_5_with_images",
        "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration": "qwen3_5_with_images",
    },
    "with_images": {
        "Idefics3ForConditionalGeneration": "idefics3",
        "InternVLForConditionalGeneration": "llava",
        "Lfm2VlForConditionalGeneration": "llava",
        "Llama4ForConditionalGeneration": "llama4",
        "LlavaForConditionalGeneration": "llava",
        "LlavaNextForConditionalGeneration": "llava",
        "LlavaOnevisionForConditionalGeneration": "llava",
        "Qwen2VLForConditionalGeneration": "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
        "Qwen3VLForConditionalGeneration": "qwen3_vl",
        "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
        "SmolVLMForConditionalGeneration": "idefics3",
    },
}
"""Module in this package -> architecture of a decoder -> its function."""

_ENCODERS = {
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "BertModel": "bert",
    "CamembertForMaskedLM": "roberta",
    "CamembertForSequenceClassification": "roberta",
    "CamembertModel": "roberta",
    "DistilBertForMaskedLM": "distilbert",
    "DistilBertForSequenceClassification": "distilbert",
    "DistilBertModel": "distilbert",
    "GteForMaskedLM": "gte",
    "GteForSequenceClassification": "gte",
    "GteModel": "gte",
    "JinaEmbeddingsV3ForMaskedLM": "jina",
    "JinaEmbeddingsV3ForSequenceClassification": "jina",
    "JinaEmbeddingsV3Model": "jina",
    "MPNetForMaskedLM": "mpnet",
    "MPNetForSequenceClassification": "mpnet",
    "MPNetModel": "mpnet",
    "ModernBertForMaskedLM": "modernbert",
    "ModernBertForSequenceClassification": "modernbert",
    "ModernBertModel": "modernbert",
    "NomicBertForMaskedLM": "nomic",
    "NomicBertForSequenceClassification": "nomic",
    "NomicBertModel": "nomic",
    "RobertaForMaskedLM": "roberta",
    "RobertaForSequenceClassification": "roberta",
    "RobertaModel": "roberta",
    "XLMRobertaForMaskedLM": "roberta",
    "XLMRobertaForSequenceClassification": "roberta",
    "XLMRobertaModel": "roberta",
}
"""Architecture of an encoder -> its function in the module `encoders`."""

_name_to_reader: dict[str, str] = {
    architecture: f"triptych.checkpoint.families.{module}:{function}"
    for module, functions in {**_GROUPS, "encoders": _ENCODERS}.items()
    for architecture, function in functions.items()
}


def _with_other_heads(architecture: str) -> dict[str, str]:
    """Return name -> head of the architectures that have the body of a decoder, as transformers calls them."""
    for ending in ("ForCausalLM", "LMHeadModel"):
        if architecture.endswith(ending):
            body = architecture.removesuffix(ending)
            body = {"Gemma3": "Gemma3Text", "Gemma4": "Gemma4Text"}.get(body, body)
            return {body + suffix: head for suffix, head in _HEADS.items()}
    return {}


_name_to_head: dict[str, str] = {}
for _decoder, _reader in list(_name_to_reader.items()):
    for _name, _head in _with_other_heads(_decoder).items():
        _name_to_head[_name] = _head
        _name_to_reader[_name] = _reader


_OTHER_SPELLINGS = {
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "NewForMaskedLM": "GteForMaskedLM",
    "NewForSequenceClassification": "GteForSequenceClassification",
    "NewModel": "GteModel",
}
"""Names of the classes that published checkpoints came with -> those that transformers gave them."""


@dataclass(frozen=True, slots=True)
class Family:
    """The meaning of the keys of some architectures."""

    read: ReadFamily
    knows_all_keys: bool
    """Whether a key that it has not read would change the model's numbers without a word."""


def own_architectures() -> tuple[str, ...]:
    """Return the architectures of decoders that have a family here."""
    return tuple(sorted(_name_to_reader.keys() - _ENCODERS.keys()))


def own_encoders() -> tuple[str, ...]:
    """Return the architectures of encoders that have a family here."""
    return tuple(sorted(_ENCODERS))


def head_of(architecture: str) -> str:
    """Return what follows the body of an architecture, as `ModelArchitecture.head` has it."""
    return _name_to_head.get(architecture, "logits")


def find_family(config: ConfigFile) -> Family:
    """Return the family of an architecture: this project's, else an installed package's.

    A model of another package that has no family there is read as a Llama; whatever else its keys say is in
    `ModelArchitecture.config`.

    Raises:
        ModelError: config.json names no architecture.
    """
    name = architecture_name(config)
    reader = _name_to_reader.get(name)
    if reader is None:  # looking through all installed packages takes milliseconds
        reader = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}.get(name)
    module_name, function_name = (reader or _name_to_reader["LlamaForCausalLM"]).split(":")
    return Family(getattr(import_module(module_name), function_name), knows_all_keys=reader is not None)


def architecture_name(config: ConfigFile) -> str:
    """Return the only entry of `architectures`.

    Raises:
        ModelError: There is none, or there are several.
    """
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        config.fail("architectures", names, "must be a list of one name, such as ['LlamaForCausalLM']")
    return _OTHER_SPELLINGS.get(names[0], names[0])
