"""A second model or a layer of the checkpoint that guesses: it is found to fit, loaded, and given a KV cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.mtp import find_mtp
from triptych.config import CacheConfig, ModelConfig, SpeculativeConfig
from triptych.errors import ConfigError, FeatureDisabled, ModelError
from triptych.types.facts import WorkerFacts
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context import host
from triptych_services.worker.context.device import TORCH_DTYPES, resolve_config
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.layers.attention import check_layers
from triptych_services.worker.layers.weights import weight_bytes
from triptych_services.worker.loader.load import load_model, load_mtp_layer, open_checkpoint
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.models.choose import choose_architecture
from triptych_services.worker.models.decoder import DecoderForCausalLM, MtpLayer
from triptych_services.worker.runner.drafting.create import (
    DRAFT,
    MTP,
    CreateProposer,
    CreateProposers,
    proposers_of,
)
from triptych_services.worker.runner.drafting.draft_model import PART, DraftModel, DraftModelProposer
from triptych_services.worker.runner.drafting.heads import MtpProposer, num_waiting_states
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
        self._config = _config_of(config, architecture)
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
        _check_memory(self.cache_bytes)
        _log_loaded(self._name, self.weight_bytes, self._config, self._kv)

    def create(self, facts: WorkerFacts, history: TokenHistory) -> DraftModelProposer:
        """Create the proposer of a runner; reads the weights again where another one had them."""
        if self._model is None:
            self.load()
        assert self._model is not None, "loaded"
        model, self._model = self._model, None
        return DraftModelProposer(_draft_model(model, self._config, self._kv), facts, history=history)

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
        if any(layer.state is not None for layer in own.layers):
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
        plan = _plan_cache(self._config)
        if len(plan.shape.groups) > 1:
            raise self._refused(
                f"the layers of {self._config.architecture.name} keep different amounts of a token; name one with "
                "layers that are alike"
            )
        return plan

    def _refused(self, why: str) -> FeatureDisabled:
        return FeatureDisabled(f"speculative.model = {self._name}", f"{why}, or leave it empty")


class MtpSource:
    """Loads the layer with which a checkpoint guesses and creates its proposer, as often as a worker wakes.

    Owned by the `RunnerFactory`. It holds the layer until it has created a proposer, as a `DraftSource` does.
    """

    def __init__(self, config: ResolvedConfig, directory: Path) -> None:
        """Find out whether the checkpoint has such a layer; reads no weights.

        Args:
            config: That of the model.
            directory: Directory of the checkpoint.

        Raises:
            FeatureDisabled: There is none; says so.
            ConfigError: `speculative.cache_gib` holds no block.
        """
        speculative, architecture = config.engine.speculative, config.architecture
        if (spec := find_mtp(architecture)) is None:
            raise FeatureDisabled(
                f"speculative.proposers = {speculative.proposers}",
                f"the checkpoint of {architecture.name} has no layer that guesses by its config.json, or none that is "
                "built; leave mtp out",
            )
        self._spec, self._directory = spec, directory
        cache = replace(config.engine.cache, num_blocks=0, memory_fraction=1.0, groups="one")
        self._config = replace(
            config,
            engine=replace(config.engine, cache=cache),
            architecture=replace(
                architecture, layers=(spec.layer,), names=replace(architecture.names, ignored_prefixes=())
            ),
        )
        self._kv = _plan_cache(self._config)
        self._layer: MtpLayer | None = None
        """The loaded layer, until a proposer owns it."""
        self.weight_bytes = 0
        """Bytes of its weights, once it was loaded."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of its KV cache and of the states that wait."""
        num_states = num_waiting_states(self._config.engine.scheduler.max_num_batched_tokens)
        state_bytes = self._config.architecture.hidden_size * TORCH_DTYPES[self._config.dtype].itemsize
        return self._kv.shape.num_blocks * self._kv.shape.block_bytes + num_states * state_bytes

    def load(self) -> None:
        """Read the weights.

        Raises:
            ModelError: A tensor is missing, left over, of another shape or not understood.
            ConfigError: No memory is left for its KV cache.
        """
        load, model = self._config.engine.load, self._config.engine.model
        checkpoint = open_checkpoint(
            self._directory, format=load.format, seed=model.seed, architecture=self._config.architecture
        )
        try:
            self._layer = load_mtp_layer(self._config, checkpoint, self._spec)
        except ModelError as error:
            raise ModelError(f"speculative.proposers: mtp: {error.message}") from error
        check_layers(self._layer, create_attention(self._config))
        self.weight_bytes = weight_bytes(self._layer)
        _check_memory(self.cache_bytes)
        _log_loaded(f"layer {self._spec.prefix}", self.weight_bytes, self._config, self._kv)
        if self._spec.num_layers > 1:
            log.info("it guesses all places: of %d such layers the first is computed", self._spec.num_layers)

    def create(self, model: CausalLM, facts: WorkerFacts, history: TokenHistory) -> MtpProposer:
        """Create the proposer of a runner, which shares the model's embedding and head."""
        if self._layer is None:
            self.load()
        assert self._layer is not None, "loaded"
        layer, self._layer = self._layer, None
        assert isinstance(model, DecoderForCausalLM), "what computes a checkpoint with such a layer"
        layer.share(model)
        draft = _draft_model(layer, self._config, self._kv)
        states = torch.zeros(
            min(PART, facts.max_num_batched_tokens),
            self._config.architecture.hidden_size,
            dtype=TORCH_DTYPES[self._config.dtype],
        )
        return MtpProposer(replace(draft, states_before=states), facts, history=history)


