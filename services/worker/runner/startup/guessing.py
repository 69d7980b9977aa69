"""The loaded parts of a worker that guess tokens: they are found to fit the model, loaded, and given KV caches."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from triptych.checkpoint.eagle import EMBEDDING, is_eagle3, read_eagle3
from triptych.checkpoint.mtp import find_mtp
from triptych.checkpoint.tensor_names import names_of_tensors
from triptych.config import ParallelConfig
from triptych.errors import FeatureDisabled, ModelError
from triptych.types.facts import WorkerFacts
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context.device import TORCH_DTYPES
from triptych_services.worker.context.resolved_config import RankFacts, ResolvedConfig
from triptych_services.worker.layers.attention import check_layers
from triptych_services.worker.layers.weights import weight_bytes
from triptych_services.worker.loader.load import (
    load_eagle3_head,
    load_ends,
    load_mtp_layer,
    open_checkpoint,
)
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.models.decoder import DecoderForCausalLM, MtpLayer
from triptych_services.worker.models.eagle import Eagle3Head
from triptych_services.worker.models.registry import find_model
from triptych_services.worker.runner.drafting.create import (
    DRAFT,
    MTP,
    CreateProposer,
    CreateProposers,
    proposers_of,
)
from triptych_services.worker.runner.drafting.draft_model import PART, DraftModel
from triptych_services.worker.runner.drafting.heads import (
    Eagle3Proposer,
    HeadProposer,
    MtpProposer,
    num_waiting_states,
)
from triptych_services.worker.runner.startup.draft import (
    DraftSource,
    check_memory,
    config_of,
    draft_model,
    log_loaded,
    plan_cache,
)
from triptych_services.worker.sampling.params import TokenHistory

log = logging.getLogger(__name__)


class HeadSource(ABC):
    """Loads what guesses from states of the model and creates its proposer, as often as a worker wakes.

    Owned by the `RunnerFactory`. It holds the head until it has created a proposer, as a `DraftSource` does.
    """

    def __init__(
        self,
        name: str,
        config: ResolvedConfig,
        state_size: int,
        *,
        directory: Path,
        ends: ResolvedConfig | None,
    ) -> None:
        """
        Args:
            name: What the log calls it.
            config: That of one rank; its architecture is the head's.
            state_size: Elements of what it reads of a token.
            directory: Directory of the model.
            ends: The model's config for one rank if the embedding and the head are read from its directory, since ranks
                share them; None: those of the loaded model are used.

        Raises:
            ConfigError: `speculative.cache_gib` holds no block.
        """
        self._name, self._config, self._state_size = name, config, state_size
        self._model_directory, self._ends = directory, ends
        self._kv = plan_cache(config)
        self._head: MtpLayer | Eagle3Head | None = None
        """The loaded head, until a proposer owns it."""
        self.weight_bytes = 0
        """Bytes of its weights, once it was loaded."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of its KV cache and of the states that wait."""
        num_states = num_waiting_states(self._config.engine.scheduler.max_num_batched_tokens)
        state_bytes = self._state_size * TORCH_DTYPES[self._config.dtype].itemsize
        return self._kv.shape.num_blocks * self._kv.shape.block_bytes + num_states * state_bytes

    def load(self) -> None:
        """Read the weights.

        Raises:
            ModelError: A tensor is missing, left over, of another shape or not understood.
            ConfigError: No memory is left for its KV cache.
        """
        self._head = head = self._read()
        check_layers(head, create_attention(self._config))
        self.weight_bytes = weight_bytes(head)
        if self._ends is not None:
            head.share(ends := self._read_ends(self._ends))
            num_bytes = weight_bytes(ends)
            self.weight_bytes += num_bytes
            what = "embedding" if ends.lm_head is None else "embedding and head"
            log.info(
                "%s: this rank also holds the whole %s of the model, %d MiB",
                self._name,
                what,
                num_bytes >> 20,
            )
        check_memory(self.cache_bytes)
        log_loaded(self._name, self.weight_bytes, self._config, self._kv)

    def create(self, model: CausalLM, facts: WorkerFacts, history: TokenHistory) -> HeadProposer:
        """Create the proposer of a runner, which shares parts of the model."""
        if self._head is None:
            self.load()
        assert self._head is not None, "loaded"
        head, self._head = self._head, None
        if self._ends is None:
            assert isinstance(model, DecoderForCausalLM), "what computes a model with such a head"
            head.share(model)
            self.weight_bytes = weight_bytes(head)
        states = torch.zeros(
            min(PART, facts.max_num_batched_tokens),
            self._config.architecture.hidden_size,
            dtype=TORCH_DTYPES[self._config.dtype],
        )
        draft = replace(draft_model(head, self._config, self._kv), states_before=states)
        return self._proposer(head, draft, facts, history)

    def _read_ends(self, config: ResolvedConfig) -> DecoderForCausalLM:
        load, seed, architecture = config.engine.load, config.engine.model.seed, config.architecture
        checkpoint = open_checkpoint(
            self._model_directory, format=load.format, seed=seed, architecture=architecture
        )
        return load_ends(config, checkpoint)

    @abstractmethod
    def _read(self) -> MtpLayer | Eagle3Head:
        """Load the head."""

    @abstractmethod
    def _proposer(
        self, head: nn.Module, draft: DraftModel, facts: WorkerFacts, history: TokenHistory
    ) -> HeadProposer:
        """Create the proposer of what `_read` has loaded."""


