"""A second model that guesses: it is found to fit, loaded, and given a KV cache, as other parts that guess are."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from triptych import host
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_file import ConfigFile
from triptych.config import CacheConfig, ModelConfig, ParallelConfig, SpeculativeConfig
from triptych.errors import ConfigError, FeatureDisabled, ModelError
from triptych.types.facts import WorkerFacts
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.layers.attention import check_layers
from triptych_services.worker.layers.weights import weight_bytes
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.models.choose import choose_architecture
from triptych_services.worker.runner.drafting.draft_model import DraftModel, DraftModelProposer
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import KvPlan, plan_kv_cache
from triptych_services.worker.sampling.params import TokenHistory

log = logging.getLogger(__name__)

_TOKENIZER_FILE = "tokenizer.json"
_MIB = 1 << 20
_ANY_BYTES = 1 << 60


class DraftSource:
    """Loads the draft model and creates its proposer, as often as a worker wakes. Owned by the `RunnerFactory`.

    It holds the model until it has created a proposer, which owns it from then on: a runner that sleeps drops both.
    """

    def __init__(self, config: ResolvedConfig, directory: Path, draft_directory: Path) -> None:
        """Find out whether the model can guess for another one; reads no weights.

        Args:
            config: That of the model that is guessed for.
            directory: Directory of that model.
            draft_directory: Directory of the one that guesses.

        Raises:
            ModelError: A file is missing or not understood.
            FeatureDisabled: The model cannot guess for the other one; says why.
            ConfigError: `speculative.cache_gib` holds no block.
        """
        self._directory = draft_directory
        self._name = config.engine.speculative.model
        self._check_vocabulary(config.architecture, directory)
        architecture = choose_architecture(draft_directory, config.engine.model.backend)
        self._check_architecture(architecture, config.architecture)
        self._config = config_of(config, architecture)
        self._kv = self._plan_cache()
        self._model: CausalLM | None = None
        """The loaded model, until a proposer owns it."""
        self.weight_bytes = 0
        """Bytes of its weights, once it was loaded."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of its KV cache."""
        return self._kv.shape.num_blocks * self._kv.shape.block_bytes

    def load(self) -> None:
        """Read the weights.

        Raises:
            ModelError: A file is missing, cut short or not understood.
            ConfigError: No memory is left for its KV cache.
        """
        load, model = self._config.engine.load, self._config.engine.model
        checkpoint = open_checkpoint(
            self._directory,
            format=load.format if load.format == "random" else "auto",
            seed=model.seed,
            architecture=self._config.architecture,
        )
        self._model = load_model(self._config, checkpoint)
        assert isinstance(self._model, nn.Module), "the contract of CausalLM"
        check_layers(self._model, create_attention(self._config))
        self.weight_bytes = weight_bytes(self._model)
        check_memory(self.cache_bytes)
        log_loaded(self._name, self.weight_bytes, self._config, self._kv)

    def create(self, facts: WorkerFacts, history: TokenHistory) -> DraftModelProposer:
        """Create the proposer of a runner; reads the weights again where another one had them."""
        if self._model is None:
            self.load()
        assert self._model is not None, "loaded"
        model, self._model = self._model, None
        return DraftModelProposer(draft_model(model, self._config, self._kv), facts, history=history)

    def _check_vocabulary(self, architecture: ModelArchitecture, directory: Path) -> None:
        """Raise FeatureDisabled unless both models have the same tokens."""
        wanted, own = read_vocabulary(directory), read_vocabulary(self._directory)
        differing = sorted(wanted.items() ^ own.items(), key=lambda item: (item[1], item[0]))
        if differing:
            token, token_id = differing[0]
            raise self._refused(
                f"its tokenizer is another one than that of {directory}: {len(differing)} entries differ, the first is "
                f"token {token_id}, {token[:50]!r}; name a model of the same family"
            )

    def _check_architecture(self, own: ModelArchitecture, architecture: ModelArchitecture) -> None:
        if own.head != "logits" or own.encoder is not None:
            raise self._refused(f"{own.name} generates nothing; name a model that does")
        if own.keeps_states:
            raise self._refused(
                f"{own.name} keeps recurrent states, which cannot go back behind a wrong guess; name one without them"
            )
        if set(own.eos_token_ids) != set(architecture.eos_token_ids):
            raise self._refused(
                f"it ends with the tokens {sorted(own.eos_token_ids)}, and the model with "
                f"{sorted(architecture.eos_token_ids)}; name one that ends with the same, or make eos_token_id in its "
                "generation_config.json equal"
            )

    def _plan_cache(self) -> KvPlan:
        plan = plan_cache(self._config)
        if len(plan.shape.groups) > 1:
            raise self._refused(
                f"the layers of {self._config.architecture.name} keep different amounts of a token; name one with "
                "layers that are alike"
            )
        return plan

    def _refused(self, why: str) -> FeatureDisabled:
        return FeatureDisabled(f"speculative.model = {self._name}", f"{why}, or leave it empty")


