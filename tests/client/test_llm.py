"""LLM against a GenerationService of twenty lines: window, retries, order, cancelling."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from types import NoneType

import numpy as np
import pytest
from tqdm import tqdm

from tests.helpers.command import wait_until
from tests.helpers.fake_frontend import MAX_MODEL_LEN, FakeFrontend
from triptych import LLM, PartialFailure, SamplingParams
from triptych.client import batch
from triptych.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailure,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    Unauthenticated,
)

HELLO = [{"role": "user", "content": "a b"}]


@pytest.fixture
def frontend():
    with FakeFrontend() as fake:
        yield fake


@pytest.fixture
def llm(frontend):
    with LLM(address=frontend.address) as made:
        yield made


def test_the_classic_example_prints_prompt_and_text(llm):
    outputs = llm.generate(["a b", "c"], SamplingParams(temperature=0.8, top_p=0.95), use_tqdm=False)
    assert [(output.prompt, output.outputs[0].text) for output in outputs] == [("a b", " a b"), ("c", " c")]
    assert all(output.finished and output.request_id for output in outputs)
    assert outputs[0].prompt_token_ids == [0, 1]
    choice = outputs[0].outputs[0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([1, 2], "stop", ".")
    assert choice.cumulative_logprob == pytest.approx(-1.0)


def test_outputs_come_in_the_order_of_the_prompts(llm, frontend):
    frontend.token_delay_s = 0.002
    prompts = [f"p{i} " + "x " * (i * 7 % 5) for i in range(40)]  # short ones overtake long ones
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text.split()[0] for output in outputs] == [f"p{i}" for i in range(40)]


def test_one_prompt_in_any_form(llm):
    assert llm.generate("a", use_tqdm=False)[0].outputs[0].text == " a"
    assert llm.generate([4, 5], use_tqdm=False)[0].outputs[0].text == " 4 5"
    assert llm.generate(np.array([4, 5]), use_tqdm=False)[0].outputs[0].text == " 4 5"
    assert len(llm.generate(np.array([[4, 5], [6, 7]]), use_tqdm=False)) == 2
    assert len(llm.generate((text for text in ("a", "b")), use_tqdm=False)) == 2
    assert llm.generate(HELLO, use_tqdm=False)[0].outputs[0].text == " a b"
    assert llm.chat(HELLO, use_tqdm=False)[0].prompt is None
    assert len(llm.chat([HELLO, HELLO], use_tqdm=False)) == 2
    assert llm.generate([], use_tqdm=False) == []


def test_all_choices_of_a_prompt_come_back(llm):
    [output] = llm.generate("a b", SamplingParams(n=3), use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert output.usage.num_output_tokens == 6


def test_events_of_a_later_version_are_ignored(llm, frontend):
    frontend.adds_unknown = True
    outputs = llm.generate(["a b", "c"], use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [" a b", " c"]


def test_one_stream_carries_all_prompts(llm, frontend):
    assert len(llm.generate(["a"] * 30, use_tqdm=False)) == 30
    assert frontend.num_batches == 1


def test_parallel_sampling_params_go_with_their_prompts(llm, frontend):
    llm.generate(["a", "b"], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=4)], use_tqdm=False)
    assert {r.generation.text.text: r.generation.length.max_tokens for r in frontend.requests} == {
        "a": 3,
        "b": 4,
    }
    with pytest.raises(InvalidRequest, match="sampling_params: 1 of them for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)


def test_a_thousand_prompts_keep_within_the_window(llm, frontend):
    frontend.waits_for_running = batch.MAX_IN_FLIGHT
    assert len(llm.generate(["a"] * 1000, use_tqdm=False)) == 1000
    assert frontend.max_running == batch.MAX_IN_FLIGHT
    assert frontend.num_refused == 0


def test_the_window_is_as_wide_as_the_engines(llm, frontend):
    frontend.max_running_choices, frontend.waits_for_running = 600, 750
    assert len(llm.generate(["a"] * 1000, use_tqdm=False)) == 1000
    assert frontend.max_running == 750  # 600 and as many more as keep them busy


def test_a_thousand_prompts_simply_work_on_a_server_that_refuses_beyond_eighty(llm, frontend):
    frontend.capacity, frontend.token_delay_s = 80, 0.1
    frontend.waits_for_refusals = 1  # the window is wider than the capacity, however slow the machine is
    outputs = llm.generate([f"p{i}" for i in range(1000)], use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [f" p{i}" for i in range(1000)]
    assert 0 < frontend.num_refused < 400  # 130 to 200; 550 to 1400 if the window did not learn


def test_retry_info_is_obeyed(llm, frontend):
    frontend.errors = [QueueFull("full", retry_after_s=0.3)]
    started = time.monotonic()
    llm.generate("a", use_tqdm=False)
    assert time.monotonic() - started >= 0.3
    assert len(frontend.requests) == 2


def test_a_server_that_is_away_for_a_moment_is_asked_again(llm, frontend, monkeypatch):
    monkeypatch.setattr(batch, "REDIAL_PAUSE_S", 0.05)
    frontend.errors = [EngineUnavailable("restarting")] * 3
    assert len(llm.generate(["a", "b"], use_tqdm=False)) == 2


def test_a_stack_of_our_own_that_has_failed_is_not_asked_again(llm, frontend, monkeypatch):
    def fail():
        raise EngineUnavailable("the worker died 6 times")

    monkeypatch.setattr(llm._connection, "check", fail)
    frontend.errors = [EngineUnavailable("gone")]
    with pytest.raises(EngineUnavailable, match="died 6 times"):
        llm.generate(["a"], use_tqdm=False)


def test_a_server_that_stays_full_is_given_up(frontend, monkeypatch):
    monkeypatch.setattr(batch.Batch.__init__, "__kwdefaults__", {"max_in_flight": 4, "stall_limit_s": 0.2})
    frontend.capacity = 0
    with LLM(address=frontend.address) as llm, pytest.raises(QueueFull, match="0 may"):
        llm.generate(["a", "b"], use_tqdm=False)


def test_a_bad_prompt_loses_no_other_and_the_error_holds_them_all(llm):
    prompts = ["a", "", "b c", ""]
    with pytest.raises(
        PartialFailure, match=r"^2 of 4 prompts failed, first prompts\[1\]: prompt: is empty"
    ) as caught:
        llm.generate(prompts, use_tqdm=False)
    assert isinstance(caught.value.__cause__, InvalidRequest)
    returned = llm.generate(prompts, use_tqdm=False, on_error="return")
    for outputs in (caught.value.outputs, returned):
        assert [output.prompt for output in outputs] == prompts
        assert [type(output.error) for output in outputs] == [NoneType, InvalidRequest] * 2
        assert [len(output.outputs) for output in outputs] == [1, 0, 1, 0]
        assert all(output.finished for output in outputs)


def test_a_lone_prompt_raises_its_own_error(llm):
    with pytest.raises(InvalidRequest, match=r"^prompt: is empty$"):
        llm.generate([""], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="on_error: expected raise or return, not 'ignore'"):
        llm.generate("a", use_tqdm=False, on_error="ignore")


def test_an_error_that_all_would_meet_ends_all_but_what_is_done(llm, frontend):
    frontend.errors = [Unauthenticated("who are you?")]
    with pytest.raises(Unauthenticated, match="who are you"):
        llm.generate(["hang"] * 3, use_tqdm=False)
    wait_until(lambda: frontend.num_running == 0)
    assert llm.generate("a", use_tqdm=False)[0].finished


def test_a_prompt_past_its_time_fails_alone(llm):
    outputs = llm.generate(["a", "hang"], use_tqdm=False, on_error="return", timeout_s=[None, 0.2])
    assert outputs[0].outputs[0].text == " a"
    assert isinstance(outputs[1].error, DeadlineExceeded)
    with pytest.raises(InvalidRequest, match="timeout_s: 0 is not a time"):
        llm.generate("a", timeout_s=0)


def test_a_full_server_is_not_asked_past_the_time(frontend):
    frontend.capacity = 0
    with LLM(address=frontend.address) as llm, pytest.raises(DeadlineExceeded, match=r"timeout_s.*0\.2 s"):
        llm.generate("a", use_tqdm=False, timeout_s=0.2)


def test_options_go_with_their_prompts(llm, frontend):
    prompts = [{"prompt": "a"}, {"prompt_token_ids": [5], "prompt": "five", "cache_salt": "own"}, "c"]
    outputs = llm.generate(
        prompts, use_tqdm=False, priority=[3, 1, 2], tenant="me", cache_salt=["x", "y", "z"], timeout_s=9
    )
    assert [output.prompt for output in outputs] == ["a", "five", "c"]
    sent = {r.generation.text.text: r.generation for r in frontend.requests}
    assert {text: (g.priority, g.tenant, g.cache.salt) for text, g in sent.items()} == {
        "a": (3, "me", "x"),
        "": (1, "me", "own"),
        "c": (2, "me", "z"),
    }
    with pytest.raises(InvalidRequest, match="priority: 2 of them for 3 prompts; tenant: 1 of them for 3"):
        llm.generate(prompts, priority=[1, 2], tenant=["me"])


def test_conversations_carry_their_options(llm, frontend):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    spoken = [*HELLO, {"role": "assistant", "content": "So"}]
    llm.chat(
        iter([spoken, spoken]), use_tqdm=False, tools=[tool], chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False, continue_final_message=True, priority=[1, 2],
    )  # fmt: skip
    assert sorted(r.generation.priority for r in frontend.requests) == [1, 2]
    chat = frontend.requests[0].generation.chat
    assert (chat.tools[0].name, chat.template_kwargs_json) == ("add", '{"enable_thinking": false}')
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)


def test_credentials_travel(frontend):
    seen = {}

    def note(context):
        seen.update(context.invocation_metadata())

    frontend.on_call = note
    with LLM(address=frontend.address, api_key="tk-1", metadata={"x-team": "blue"}) as llm:
        llm.generate("a", use_tqdm=False)
    assert (seen["authorization"], seen["x-team"]) == ("Bearer tk-1", "blue")
    with pytest.raises(ConfigError, match="metadata: 'X-Team' is not a lower case key"):
        LLM(address=frontend.address, metadata={"X-Team": "blue"})


def test_the_address_may_come_from_the_environment(frontend, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_ADDRESS", frontend.address)
    with LLM() as llm:
        assert llm.address == frontend.address
    with pytest.raises(ConfigError, match=r"max_num_seqs: .*TRIPTYCH_ADDRESS"):
        LLM(max_num_seqs=4)
    for address in ("http://127.0.0.1:8000", "localhost"):
        with pytest.raises(ConfigError, match="is not host:port of a gRPC server"):
            LLM(address=address)


def test_the_tokenizer_is_the_servers_and_is_fetched_once(llm, frontend):
    tokenizer = llm.get_tokenizer()
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|eos|>", MAX_MODEL_LEN)
    assert tokenizer.decode(tokenizer.encode("Hello ü")) == "Hello ü"
    assert llm.get_tokenizer() is tokenizer
    assert frontend.tokenizer.num_calls == 1


def test_steering_needs_the_admin_address(llm):
    with pytest.raises(ConfigError, match="admin_address: give it with address"):
        llm.sleep()
    with pytest.raises(InvalidRequest, match="level: 3 is neither 1 nor 2"):
        llm.sleep(level=3)


def test_an_error_of_the_engine_is_not_retried(llm, frontend):
    frontend.errors = [EngineFailure("broken")]
    with pytest.raises(EngineFailure, match="broken"):
        llm.generate("a", use_tqdm=False)
    assert len(frontend.requests) == 1


def test_keyboard_interrupt_cancels_what_runs(llm, frontend):
    def interrupt():
        wait_until(lambda: frontend.num_running == 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hang", "hang"], use_tqdm=False)
    wait_until(lambda: frontend.num_cancelled == 2)
    assert llm.generate("a", use_tqdm=False)[0].finished


def test_the_progress_bar_tells_tokens_per_second_and_can_be_turned_off(llm, capsys):
    llm.generate(["a", "b"], use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"])
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s out" in shown


def test_the_progress_bar_may_be_the_callers(llm):
    made = []

    def make(**arguments):
        made.append(tqdm(**arguments, disable=True))
        return made[0]

    llm.generate(["a", "b"], use_tqdm=make)
    assert made[0].total == 2


def test_a_closed_llm_says_so(frontend):
    llm = LLM(address=frontend.address)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_closing_ends_what_another_thread_waits_for(frontend):
    llm = LLM(address=frontend.address)
    outcomes = []

    def generate():
        try:
            llm.generate("hang", use_tqdm=False)
        except CancelledError as error:
            outcomes.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    wait_until(lambda: frontend.num_running == 1)
    llm.close()
    thread.join(timeout=60)
    assert len(outcomes) == 1


def test_options_of_a_stack_are_refused_for_one_that_runs(frontend):
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(address=frontend.address, max_num_seqs=4)


def test_a_program_that_forgets_to_close_ends_all_the_same(frontend):
    program = f"from triptych import LLM\nllm = LLM(address={frontend.address!r})\n"
    program += "print(llm.generate('a b', use_tqdm=False)[0].outputs[0].text)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, " a b\n", "")
