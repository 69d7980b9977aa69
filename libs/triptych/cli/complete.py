"""Send prompts to a served model and print the answers. A single answer is printed as it comes.

triptych complete "Once upon a time" --max-tokens 64
triptych complete --chat "What is the capital of France?" --temperature 0 --stats
git diff | triptych complete --chat -
triptych complete "A" "B" --prompt-file c.txt --n 2 --logprobs 3 --json
triptych complete --chat "Paris, as JSON" --json-schema city.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from triptych.cli.access import add_address_argument, frontend_of, read_text
from triptych.cli.chat_options import add_chat_arguments, chat_options_of, opening_of
from triptych.cli.sampling_flags import add_form_arguments, add_sampling_arguments, sampling_of
from triptych.cli.streaming import AnswerPrinter, visible, write_now
from triptych.cli.wait_notice import WaitNotice
from triptych.client.collect import OutputCollector
from triptych.client.grpc_client import GenerationClient
from triptych.client.prompts import Prompt
from triptych.client.request import RequestOptions, Sampling
from triptych.errors import ConfigError, TriptychError
from triptych.types.outputs import RequestOutput

_MAX_IN_FLIGHT = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="*", help="text to continue; - reads all of stdin as one prompt"
    )
    parser.add_argument(
        "--prompt-file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a file that is one more prompt; may be repeated",
    )
    add_address_argument(parser)
    parser.add_argument(
        "--model", default="", help="which of the models served there (default: the only one)"
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's turn, not plain text")
    add_chat_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per prompt: the fields of `RequestOutput`"
    )
    parser.add_argument("--stats", action="store_true", help="print TTFT and tokens/s to stderr")
    add_form_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_complete(arguments))


async def _complete(arguments: argparse.Namespace) -> int:
    prompts = _prompts(arguments)
    sampling = sampling_of(arguments)
    options = RequestOptions(model=arguments.model, chat=chat_options_of(arguments))
    shows_more = arguments.json or {"logprobs", "prompt_logprobs"} & sampling.keys()
    streams = not shows_more and len(prompts) == 1 and sampling.get("n", 1) == 1
    if arguments.stats and not streams:
        raise ConfigError("--stats: times a single answer that streams, without --json and --logprobs")
    async with frontend_of(arguments).open_client() as client:
        notice = WaitNotice(client)
        if streams:
            printer = AnswerPrinter()
            await printer.print(notice.watch(client.generate(prompts[0], sampling, options)))
            write_now("\n")
            if arguments.stats:
                print(printer.stats, file=sys.stderr)
            return 0
        results = await _answer_all(client, notice, prompts, sampling, options)
    failures = [result for result in results if isinstance(result, TriptychError)]
    if len(failures) == len(results):
        raise failures[0]
    for number, result in enumerate(results):
        if isinstance(result, TriptychError):
            print(f"triptych complete: prompt {number}: {visible(str(result))}", file=sys.stderr)
        elif arguments.json:
            print(json.dumps(dataclasses.asdict(result), default=list))  # bytes become lists of numbers
        else:
            _print_output(result, number if len(results) > 1 else None, "logprobs" in sampling)
    return 1 if failures else 0


async def _answer_all(
    client: GenerationClient,
    notice: WaitNotice,
    prompts: list[Prompt],
    sampling: Sampling,
    options: RequestOptions,
) -> list[RequestOutput | TriptychError]:
    """Return the answer to each prompt, or why there is none."""
    places = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def answer(prompt: Prompt) -> RequestOutput | TriptychError:
        collector = OutputCollector(prompt if isinstance(prompt, str) else None)
        try:
            async with places:
                async for event in notice.watch(client.generate(prompt, sampling, options)):
                    collector.add(event)
        except TriptychError as error:
            return error
        return collector.output

    return await asyncio.gather(*(answer(prompt) for prompt in prompts))


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts in the order of the command line, those from files last."""
    texts = [sys.stdin.read() if text == "-" else text for text in arguments.prompt]
    texts += [read_text(file, "--prompt-file") for file in arguments.prompt_file]
    if not texts:
        raise ConfigError("PROMPT: none is given; name one, `-` for stdin, or --prompt-file")
    for option in ("system", "tools", "chat_template_kwargs"):
        if getattr(arguments, option) and not arguments.chat:
            raise ConfigError(f"--{option.replace('_', '-')}: is for a conversation; add --chat")
    if not arguments.chat:
        return list(texts)
    return [[*opening_of(arguments), {"role": "user", "content": text}] for text in texts]


def _print_output(output: RequestOutput, number: int | None, has_logprobs: bool) -> None:
    """Print the choices of one prompt, with headings where there are several answers."""
    if output.prompt_logprobs is not None:
        _print_table("prompt", output.prompt_logprobs[1:])
    for choice in output.outputs:
        names = [] if number is None else [f"prompt {number}"]
        names += [f"choice {choice.index}"] * (len(output.outputs) > 1)
        if names:
            write_now(f"==> {', '.join(names)} <==\n")
        write_now(f"{choice.text}\n")
        for call in choice.tool_calls:
            write_now(f"{call.name}({call.arguments})\n")
        if has_logprobs and choice.logprobs is not None:
            _print_table("output", choice.logprobs)


def _print_table(what: str, entries: Any) -> None:
    """Print one line per token: its log-probability, itself, and the best alternatives."""
    write_now(f"{'logprob':>9}  {what} token, best alternatives\n")
    for entry in entries:
        rivals = "  ".join(f"{rival.text!r} {rival.logprob:.3f}" for rival in entry.top)
        write_now(f"{entry.chosen.logprob:9.4f}  {entry.chosen.text!r:<16} {rivals}".rstrip() + "\n")