class GuessSources:
    """The loaded parts of a worker that guess. Owned by the `RunnerFactory`."""

    def __init__(self, config: ResolvedConfig, directory: Path, draft_directory: Path | None) -> None:
        """Find out whether all of it fits the model; reads no weights.

        Args:
            draft_directory: Directory of `speculative.model`; None: there is none, or nothing is guessed.

        Raises:
            ModelError, FeatureDisabled, ConfigError: See `DraftSource` and `MtpSource`.
        """
        speculative = config.engine.speculative
        self._speculative = speculative
        self._draft = DraftSource(config, directory, draft_directory) if draft_directory else None
        self._mtp = MtpSource(config, directory) if speculative.wants_mtp else None

    @property
    def _all(self) -> list[DraftSource | MtpSource]:
        return [source for source in (self._draft, self._mtp) if source is not None]

    @property
    def cache_bytes(self) -> int:
        """Bytes of their caches."""
        return sum(source.cache_bytes for source in self._all)

    @property
    def num_bytes(self) -> int:
        """Bytes of their caches and, once they are loaded, weights."""
        return self.cache_bytes + sum(source.weight_bytes for source in self._all)

    def load(self) -> None:
        """Read their weights."""
        for source in self._all:
            source.load()

    def proposers_for(self, model: CausalLM) -> CreateProposers:
        """Return what creates all proposers for a loaded model, those included that nothing is loaded for."""
        loaded: dict[str, CreateProposer] = {}
        if self._draft is not None:
            loaded[DRAFT] = self._draft.create
        if self._mtp is not None:
            loaded[MTP] = partial(self._mtp.create, model)
        return proposers_of(self._speculative, loaded)


def _plan_cache(config: ResolvedConfig) -> KvPlan:
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


def _check_memory(cache_bytes: int) -> None:
    """Raise ConfigError if no memory is left for a cache."""
    if cache_bytes > (free_bytes := host.free_memory()):
        raise ConfigError(
            f"speculative.cache_gib: {cache_bytes // _MIB} MiB, but {free_bytes // _MIB} MiB are free after "
            "loading; lower it"
        )


def _log_loaded(name: str, num_bytes: int, config: ResolvedConfig, kv: KvPlan) -> None:
    log.info(
        "%s guesses: %d MiB of weights (%s), %d MiB for keys and values of %d tokens",
        name,
        num_bytes // _MIB,
        config.quantization,
        kv.shape.num_blocks * kv.shape.block_bytes // _MIB,
        (kv.shape.num_blocks - 1) * kv.shape.block_size,
    )


def _draft_model(model: CausalLM, config: ResolvedConfig, kv: KvPlan) -> DraftModel:
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


def _config_of(config: ResolvedConfig, architecture: ModelArchitecture) -> ResolvedConfig:
    """Return the config of a draft model: the fastest form of its weights, since it decides no token."""
    engine = config.engine
    longest = engine.model.max_model_len or config.architecture.max_context
    model = ModelConfig(
        model=engine.speculative.model,
        quantization="auto",
        backend=engine.model.backend,
        max_model_len=min(longest, architecture.max_context),
        seed=engine.model.seed,
    )
    cache = CacheConfig(groups="one", memory_fraction=1.0)
    speculative = SpeculativeConfig(enabled="false", cache_gib=engine.speculative.cache_gib)
    return resolve_config(replace(engine, model=model, cache=cache, speculative=speculative), architecture)


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