def plan_cache(config: ResolvedConfig) -> KvPlan:
    """Return the sizes of a KV cache within `speculative.cache_gib`.

    Raises:
        ConfigError: It holds no block.
    """
    plan, cache_gib = plan_kv_cache(config, _ANY_BYTES), config.engine.speculative.cache_gib
    num_blocks = min(plan.shape.num_blocks, int(cache_gib * 2**30) // plan.shape.block_bytes)
    if num_blocks < 2:
        raise ConfigError(
            f"speculative.cache_gib: {cache_gib:g} GiB hold {num_blocks} blocks of {plan.shape.block_bytes} bytes; "
            f"set it to {2 * plan.shape.block_bytes / 2**30:.4f} or more"
        )
    return replace(plan, shape=replace(plan.shape, num_blocks=num_blocks))


def check_memory(cache_bytes: int) -> None:
    """Raise ConfigError if no memory is left for a cache."""
    if cache_bytes > (free_bytes := host.free_memory()):
        raise ConfigError(
            f"speculative.cache_gib: {cache_bytes // _MIB} MiB, but {free_bytes // _MIB} MiB are free after "
            "loading; lower it"
        )


def log_loaded(name: str, num_bytes: int, config: ResolvedConfig, kv: KvPlan) -> None:
    log.info(
        "%s guesses: %d MiB of weights (%s), %d MiB for keys and values of %d tokens",
        name,
        num_bytes // _MIB,
        config.quantization,
        kv.shape.num_blocks * kv.shape.block_bytes // _MIB,
        (kv.shape.num_blocks - 1) * kv.shape.block_size,
    )


def draft_model(model: CausalLM, config: ResolvedConfig, kv: KvPlan) -> DraftModel:
    """Return what guesses with a cache, which is allocated here."""
    return DraftModel(
        model,
        create_attention(config),
        allocate_kv_cache(kv.shape, torch.device("cpu"), kv.places),
        kv.shape,
        kv.max_model_len,
        config.architecture.vocab_size,
        config.architecture.eos_token_ids,
        config.engine.worker.enforce_eager,
    )


def config_of(
    config: ResolvedConfig,
    architecture: ModelArchitecture,
    *,
    quantization: str = "auto",
    dtype: str = "auto",
) -> ResolvedConfig:
    """Return the config of a checkpoint that guesses beside a model.

    Args:
        config: That of the model.
        architecture: That of what guesses.
        quantization: Form of its weights; auto: the fastest one, since it decides no token.
    """
    engine = config.engine
    longest = engine.model.max_model_len or config.architecture.max_context
    model = ModelConfig(
        model=engine.speculative.model,
        quantization=quantization,
        dtype=dtype,
        backend=engine.model.backend,
        max_model_len=min(longest, architecture.max_context),
        seed=engine.model.seed,
    )
    cache = CacheConfig(groups="one", memory_fraction=1.0)
    speculative = SpeculativeConfig(enabled="false", cache_gib=engine.speculative.cache_gib)
    engine = replace(engine, model=model, cache=cache, speculative=speculative, parallel=ParallelConfig())
    return replace(resolve_config(engine, architecture), guesses_for_another=True)


def read_vocabulary(directory: Path) -> dict[str, int]:
    """Return each token of a tokenizer.json, added ones included, with its id.

    Raises:
        ModelError: There is no such file, or it has no vocabulary.
    """
    path = directory / _TOKENIZER_FILE
    tokenizer = ConfigFile.read(path).values
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # with the score of each
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return {
            **vocabulary,
            **{token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()},
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: has no vocabulary that can be read: {error!r}") from error
