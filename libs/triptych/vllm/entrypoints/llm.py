"""`LLM` as vLLM has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triptych.client import llm
from triptych.client.batch import Job, UseTqdm
from triptych.client.beam_search import BeamSearchOutput, BeamSearchParams
from triptych.client.conversation import Conversation, Tool
from triptych.client.grpc_client import ServedModel
from triptych.client.prompts import AnyPrompts, parse_conversations
from triptych.client.served_tokenizer import ServedTokenizer
from triptych.errors import InvalidRequest
from triptych.types.outputs import RequestOutput
from triptych.vllm.engine.arg_utils import EngineArgs
from triptych.vllm.lora.request import LoadedAdapters, LoRARequest, LoRARequests, names_of
from triptych.vllm.requests import Seeds, read_template, refuse, to_template_messages
from triptych.vllm.sampling_params import SamplingParams

WAKE_TAGS = ("weights", "kv_cache")
"""Parts of an engine that vLLM wakes one by one. Here the first call wakes all of it."""


def check_tags(tags: Sequence[str] | None) -> None:
    """Raise InvalidRequest for tags of `wake_up` that are none of vLLM's."""
    if unknown := sorted(set(tags or ()) - set(WAKE_TAGS)):
        raise InvalidRequest("tags", f"{unknown[0]!r:.40} is none of {', '.join(WAKE_TAGS)}")


class LLM(llm.LLM):
    """`triptych.LLM` with vLLM's arguments and ways.

        llm = LLM(model="embedded", max_model_len=2048)
        outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8))

    `generate` returns when all prompts are done, whatever `output_kind` says.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        seed: int | None = 0,
        chat_template: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        """
        Args:
            model: A directory, a .gguf file, a hub id or `embedded`, the default; with an address, a model of it.
            seed: Requests without a seed get theirs from it, so that a program says the same in each run. None: they
                differ.
            chat_template: Jinja source, or a file that has it, in place of the model's own.
            arguments: As of `triptych.LLM`, and vLLM's. What asks for nothing, or cannot change an answer, is taken;
                what would change one and is not served is refused by name.
        """
        self._chat_template = read_template(chat_template)
        self._seeds = Seeds(seed)
        self._loaded = LoadedAdapters()
        super().__init__(model, **arguments)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Start a stack with these arguments."""
        return cls(**vars(engine_args))

    def generate(  # type: ignore[override]
        self,
        prompts: AnyPrompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; see `triptych.LLM.generate`, which has the options."""
        refuse(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        priority = 0 if priority is None else priority
        options = {**options, **self._adapters_of(lora_request)}
        return super().generate(prompts, sampling_params, use_tqdm, priority=priority, **options)

    def chat(  # type: ignore[override]
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate the assistant's next turn in one conversation or many.

        The prompt is rendered here, and the output's text is all that the model has written: its reasoning and its
        calls of tools are in it, as vLLM leaves them. `triptych.LLM.chat` takes them apart.

        Args:
            chat_template: Jinja source, or a file that has it, in place of the model's own.
            chat_template_content_format: `openai` gives contents that are lists of parts to the template as they are.
        """
        tokenizer = self.get_tokenizer()
        source = read_template(chat_template) or self._chat_template
        if add_generation_prompt and continue_final_message:
            add_generation_prompt = False  # a turn that goes on is not opened again
        prompts = []
        for conversation in parse_conversations(messages):
            turns: Any = conversation.content
            text = tokenizer.apply_chat_template(
                to_template_messages(turns, chat_template_content_format),
                tools,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(
            prompts, sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, mm_processor_kwargs,
            **options,
        )  # fmt: skip

    def beam_search(  # type: ignore[override]
        self,
        prompts: AnyPrompts,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
        **options: Any,
    ) -> list[BeamSearchOutput]:
        """Search the likeliest sequences; see `triptych.LLM.beam_search`."""
        options = {**options, **self._adapters_of(lora_request)}
        return super().beam_search(prompts, params, use_tqdm, concurrency_limit=concurrency_limit, **options)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling parameters, which may be changed."""
        return SamplingParams(**self._served_model().default_sampling)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:  # type: ignore[override]
        """End a sleep, and return True when the engines can compute.

        Args:
            tags: Parts to wake, of `weights` and `kv_cache`. Whatever they are, all of it wakes.
        """
        check_tags(tags)
        super().wake_up()
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes, and return True; nothing else has a reset here.

        Raises:
            WrongState: A request holds blocks.
        """
        if reset_running_requests:
            raise InvalidRequest("reset_running_requests", "is not served; sleep and wake_up end what runs")
        return super().reset_prefix_cache()

    @property
    def model_config(self) -> ModelConfig:
        """The facts that are known of the model."""
        return ModelConfig.of(self._served_model())

    @property
    def llm_engine(self) -> Engine:
        """The part of the engine that programs look into."""
        return Engine(self.model_config, self.get_tokenizer())

    def _adapters_of(self, given: LoRARequests) -> dict[str, Any]:
        """Load the adapters that are not, and return the option that names those of the prompts."""
        for request in self._loaded.missing(given):
            self.load_adapter(request.lora_name, request.lora_path)
            self._loaded.note(request)
        return {} if given is None else {"adapter": names_of(given)}

    def _served_model(self) -> ServedModel:
        return self._loop.run(self._client().get_model(self._connection.model_name))

    def _run_batch(self, jobs: list[Job], use_tqdm: UseTqdm, on_error: str) -> list[RequestOutput]:
        """Take the parameters as they are now, so that no change of them reaches what runs."""
        submitted = []
        for job in jobs:
            options = job.options
            if isinstance(job.sampling, SamplingParams) and job.sampling.truncate_prompt_tokens is not None:
                options = replace(options, truncate_prompt_tokens=job.sampling.truncate_prompt_tokens)
            submitted.append(replace(job, sampling=self._seeds.freeze(job.sampling), options=options))
        return super()._run_batch(submitted, use_tqdm, on_error)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts that programs read of vLLM's ModelConfig."""

    model: str
    """The name that requests use."""
    max_model_len: int
    """Tokens that prompt and output may have together."""
    vocab_size: int
    """Size of the vocabulary."""

    @classmethod
    def of(cls, served: ServedModel) -> ModelConfig:
        """Return the facts of a served model."""
        return cls(served.name, served.max_model_len, served.vocab_size)

    def get_vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts that programs read of vLLM's LLMEngine."""

    model_config: ModelConfig
    tokenizer: ServedTokenizer

    def get_tokenizer(self) -> ServedTokenizer:
        """Return the model's tokenizer."""
        return self.tokenizer