class MtpSource(HeadSource):
    """The layer with which a checkpoint guesses."""

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
        self._spec = spec
        cache = replace(config.engine.cache, num_blocks=0, memory_fraction=1.0, groups="one")
        stored = [name for name in names_of_tensors(directory) if spec.holds(name)]
        names = replace(architecture.names, ignored_prefixes=()).of_files(stored)
        of_layer = replace(architecture, layers=(spec.layer,), names=names)
        whole = _of_one_rank(config)
        own = replace(whole, engine=replace(whole.engine, cache=cache), architecture=of_layer)
        super().__init__(
            f"layer {spec.prefix}",
            own,
            architecture.hidden_size,
            directory=directory,
            ends=whole if config.rank.num_ranks > 1 else None,
        )

    def _read(self) -> MtpLayer:
        load, model = self._config.engine.load, self._config.engine.model
        checkpoint = open_checkpoint(
            self._model_directory, format=load.format, seed=model.seed, architecture=self._config.architecture
        )
        try:
            layer = load_mtp_layer(self._config, checkpoint, self._spec)
        except ModelError as error:
            raise ModelError(f"speculative.proposers: mtp: {error.message}") from error
        if self._spec.num_layers > 1:
            log.info("it guesses all places: of %d such layers the first is computed", self._spec.num_layers)
        return layer

    def _proposer(
        self, head: nn.Module, draft: DraftModel, facts: WorkerFacts, history: TokenHistory
    ) -> MtpProposer:
        return MtpProposer(draft, facts, history=history)


