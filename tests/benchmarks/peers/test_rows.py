"""What is measured, and with which prompts."""

from __future__ import annotations

from benchmarks.peers.rows import MAX_MODEL_LEN, MAX_NUM_SEQS, ROWS, Workload, draw_prompts

WORKLOAD = Workload(3, 20, 5)


def test_the_same_key_gives_the_same_prompts_and_another_one_others():
    prompts = draw_prompts(WORKLOAD, 1000, 7, 1, 0)
    assert prompts == draw_prompts(WORKLOAD, 1000, 7, 1, 0)
    assert all(prompts != draw_prompts(WORKLOAD, 1000, *key) for key in ((8, 1, 0), (7, 2, 0), (7, 1, 1)))


def test_prompts_have_the_asked_shape_and_share_no_prefix():
    prompts = draw_prompts(Workload(64, 128, 1), 49152, 0)
    assert [len(prompt) for prompt in prompts] == [128] * 64
    assert all(0 <= token_id < 49152 for prompt in prompts for token_id in prompt)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 64


def test_rates_are_output_tokens_over_the_whole_time_and_prompt_tokens_for_prefill():
    by_key = {row.key: row for row in ROWS}
    assert by_key["8"].figure(wall_s=2.0) == 8 * 128 / 2.0
    assert by_key["prefill"].figure(wall_s=0.5) == 1024 / 0.5


def test_every_workload_fits_what_the_engines_are_told_to_expect():
    workloads = [row.workload for row in ROWS if row.workload is not None]
    assert workloads
    assert all(one.num_prompts <= MAX_NUM_SEQS for one in workloads)
    assert all(one.input_len + one.output_len <= MAX_MODEL_LEN for one in workloads)