class Eagle3Source(HeadSource):
    """An EAGLE-3 head, a checkpoint of its own."""

    def __init__(self, config: ResolvedConfig, directory: Path, head_directory: Path) -> None:
        """Find out whether the head fits the model; reads no weights.

        Args:
            config: That of the model.
            directory: Directory of the model.
            head_directory: Directory of the head.

        Raises:
            ModelError: A file of the head is missing or not understood.
            FeatureDisabled: It cannot guess for the model; says why.
            ConfigError: `speculative.cache_gib` holds no block.
        """
        self._option = f"speculative.model = {config.engine.speculative.model}"
        self._directory = head_directory
        architecture, spec = config.architecture, read_eagle3(head_directory)
        layers = spec.layers_of(architecture.num_layers)
        for what, own, wanted in (
            ("states of {} elements", spec.state_size, architecture.hidden_size),
            ("a vocabulary of {} tokens", spec.vocab_size, architecture.vocab_size),
        ):
            if own != wanted:
                raise self._refused(f"it was trained for {what.format(own)}, and the model has {wanted}")
        if not all(0 <= number <= architecture.num_layers for number in layers):
            raise self._refused(
                f"it reads the states behind {', '.join(map(str, layers))} layers, and the model has "
                f"{architecture.num_layers}"
            )
        size = spec.architecture.hidden_size
        if not spec.has_embedding and size != architecture.hidden_size:
            raise self._refused(
                f"it has no {EMBEDDING}.weight, and its states have {size} elements, not the model's "
                f"{architecture.hidden_size}"
            )
        if not issubclass(find_model(architecture.name), DecoderForCausalLM):
            raise self._refused(f"what computes {architecture.name} gives no states of single layers")
        self._spec = replace(spec, layers=layers)
        of_head = replace(spec.architecture, eos_token_ids=architecture.eos_token_ids)
        quantization = "none" if config.quantization == "none" else "auto"
        own_config = config_of(config, of_head, quantization=quantization, dtype=config.dtype)
        self._tokens: Tensor | None = None
        reads_embedding = config.rank.num_ranks > 1 and not spec.has_embedding
        of_model = replace(config, architecture=replace(architecture, head="none"))
        super().__init__(
            config.engine.speculative.model,
            own_config,
            len(layers) * spec.state_size,
            directory=directory,
            ends=_of_one_rank(of_model) if reads_embedding else None,
        )

    def _read(self) -> Eagle3Head:
        try:
            head, self._tokens = load_eagle3_head(self._config, self._directory, self._spec)
        except ModelError as error:
            raise ModelError(f"speculative.model: {error.message}") from error
        return head

    def _proposer(
        self, head: nn.Module, draft: DraftModel, facts: WorkerFacts, history: TokenHistory
    ) -> Eagle3Proposer:
        assert isinstance(head, Eagle3Head), "see `_read`"
        return Eagle3Proposer(
            draft,
            facts,
            history=history,
            layers=self._spec.layers,
            state_size=self._state_size,
            combine=head.combine,
            tokens=self._tokens,
        )

    def _refused(self, why: str) -> FeatureDisabled:
        return FeatureDisabled(self._option, f"{why}; name a head that was trained for it, or leave it empty")


class GuessSources:
    """The loaded parts of a worker that guess; ranks other than 0 have none. Owned by the `RunnerFactory`."""

    def __init__(self, config: ResolvedConfig, directory: Path, draft_directory: Path | None) -> None:
        """Find out whether all of it fits the model; reads no weights.

        Args:
            draft_directory: Directory of `speculative.model`; None: there is none, or this rank does not guess.

        Raises:
            ModelError, FeatureDisabled, ConfigError: See `DraftSource`, `Eagle3Source` and `MtpSource`.
        """
        speculative = config.engine.speculative
        self._speculative, self._num_ranks = speculative, config.rank.num_ranks
        self._draft: DraftSource | None = None
        self._heads: dict[str, HeadSource] = {}
        """Name in `speculative.proposers` -> what guesses from states."""
        if config.rank.rank > 0:
            return
        if draft_directory is not None and is_eagle3(draft_directory):
            self._heads[DRAFT] = Eagle3Source(config, directory, draft_directory)
        elif draft_directory is not None:
            self._draft = DraftSource(config, directory, draft_directory)
        if speculative.wants_mtp:
            self._heads[MTP] = MtpSource(config, directory)

    @property
    def _all(self) -> list[DraftSource | HeadSource]:
        return [*([] if self._draft is None else [self._draft]), *self._heads.values()]

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
        if self._all and self._num_ranks > 1:
            log.info("rank 0 guesses for all %d ranks, and holds what guesses alone", self._num_ranks)

    def proposers_for(self, model: CausalLM) -> CreateProposers:
        """Return what creates all proposers for a loaded model, those included that nothing is loaded for."""
        loaded: dict[str, CreateProposer] = {
            name: partial(head.create, model) for name, head in self._heads.items()
        }
        if self._draft is not None:
            loaded[DRAFT] = self._draft.create
        return proposers_of(self._speculative, loaded)


def _of_one_rank(config: ResolvedConfig) -> ResolvedConfig:
    """Return the config of the same model if one rank computes it."""
    engine = replace(config.engine, parallel=ParallelConfig())
    return replace(config, engine=engine, rank=RankFacts(device=config.rank.device))
